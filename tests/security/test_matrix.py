"""Every request by every kind of account over every way it can travel: matrix.txt says what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.framing import encode
from tests.security.guarded import (
    ADMIN,
    GENERATIONS,
    SIGNERS,
    WIRES,
    Generation,
    Guarded,
    Wire,
    as_sent,
    guarded,
    raw_exchange,
)
from tests.security.matrix_requests import BROKER

MATRIX: Final = Path(__file__).with_name("matrix.txt")
CASTS: Final = [
    ("A", "other"),
    ("W", "own"),
    ("N", "other"),
    ("P", "own"),
    ("P", "other"),
    ("C", "own"),
    ("C", "other"),
    ("S", "own"),
    ("R", "own"),
]
"""The columns: who asks, and for whose topic and group."""


class Cell(NamedTuple):
    row: str
    who: str
    scene: str
    expected: str

    def __str__(self) -> str:
        return f"{self.row} by {self.who} for {self.scene}"


def rows(section: str) -> dict[str, list[str]]:
    """The rows of a section: code and variant -> its cells."""
    found: dict[str, list[str]] = {}
    current = ""
    for line in MATRIX.read_text().splitlines():
        if line.startswith("["):
            current = line.strip("[]")
        elif line and not line.startswith("#") and current == section:
            name, *cells = line.split()
            assert name not in found, f"two rows for {name}"
            assert set(cells[: len(CASTS)]) <= {"ok", "D", "3"}, line
            found[name] = cells[: len(CASTS)]
    return found


def cells(section: str) -> Iterator[Cell]:
    for name, results in rows(section).items():
        for (who, scene), expected in zip(CASTS, results, strict=True):
            yield Cell(name, who, scene, expected)


def request_of(cell: Cell, guarded: Guarded) -> Command:
    command = BROKER[cell.row](guarded.scenes[cell.scene])
    signer = SIGNERS.get("S" if cell.who == "R" else cell.who)
    return command if signer is None else signer.sign(command)


def result(reply: Command, guarded: Guarded) -> str:
    if guarded.is_refusal(reply):
        return "D"
    return "3" if reply.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED else "ok"


@pytest.fixture(params=GENERATIONS, ids=lambda generation: generation.name)
def generation(request: pytest.FixtureRequest) -> Generation:
    return request.param  # type: ignore[no-any-return]


async def test_every_served_code_has_a_row(tmp_path: Path, generation: Generation) -> None:
    async with guarded(tmp_path, generation) as made:
        known = {int(name.partition("/")[0]) for name in rows("broker")}
        missing = sorted(made.running.codes - known)
        assert not missing, f"give these codes rows in {MATRIX.name} and requests in matrix_requests.py: {missing}"
        not_served = {int(name) for name, results in rows("broker").items() if results[-1] == "3"}
        assert known - made.running.codes == not_served
        assert rows("broker").keys() == BROKER.keys()


async def test_refused_requests_are_refused_and_change_nothing(tmp_path: Path, generation: Generation) -> None:
    refused = [cell for cell in cells("broker") if cell.expected == "D"]
    wrong: list[str] = []
    async with guarded(tmp_path, generation) as made:
        for wire in WIRES:
            before = await made.state()
            for who in dict.fromkeys(cell.who for cell in refused):
                mine = [cell for cell in refused if cell.who == who]
                replies = await made.ask(*(request_of(cell, made) for cell in mine), wire=wire)
                for cell, reply in zip(mine, replies, strict=True):
                    if reply is not None and not made.is_refusal(reply):
                        wrong.append(f"{cell}, {wire}: answered {reply.code} {reply.remark}")
                after = await made.state()
                wrong += [
                    f"{who}, {wire}: {name} {before[name]} became {after[name]}"
                    for name in before
                    if before[name] != after[name]
                ]
                before = after
    assert wrong == []


@pytest.mark.parametrize("wire", [wire for wire in WIRES if not wire.is_oneway], ids=str)
async def test_allowed_requests_reach_their_handlers(tmp_path: Path, generation: Generation, wire: Wire) -> None:
    wrong: list[str] = []
    async with guarded(tmp_path, generation) as made:
        for cell in cells("broker"):
            if cell.expected == "D" or cell.who == "R":
                continue
            if cell.row == "37":
                await made.fill()  # a transaction ends once
            reply = await made.one(request_of(cell, made), wire)
            found = result(reply, made)
            is_pull_over_vip = wire.is_vip and cell.row.partition("/")[0] in ("11", "361")
            if found != ("3" if is_pull_over_vip else cell.expected):
                wrong.append(f"{cell}, {wire}: answered {reply.code} {reply.remark}")
            if cell.who == "S":
                await made.furnish()
    assert wrong == []


async def test_captured_requests_are_good_for_as_long_as_the_secret_is(tmp_path: Path, generation: Generation) -> None:
    """RocketMQ's scheme: nothing in a signed request says when, or how often, it may be sent."""
    wrong: list[str] = []
    async with guarded(tmp_path, generation) as made:
        for cell in cells("broker"):
            if cell.who != "R":
                continue
            captured = encode(as_sent(request_of(cell, made), Wire()), 1)
            for _ in range(2):
                replies = await raw_exchange(made.port, captured, {1})
                await made.furnish()
            found = result(replies[1], made)
            if found != cell.expected:
                wrong.append(f"{cell}: answered {replies[1].code} {replies[1].remark}")
    assert wrong == []


async def test_a_signature_does_not_name_the_code_so_rights_are_those_of_the_code_that_came(
    tmp_path: Path, generation: Generation
) -> None:
    """A captured send can be sent again with other codes; none of them gives more than its producer has."""
    async with guarded(tmp_path, generation) as made:
        captured = SIGNERS["P"].sign(BROKER["310"](made.scenes["own"]))
        allowed = set()
        for code in sorted(made.running.codes):
            reply = await made.one(Command(code, raw_ext=captured.ext_fields, body=captured.body))
            if not made.is_refusal(reply):
                allowed.add(code)
        # Sends to the same topic; and what every account may, or what names no stored message.
        assert allowed == {
            RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2,
            RequestCode.END_TRANSACTION, RequestCode.VIEW_MESSAGE_BY_ID, RequestCode.UNREGISTER_CLIENT,
            RequestCode.CHECK_CLIENT_CONFIG,
        }  # fmt: skip
        assert ADMIN.sign(captured).ext_fields != captured.ext_fields
