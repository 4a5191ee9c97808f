"""A closed loop of ready-made requests to a server of any protocol."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from bench.peers.clients import Client, RunningPeer
from bench.peers.meter import Meter
from downrange.load import LoadReport, SendPlan
from downrange.load.links import Link, Links

PATH: Final = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
"""Servers lie where only an administrator's shell looks."""
_PATIENCE_SECONDS: Final = 10.0
START_SECONDS: Final = 60.0


class Session(Protocol):
    """One connection, ready to send."""

    def request(self, body: bytes) -> bytes:
        """One send."""
        ...

    def feed(self, data: bytes) -> int:
        """How many sends the server acknowledged in `data`; raises PeerFailed at a refusal."""
        ...


class PeerFailed(Exception):
    """The server did not do what it should."""


@dataclass(frozen=True, slots=True)
class Peer:
    """How to run one server and how to drive it."""

    program: str
    start: Callable[[Path], AbstractContextManager[RunningPeer]]
    open: Callable[[socket.socket], Session]
    """What a client does first on a connected socket."""
    clear: Callable[[str], None]
    """Throw away what the server at this address holds: every load finds it empty, and none fills the memory."""
    client: Client

    def missing(self) -> bool:
        return shutil.which(self.program, path=PATH) is None


class _Lane:
    """One connection under load."""

    def __init__(self, session: Session, plan: SendPlan) -> None:
        request = session.request(bytes(plan.size))
        self._size = len(request)
        self._window = memoryview(request * plan.outstanding)
        self._sent: deque[tuple[int, int]] = deque()
        self.feed = session.feed

    def send(self, link: Link, count: int) -> None:
        self._sent.append((time.monotonic_ns(), count))
        link.write(self._window[: count * self._size])

    def record(self, meter: Meter, count: int) -> None:
        """Servers acknowledge the sends of one connection in order, or nearly so."""
        now = time.monotonic_ns()
        while count:
            moment, many = self._sent.popleft()
            taken = min(many, count)
            meter.record(now - moment, taken)
            count -= taken
            if taken < many:
                self._sent.appendleft((moment, many - taken))


def drive(peer: Peer, running: RunningPeer, plan: SendPlan) -> LoadReport:
    """The closed loop of `plan`; what it says about RocketMQ's headers and keys has no counterpart here."""
    sessions: list[Session] = []
    with Links(running.address, plan.connections, lambda connected: sessions.append(peer.open(connected))) as links:
        lanes = {link: _Lane(session, plan) for link, session in zip(links.all, sessions, strict=True)}
        meter = Meter(plan, running.server)
        for link, lane in lanes.items():
            lane.send(link, plan.outstanding)
        outstanding = plan.connections * plan.outstanding
        last_answer = time.monotonic()
        while outstanding:
            readable = links.wait(0.1)
            meter.look()
            for link in readable:
                lane = lanes[link]
                count = lane.feed(link.read())
                lane.record(meter, count)
                if meter.is_over:
                    outstanding -= count
                elif count:
                    lane.send(link, count)
            now = time.monotonic()
            last_answer = now if readable else last_answer
            if now - last_answer > _PATIENCE_SECONDS:
                raise PeerFailed(f"{peer.program} has acknowledged nothing for {_PATIENCE_SECONDS:g} s")
    return meter.report(peer.program)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_until_listening(address: str, is_alive: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            connected_to(address).close()
            return
        except OSError:
            if time.monotonic() > deadline or not is_alive():
                raise PeerFailed(f"nothing listens at {address}: the server did not start") from None
            time.sleep(0.1)


def connected_to(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=START_SECONDS)


def read_until(connected: socket.socket, mark: bytes) -> bytes:
    """What a server says up to and with `mark`; used before the load, one answer at a time."""
    received = b""
    while mark not in received:
        data = connected.recv(1 << 16)
        if not data:
            raise PeerFailed(f"the server closed the connection after {received[-200:]!r}")
        received += data
    return received
