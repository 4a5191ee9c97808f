"""Connections with refused requests: when they wait, when they end, and who does not notice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from downrange.auth.access_control import Account, Need
from downrange.auth.audit import AuditLog
from downrange.auth.gate import MOST_REFUSALS_IN_A_ROW, Gate, Refusal
from downrange.auth.guard import Guard
from downrange.auth.login_failures import BURST
from downrange.auth.needs import BROKER_NEEDS
from downrange.clock import ManualClock
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from downrange.protocol.errors import NoPermission
from downrange.protocol.framing import Frame, FrameDecoder, encode
from tests.unit.auth.test_audit import Nothing


@dataclass(eq=False)
class Peer:
    peer: str = "10.1.2.3:50412"
    peer_host: bytes = b""


@dataclass
class ByName:
    """Access control that believes the name of an account; `good` may everything, `poor` nothing."""

    generation: int = 0
    secrets: Mapping[str, bytes] = field(default_factory=dict)

    def authenticate(self, command: Command, address: str) -> Account:
        name = command.ext_fields.get("AccessKey", "")
        if name not in ("good", "poor"):
            raise NoPermission("nobody knows you")
        return Account(name)

    def authorize(self, account: Account, needs: Sequence[Need], command: Command, address: str) -> None:
        if account.name == "poor":
            raise NoPermission("you may not")


class Door:
    """A gate and its clock."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.gate = Gate(partial(Guard, ByName(), BROKER_NEEDS, Nothing(), BROKER_NEEDS.keys()), AuditLog(), self.clock)

    def ask(self, peer: Peer, *names: str) -> tuple[int, Refusal | None]:
        frames: list[Frame] = []
        for name in names:
            command = request(RequestCode.CHECK_CLIENT_CONFIG, ext_fields={"AccessKey": name})
            frames += FrameDecoder().frames(encode(command, 1))
        return self.gate.admitted(frames, [peer] * len(frames), 0, len(frames))

    def refusal(self, peer: Peer, name: str = "bad") -> Refusal:
        found = self.ask(peer, name)[1]
        assert found is not None
        return found


def test_the_twentieth_refusal_in_a_row_ends_the_connection() -> None:
    for name in ("bad", "poor"):
        door, peer = Door(), Peer()
        refusals = [door.refusal(peer, name) for _ in range(MOST_REFUSALS_IN_A_ROW)]
        assert [one.ends_connection for one in refusals] == [False] * (MOST_REFUSALS_IN_A_ROW - 1) + [True]
        assert not any(one.wait_seconds for one in refusals)
        assert door.gate.figures()["connection"] == 1


def test_a_request_that_passes_in_between_starts_the_count_again() -> None:
    door, peer = Door(), Peer()
    for _ in range(3):
        for _ in range(MOST_REFUSALS_IN_A_ROW - 1):
            assert not door.refusal(peer, "poor").ends_connection
        assert door.ask(peer, "good", "good") == (2, None)
    assert door.gate.figures() == {"login": 0, "permission": 57, "connection": 0}


def test_an_address_with_too_many_failures_waits_before_each_further_attempt() -> None:
    door = Door()
    for _ in range(BURST):
        assert not door.refusal(Peer()).wait_seconds
    peer = Peer()
    for _ in range(3):
        assert door.refusal(peer).wait_seconds == 1.0
        assert not door.refusal(peer).wait_seconds  # offered again after the wait
    assert door.gate.figures()["login"] == BURST + 3
    assert not door.refusal(Peer("10.1.2.4:1")).wait_seconds


def test_a_good_client_behind_the_address_waits_once() -> None:
    door, good = Door(), Peer()
    for _ in range(BURST):
        door.refusal(Peer())
    assert door.refusal(good, "good").wait_seconds == 1.0
    for _ in range(5):
        assert door.ask(good, "good", "good", "good") == (3, None)
        door.refusal(Peer())  # somebody else goes on guessing


def test_a_good_account_buys_no_quick_guesses() -> None:
    door, insider = Door(), Peer()
    for _ in range(BURST):
        door.refusal(Peer())
    waits = 0
    for name in ["good", "bad"] * 10:
        refusal = door.ask(insider, name)[1]
        if refusal is not None and refusal.wait_seconds:
            waits += 1
            refusal = door.ask(insider, name)[1]
        assert (refusal is None) == (name == "good")
    assert waits == 10


def test_a_missing_right_is_no_failed_login() -> None:
    door = Door()
    for _ in range(100):
        assert not door.refusal(Peer(), "poor").wait_seconds
    assert door.gate.figures() == {"login": 0, "permission": 100, "connection": 0}


def test_connections_that_ended_are_forgotten() -> None:
    door = Door()
    for number in range(1000):
        peer = Peer(f"10.0.{number >> 8}.{number & 255}:1")
        door.refusal(peer)
        door.gate.forget(peer)
    assert repr(door.gate) == "<Gate <LoginFailures 1000 from 1000 sources> denied=0 peers=0>"
