"""Failed logins by source: when an address has to wait, and which failures get a line."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from downrange.auth.login_failures import (
    BURST,
    MOST_LINES_A_MINUTE,
    MOST_SOURCES,
    QUIET_SECONDS,
    LoginFailures,
    source_of,
)


def fail(failures: LoginFailures, address: str, times: int, now: float = 0.0) -> list[int | None]:
    return [failures.failed(address, now) for _ in range(times)]


def test_an_address_is_in_debt_after_its_burst_and_free_again_soon_after() -> None:
    failures = LoginFailures()
    fail(failures, "10.0.0.1", BURST - 1)
    assert not failures.is_in_debt("10.0.0.1", 0)
    fail(failures, "10.0.0.1", 1000)
    assert failures.is_in_debt("10.0.0.1", 0.9)
    assert not failures.is_in_debt("10.0.0.1", 1.1)
    assert not failures.is_in_debt("10.0.0.2", 0)
    assert failures.count == BURST + 999


def test_an_address_gets_one_line_a_minute_that_tells_how_many_were_left_out() -> None:
    failures = LoginFailures()
    assert fail(failures, "10.0.0.1", 5) == [0, None, None, None, None]
    assert fail(failures, "10.0.0.2", 1) == [0]
    assert fail(failures, "10.0.0.1", 1, QUIET_SECONDS - 0.1) == [None]
    assert fail(failures, "10.0.0.1", 2, QUIET_SECONDS) == [5, None]


def test_many_addresses_neither_fill_the_log_nor_the_memory() -> None:
    failures = LoginFailures()
    lines = [failures.failed(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 0.0) for number in range(20_000)]
    assert sum(line is not None for line in lines) == MOST_LINES_A_MINUTE
    assert len(failures) == MOST_SOURCES


def test_a_network_of_ipv6_is_one_source() -> None:
    assert source_of("2001:db8:1:2::1") == source_of("2001:db8:1:2:ffff::9") != source_of("2001:db8:1:3::1")
    assert source_of("::ffff:10.0.0.1") == source_of("10.0.0.1")
    assert source_of("fe80::1%eth0") == source_of("fe80::2")
    assert source_of("no:address") == "no:address"


events = st.lists(
    st.tuples(st.sampled_from(["10.0.0.1", "10.0.0.2", "2001:db8::1"]), st.floats(0, 100)), min_size=1, max_size=200
)


@given(events)
def test_whoever_waits_for_a_second_without_failing_is_not_in_debt(steps: list[tuple[str, float]]) -> None:
    failures, now = LoginFailures(), 0.0
    for address, pause in steps:
        now += pause
        failures.failed(address, now)
    assert failures.count == len(steps)
    assert not any(failures.is_in_debt(address, now + 1.001) for address, _ in steps)


@given(events)
def test_nobody_fails_more_often_than_the_bucket_allows_before_being_in_debt(steps: list[tuple[str, float]]) -> None:
    """Attempts that respect the wait are bounded by burst + one for each second, and lines by one for each minute."""
    failures, now = LoginFailures(), 0.0
    counted: dict[str, int] = {}
    lines: dict[str, int] = {}
    for address, pause in steps:
        now += pause / 100
        if failures.is_in_debt(address, now):
            continue
        counted[address] = counted.get(address, 0) + 1
        if failures.failed(address, now) is not None:
            lines[address] = lines.get(address, 0) + 1
    assert all(count <= BURST + now + 1 for count in counted.values())
    assert all(count <= now / QUIET_SECONDS + 1 for count in lines.values())
