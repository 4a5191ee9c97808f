"""Address patterns of white lists, against a model that compares texts part by part."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from downrange.auth.remote_address import matches, parse_addresses


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("*", ["1.2.3.4", "::1"], ["nonsense", ""]),
        ("*.*.*.*", ["1.2.3.4", "::1"], []),
        ("*:*:*:*:*:*:*:*", ["1.2.3.4", "::1"], []),
        ("", [], ["1.2.3.4", ""]),
        ("  ", [], ["1.2.3.4", ""]),
        ("10.1.2.3", ["10.1.2.3", "::ffff:10.1.2.3"], ["10.1.2.4", "10.1.2.33", "::a01:203"]),
        ("10.1.2.3, 10.1.2.5", ["10.1.2.3", "10.1.2.5"], ["10.1.2.4"]),
        ("10.1.2.{3,5}", ["10.1.2.3", "10.1.2.5"], ["10.1.2.4"]),
        ("10.1.2.*", ["10.1.2.0", "10.1.2.255"], ["10.1.3.0", "10.1.1.255", "10.10.2.1"]),
        ("10.1.*.*", ["10.1.0.0", "10.1.255.255"], ["10.2.0.0", "110.1.0.0"]),
        ("10.*.*.*", ["10.0.0.0", "10.255.255.255"], ["11.0.0.0"]),
        ("10.1.2.7-20", ["10.1.2.7", "10.1.2.20"], ["10.1.2.6", "10.1.2.21", "10.1.3.7"]),
        ("10.1.3-9.*", ["10.1.3.0", "10.1.9.255"], ["10.1.2.255", "10.1.10.0"]),
        ("fe80::1", ["fe80::1", "FE80:0:0:0:0:0:0:1", "fe80::1%eth0"], ["fe80::2", "1.2.3.4"]),
        ("fe80::{1,b}", ["fe80::1", "fe80::b"], ["fe80::2"]),
        ("fe80::5:*", ["fe80::5:0", "fe80::5:ffff"], ["fe80::6:0"]),
        ("fe80::5:1-ff", ["fe80::5:1", "fe80::5:ff"], ["fe80::5:0", "fe80::5:100"]),
        ("fe80::1-2:*", ["fe80::1:0", "fe80::2:ffff"], ["fe80::", "fe80::3:0"]),
    ],
)
def test_a_pattern_stands_for_its_addresses(pattern: str, inside: list[str], outside: list[str]) -> None:
    addresses = parse_addresses(pattern)
    assert [address for address in inside if not matches(addresses, address)] == []
    assert [address for address in outside if matches(addresses, address)] == []


@pytest.mark.parametrize(
    "pattern",
    [
        "nonsense", "999.1.1.1", "10.1.2", "10.1.2.3.4", "10.1.2.3:9876", "*.1.2.3", "10.*.2.3", "10.1.3-9.7",
        "10.1.2.-5", "10.1.2.5-", "10.1.2.9-7", "10.1.2.1-256", "10.1.2.1-2-3", "10.1.2.+1-+2", "10.1.2.1_0-20",
        "10.1.2.{}", "{1,2}", "10.1.2{1,2}", "10.1.2.{1,999}", "10.1.2.{1", "10.1.2.3,", "10.1.2.3,10.1.2.*",
        "10.1.2.0/24", "fe80::*:1", "fe80:*:*:*:*:*:*:*", "fe80::1-fffff", "fe80::g-h", "**", "-", "10.1.2.**",
        "localhost", "10.1.2.1\n-2\x00",
    ],
)  # fmt: skip
def test_a_wrong_pattern_is_named(pattern: str) -> None:
    with pytest.raises(ValueError, match="is no address pattern"):
        parse_addresses(pattern)


octets = st.integers(0, 255)
few = st.sampled_from([0, 1, 2, 9, 10, 99, 100, 254, 255])


@st.composite
def v4_patterns(draw: st.DrawFn) -> str:
    parts = [str(draw(few)) for _ in range(4)]
    place = draw(st.integers(1, 3))
    low, high = sorted((draw(few), draw(few)))
    kind = draw(st.sampled_from(["one", "star", "range", "braces", "list"]))
    if kind == "one":
        return ".".join(parts)
    if kind == "braces":
        return ".".join(parts[:3]) + ".{" + ",".join(str(draw(few)) for _ in range(3)) + "}"
    if kind == "list":
        return ",".join([".".join(parts), ".".join(reversed(parts))])
    return ".".join(parts[:place] + ["*" if kind == "star" else f"{low}-{high}"] + ["*"] * (3 - place))


def model(pattern: str, address: str) -> bool:
    """Whether an IPv4 address matches, part by part as text."""
    if pattern.endswith("}"):
        head, _, tail = pattern[:-1].partition("{")
        return any(model(head + part, address) for part in tail.split(","))
    if "," in pattern:
        return any(model(part, address) for part in pattern.split(","))
    for want, have in zip(pattern.split("."), address.split("."), strict=True):
        low, minus, high = want.partition("-")
        if want != "*" and (not int(low) <= int(have) <= int(high) if minus else want != have):
            return False
    return True


@given(v4_patterns(), st.tuples(few, few, few, few))
def test_patterns_match_as_the_model_does(pattern: str, parts: tuple[int, ...]) -> None:
    address = ".".join(map(str, parts))
    addresses = parse_addresses(pattern)
    assert matches(addresses, address) is model(pattern, address)
    assert matches(addresses, f"::ffff:{address}") is model(pattern, address)


@given(st.text("0123456789abcdef.:*-,{} \n%[]/x", max_size=30) | st.text(max_size=20), st.text(max_size=20))
def test_any_text_is_a_pattern_or_refused(pattern: str, address: str) -> None:
    try:
        addresses = parse_addresses(pattern)
    except ValueError:
        return
    assert all(0 <= one.first <= one.last < 1 << one.bits for one in addresses)
    matches(addresses, address)
