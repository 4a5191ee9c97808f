"""Formats, tables, configuration, users, plans that were kept, samples of a stream, and vendored files."""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import replace
from datetime import UTC
from importlib import resources
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from downrange.client.admin import Admin
from downrange.client.admin.plans import Change, Plan, PlanDrifted, PlanKind, PlanRequest
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.per_server import PerServer
from downrange.clock import ManualClock
from downrange.console import formats
from downrange.console.config import AccessConfig, ConsoleConfig, LoginKind, is_address, parse_clusters
from downrange.console.history_file import HistoryFile
from downrange.console.pages import to_json
from downrange.console.plans import KEPT_MILLIS, PlanGone, Plans, _encoded, sentences
from downrange.console.tables import Column, listing, to_csv
from downrange.console.tail import Reservoir
from downrange.console.users_file import Role, UsersFile, add_user
from downrange.console.views.account import safe_target
from downrange.model.message import MessageQueue
from downrange.model.text import Text, as_is
from downrange.settings import ConfigError

NOW = 1_800_000_000_000


@given(text=st.text())
def test_hidden_characters_are_shown(text: str) -> None:
    shown = formats.visible(text)
    assert not re.search(r"[\u202a-\u202e\u2066-\u2069\u0000-\u0008\u000b-\u001f\u007f]", shown)
    if text.isprintable():
        assert formats.visible(text) == text or not text.isascii()


@pytest.mark.parametrize(
    ("millis", "text"),
    [(None, "unknown"), (12, "12 ms"), (12_000, "12 s"), (26 * 60_000, "26 min"), (71 * 3_600_000, "71 h")],
)
def test_lengths_of_time(millis: float | None, text: str) -> None:
    assert formats.span(millis) == text


def test_times_are_read_in_the_zone_of_the_browser() -> None:
    assert formats.parse_time("2026-11-16T08:41", UTC) == 1_794_818_460_000
    assert formats.parse_time("2026-11-16T08:41", formats.zone("Asia/Shanghai")) == 1_794_818_460_000 - 8 * 3_600_000
    assert formats.parse_time("1794818460000", UTC) == 1_794_818_460_000
    assert formats.parse_time("soon", UTC) is None
    assert formats.zone("../../etc/passwd") is UTC


def test_tables_filter_sort_and_page() -> None:
    columns: list[Column[int]] = [
        Column("n", Text("n"), lambda n: n, "number"),
        Column("name", Text("name"), lambda n: f"item-{n}"),
    ]
    first = listing(range(250), columns, {})
    assert [row["n"] for row in first.rows[:2]] == [249, 248]
    assert (first.pages, len(first.rows), first.total) == (3, 100, 250)
    last = listing(range(250), columns, {"page": "99", "order": "asc", "q": "x"}, search=lambda n: "x")
    assert (last.page, last.rows[-1]["n"]) == (3, 249)
    assert listing(range(250), columns, {"q": "24"}, search=str).found == 13


def test_csv_has_no_formulas() -> None:
    assert to_csv([{"a": "=1+1", "b": None}], ["a", "b"]).splitlines()[1] == "'=1+1,"


def test_offsets_are_texts() -> None:
    assert to_json({"offset": 2**60, "behind": 3, "rows": [{"end": 5}]}) == {
        "offset": str(2**60),
        "behind": 3,
        "rows": [{"end": "5"}],
    }


def test_clusters_of_the_command_line() -> None:
    found = parse_clusters(["prod=ns1:9876;ns2:9876", "127.0.0.1:9876"])
    assert found["prod"].namesrv_addresses == ("ns1:9876", "ns2:9876")
    assert list(found) == ["prod", "cluster-2"]
    with pytest.raises(ConfigError, match="already"):
        parse_clusters(["a=x:1", "a=y:1"])
    with pytest.raises(ConfigError, match="letters"):
        ConsoleConfig(parse_clusters(["a/b=x:1"]))


def test_logins_say_what_they_need() -> None:
    with pytest.raises(ConfigError, match="--users"):
        AccessConfig(LoginKind.FILE)
    with pytest.raises(ConfigError, match="--proxy"):
        AccessConfig(LoginKind.HEADER)
    with pytest.raises(ConfigError, match="regular expression"):
        AccessConfig(mask="(")


@pytest.mark.parametrize(
    ("host", "is_ours"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("evil.example", False)]
)
def test_hosts(host: str, is_ours: bool) -> None:
    assert is_address(host) == is_ours


@pytest.mark.parametrize(
    ("given_target", "target"),
    [("/c/local?x=1", "/c/local?x=1"), ("//evil.example", "/"), ("https://evil.example", "/"), ("/\\evil", "/")],
)
def test_the_target_after_a_login_is_ours(given_target: str, target: str) -> None:
    assert safe_target(given_target) == target


def test_users_and_their_passwords(tmp_path: Path) -> None:
    path = tmp_path / "users"
    assert add_user(path, "ada", Role.ADMIN, "long enough")
    assert not add_user(path, "ada", Role.VIEWER, "long enough 2")
    assert path.stat().st_mode & 0o077 == 0
    users = UsersFile(path)
    assert users.check("ada", "long enough") is None
    found = users.check("ada", "long enough 2")
    assert found is not None
    assert found.role is Role.VIEWER
    assert users.check("bob", "long enough 2") is None
    assert "long" not in path.read_text()
    assert found.digest.hex() not in repr(found)
    with pytest.raises(ConfigError, match="at least 8"):
        add_user(path, "bob", Role.VIEWER, "short")
    path.write_text("nonsense\n")
    with pytest.raises(ConfigError, match="users:1: expected"):
        UsersFile(path)


class OnePlan:
    """Stands for `Admin.plans`: applies once, or tells that the world has moved."""

    def __init__(self, drifted: bool = False) -> None:
        self.plans = self
        self.applied = 0
        self._drifted = drifted

    async def apply(self, plan: Plan, *, while_consuming: bool) -> PerServer[str, None]:
        if self._drifted:
            raise PlanDrifted([as_is("queue 2 of broker-a moved from 40 to 57 meanwhile")])
        self.applied += 1
        return PerServer({"broker-a": None}, {"broker-b": PlanGone("down")})


def move(*offsets: tuple[int, int]) -> Plan:
    changes = tuple(
        Change("broker-a", f"queue {number}", before, after, {"queueId": number, "end": 100, "online": "no"})
        for number, (before, after) in enumerate(offsets)
    )
    return Plan(PlanRequest(PlanKind.RESET, "billing", "orders", NOW), NOW, changes)


async def test_a_plan_is_carried_out_once_and_within_ten_minutes() -> None:
    clock = ManualClock(NOW)
    plans, admin = Plans(HistoryFile(None), clock), OnePlan()
    kept = plans.add("prod", "ada", move((40, 10)), "downrange …", "/")
    outcomes = await plans.apply(kept, cast(Admin, admin))
    assert [(one.server, one.is_done) for one in outcomes] == [("broker-a", True), ("broker-b", False)]
    assert kept.state == "failed"
    with pytest.raises(PlanGone, match="already"):
        await plans.apply(kept, cast(Admin, admin))
    assert admin.applied == 1
    late = plans.add("prod", "ada", move((40, 10)), "", "/")
    await clock.advance(KEPT_MILLIS / 1000 + 1)
    with pytest.raises(PlanGone, match="older than ten minutes"):
        await plans.apply(late, cast(Admin, admin))
    with pytest.raises(PlanGone):
        plans.get(late.id, "another cluster")


async def test_a_plan_that_drifted_can_be_looked_at() -> None:
    plans = Plans(HistoryFile(None), ManualClock(NOW))
    kept = plans.add("prod", "ada", move((40, 10)), "", "/")
    with pytest.raises(PlanDrifted):
        await plans.apply(kept, cast(Admin, OnePlan(drifted=True)))
    assert kept.state == "refused"
    assert kept.drifted == ("queue 2 of broker-a moved from 40 to 57 meanwhile",)


async def test_plans_survive_a_restart_and_are_still_carried_out_once(tmp_path: Path) -> None:
    clock, admin = ManualClock(NOW), OnePlan()
    plan = replace(move((40, 10)), failed={"broker-c": PlanGone("does not answer")}, notes=("careful",))
    settings = PlanRequest(PlanKind.QUEUE, "g", queue=MessageQueue("orders", "broker-a", 1), settings={"a": "b"})

    def opened() -> tuple[HistoryFile, Plans]:
        file = HistoryFile(tmp_path / "console.db")
        return file, Plans(file, clock)

    file, plans = opened()
    waiting = plans.add("prod", "ada", plan, "downrange …", "/back")
    other = plans.add("prod", "ada", Plan(settings, NOW, ()), "", "/")
    begun = plans.add("prod", "ada", plan, "", "/")
    await plans.apply(plans.add("prod", "ada", plan, "", "/"), cast(Admin, admin))
    file.write_plan(begun.id, NOW, _encoded(replace(begun, outcomes=[])))  # killed while it was carried out
    file.write_plan("future", NOW, b'{"of": "another version"}')
    file.close()

    file, plans = opened()
    again = plans.get(waiting.id, "prod")
    assert (again.plan.changes, again.plan.notes, again.back) == (plan.changes, ("careful",), "/back")
    assert str(again.plan.failed["broker-c"]) == "does not answer"
    assert plans.get(other.id, "prod") == other
    interrupted = plans.get(begun.id, "prod")
    assert interrupted.state == "failed"
    with pytest.raises(PlanGone, match="already"):
        await plans.apply(interrupted, cast(Admin, admin))
    await plans.apply(again, cast(Admin, admin))
    file.close()
    file, plans = opened()
    assert plans.get(again.id, "prod").outcomes == again.outcomes
    with pytest.raises(PlanGone, match="already"):
        await plans.apply(plans.get(again.id, "prod"), cast(Admin, admin))
    await clock.advance(2 * KEPT_MILLIS / 1000 + 1)
    plans.add("prod", "ada", replace(plan, made=clock.now()), "", "/")
    assert len(file.plans()) == 1, "old ones go"
    file.close()


def test_a_plan_says_what_is_skipped_and_what_comes_again() -> None:
    said = " ".join(sentences(move((40, 100), (40, 10))))
    assert "60 messages will be skipped" in said
    assert "30 messages will be consumed again" in said
    assert "Nobody runs" in said


def test_a_sample_is_fair() -> None:
    """Of a stream that goes round four queues every queue is shown about as often."""
    counts = [0, 0, 0, 0]
    for seed in range(40):
        reservoir = Reservoir(50, random.Random(seed))
        for number in range(500):
            reservoir.add(cast(ReceivedMessage, number))
        assert reservoir.seen == 500
        for kept in cast("list[Any]", reservoir.kept):
            counts[kept % 4] += 1
    assert sum(counts) == 2000
    assert max(counts) < 1.3 * min(counts)


def test_vendored_files_are_what_the_table_says() -> None:
    folder = resources.files("downrange.console") / "static" / "vendor"
    rows = re.findall(
        r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \| `([0-9a-f]{64})` \|$",
        (folder / "VENDORED.md").read_text("utf-8"),
        re.M,
    )
    assert {name for name, *_ in rows} == {one.name for one in folder.iterdir()} - {"VENDORED.md"}
    for name, _, _, digest in rows:
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
