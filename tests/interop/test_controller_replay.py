"""What brokers and mqadmin once asked a 5.3.3 controller is answered as it did, and brokers hear of the same elections.

The scenarios about broker-a are one story: ids, elections and epochs of one are those of the next. Two things cannot be
seen in captured frames and are done by the test: connections that were closed, and the restart of the controller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from downrange.controller import app
from downrange.controller.app import RunningController
from downrange.controller.state import BrokerSet
from downrange.protocol import java_json
from downrange.protocol.bodies.body import encode_body
from downrange.protocol.codes import RequestCode as R
from downrange.protocol.command import Command
from tests.support.controllers import running_controller, until
from tests.support.golden import Row, scenarios
from tests.support.replay import decode

CAPTURES = "controller-533.tar.xz"
STORIES = {
    "broker-a": (
        *("ctl_first_broker", "ctl_second_broker", "ctl_master_killed", "ctl_old_master_returns", "ctl_elect"),
        "ctl_cleaned_broker",
    ),
    "broker-b": ("ctl_elect_manual",),
}
# Before this frame, the connections of these brokers were closed: they were killed or stopped.
CLOSED = {"ctl_master_killed#3": "broker1", "ctl_elect#242": "broker2", "ctl_cleaned_broker#1": "broker1"}

DIFFERENT: dict[str, dict[str, str]] = {
    "a broker that asks for itself is alive, even if its first heartbeat comes later": {
        "ctl_cleaned_broker#6": "code 0 instead of 2012",
        "ctl_cleaned_broker#12": "code 2011 instead of 0",
    },
    "`no master` is recorded once; the controller that was restarted recorded it three times": {
        "ctl_cleaned_broker#": "masterEpoch",
    },
    "our controllers have other settings": {"ctl_elect#35": "body"},
}
EXPECTED = {place: what for places in DIFFERENT.values() for place, what in places.items()}


class Links:
    """Stands for the connections to brokers: notes whom a controller tells of what."""

    def __init__(self, _: object) -> None:
        self.told: list[BrokerSet] = []

    async def tell(self, broker_set: BrokerSet) -> None:
        self.told.append(broker_set)

    async def acknowledges_safely(self, address: str) -> bool | None:
        return None

    async def is_there(self, address: str) -> bool:
        return False


class Replay:
    """Sends the captured requests over a connection for each asker, and compares."""

    def __init__(self, running: RunningController) -> None:
        self._running = running
        self._wires: dict[tuple[str, int], tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self.compared = 0
        self.notices = 0
        self.differences: dict[str, str] = {}

    async def wire(self, row: Row) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        # A broker keeps its connection over all scenarios; the numbers of connections are those of one scenario.
        key = (row.sender, row.connection if row.sender == "client" else 0)
        if key not in self._wires:
            self._wires[key] = await asyncio.open_connection("127.0.0.1", self._running.server.port)
        return self._wires[key]

    async def close(self, sender: str) -> None:
        told = len(self.told)
        for key in [key for key in self._wires if key[0] == sender]:
            self._wires.pop(key)[1].close()
        before = self._running.parts.sets.commits
        await until(lambda: self._running.parts.sets.commits > before or len(self.told) > told)

    @property
    def told(self) -> list[BrokerSet]:
        links = self._running.parts.overseer.links
        assert isinstance(links, Links)
        return links.told

    async def play(self, scenario: str) -> None:
        rows = scenarios(CAPTURES)[f"controller-533/{scenario}"]
        answers = {(row.connection, row.receiver, row.opaque): row for row in rows if row.is_response}
        told_before = len(self.told)
        for row in rows:
            place = row.place.removeprefix("controller-533/")
            if place in CLOSED:
                await self.close(CLOSED[place])
            if row.receiver == "controller" and not row.is_response:
                answer = answers.get((row.connection, row.sender, row.opaque))
                await self.ask(row, answer)
            elif row.code == R.CONTROLLER_NOTIFY_BROKER_ROLE_CHANGED and row.sender == "controller":
                await until(lambda: len(self.told) > told_before)
                self.compare_notice(place, decode(row.frame))

    async def ask(self, row: Row, answer: Row | None) -> None:
        reader, writer = await self.wire(row)
        writer.write(row.frame)
        await writer.drain()
        if row.flag & 2:  # one-way
            return
        length = await asyncio.wait_for(reader.readexactly(4), 10)
        frame = length + await reader.readexactly(int.from_bytes(length, "big"))
        if answer is not None:  # the last request of a scenario may have been answered after its end
            self.compare(answer.place.removeprefix("controller-533/"), decode(answer.frame), decode(frame))

    def compare(self, place: str, theirs: Command, ours: Command) -> None:
        self.compared += 1
        assert ours.opaque == theirs.opaque
        if ours.code != theirs.code:
            self.differs(place, f"code {ours.code} instead of {theirs.code}")
            return
        if (theirs.remark or "") != (ours.remark or ""):
            self.differs(place, f"remark {ours.remark!r} instead of {theirs.remark!r}")
        for name, (golden, our) in fields(dict(theirs.ext_fields), dict(ours.ext_fields)):
            if golden != our:
                self.differs(place, f"{name}" if "masterEpoch" in name else f"{name} {our} instead of {golden}")
        if plain(theirs.body_bytes) != plain(ours.body_bytes):
            self.differs(place, "body")

    def compare_notice(self, place: str, theirs: Command) -> None:
        self.notices += 1
        ours = self.told[-1]
        golden = theirs.ext_fields
        assert (golden["masterAddress"], int(golden["masterBrokerId"])) == (ours.master_address, ours.master), place
        assert int(golden["syncStateSetEpoch"]) == ours.sync_state_set_epoch, place
        assert plain(theirs.body_bytes) == plain(encode_body(ours.members)), place
        if int(golden["masterEpoch"]) != ours.master_epoch:
            self.differs(place, "masterEpoch")

    def differs(self, place: str, what: str) -> None:
        self.differences.setdefault(place, what)


def fields(theirs: dict[str, str], ours: dict[str, str]) -> Iterator[tuple[str, tuple[str | None, str | None]]]:
    for name in sorted({*theirs, *ours}):
        yield name, (theirs.get(name), ours.get(name))


def plain(body: bytes) -> Any:
    if not body or body[:1] not in b"{[":
        return body

    def ordered(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: ordered(one) for name, one in value.items() if name != "masterEpoch"}
        return sorted(map(ordered, value), key=repr) if isinstance(value, list) else value

    return ordered(java_json.loads(body))


@pytest.mark.parametrize("story", STORIES)
async def test_captured_conversations_are_answered_as_5_3_3_did(
    story: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "BrokerLinks", Links)
    async with running_controller(
        tmp_path,
        controller_dleger_group="group1",
        controller_dleger_self_id="n0",
        controller_dleger_peers="n0-127.0.0.1:27678",
    ) as running:
        replay = Replay(running)
        for scenario in STORIES[story]:
            await replay.play(scenario)
        for _, writer in replay._wires.values():
            writer.close()
    unexpected = {
        place: what
        for place, what in replay.differences.items()
        if what not in (EXPECTED.get(place), EXPECTED.get(place.partition("#")[0] + "#"))
    }
    assert unexpected == {}
    expected = {place for place in EXPECTED if not place.endswith("#") and place.partition("#")[0] in STORIES[story]}
    assert expected <= replay.differences.keys()
    assert replay.compared > 80
    assert replay.notices >= (3 if story == "broker-a" else 2)
