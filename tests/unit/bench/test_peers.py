"""The drivers of other servers, against what those servers say according to their protocols."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from bench.peers import BASES, nats, rabbitmq, redis
from bench.peers.clients import Calls, Client, RunningPeer, drive_client
from bench.peers.driver import PeerFailed, Session, drive
from downrange.load import SendPlan
from downrange.load.server_process import ServerProcess, listening_at


@contextmanager
def peer_that(serves: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that handles each connection in a thread; its address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                connected, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=handle, args=(connected,), daemon=True).start()

    def handle(connected: socket.socket) -> None:
        with connected:
            try:
                serves(connected)
            except OSError:
                return

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)  # wakes who waits in `accept`; closing does not
    accepting.join(10)
    listener.close()


def opened(session: Callable[[socket.socket], Session], address: str) -> Session:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as connected:
        return session(connected)


def redis_server(connected: socket.socket) -> None:
    """Counts commands by their `*` lines; enough for what the driver sends."""
    connected.sendall(b"+PONG\r\n" if b"PING" in connected.recv(1000) else b"-ERR\r\n")
    while data := connected.recv(1 << 16):
        connected.sendall(b"$15\r\n1700000000000-0\r\n" * data.count(b"*5\r\n"))


def test_redis_entries_are_counted_wherever_the_answer_is_cut() -> None:
    with peer_that(redis_server) as address:
        answers = b"$15\r\n1700000000000-0\r\n$16\r\n1700000000000-10\r\n"
        for cut in range(len(answers) + 1):
            session = opened(redis.Session, address)
            assert session.feed(answers[:cut]) + session.feed(answers[cut:]) == 2
        with pytest.raises(PeerFailed, match="OOM"):
            session.feed(b"-OOM command not allowed\r\n")
    assert session.request(b"xyz") == b"*5\r\n$4\r\nXADD\r\n$5\r\nbench\r\n$1\r\n*\r\n$4\r\nbody\r\n$3\r\nxyz\r\n"


def test_a_closed_loop_runs_until_the_time_is_up_and_all_is_answered() -> None:
    with peer_that(redis_server) as address:
        server = listening_at(address)
        assert server is not None
        plan = SendPlan(0.2, 0.05, 128, connections=3, outstanding=1)
        report = drive(redis.PEER, RunningPeer(address, server), plan)
    assert report.messages > 0
    assert 0 < report.latency["reply"].p50 <= report.latency["reply"].max


class CountingClient:
    """Acknowledges `messages` with each call, one turn of the loop later, and knows how many calls were open."""

    def __init__(self, side_by_side: int, messages: int) -> None:
        self.acknowledged = self.open_now = self.most_open = 0
        self.bodies: set[bytes] = set()
        self._shape = side_by_side, messages

    @asynccontextmanager
    async def open(self, address: str, body: bytes, in_flight: int) -> AsyncIterator[Calls]:
        side_by_side, messages = self._shape
        assert side_by_side * messages == in_flight
        self.bodies.add(body)

        async def call() -> None:
            self.open_now += 1
            self.most_open = max(self.most_open, self.open_now)
            await asyncio.sleep(0)
            self.open_now -= 1
            self.acknowledged += messages

        yield Calls(call, side_by_side, messages)


@pytest.mark.parametrize(("side_by_side", "messages"), [(1, 1), (6, 1), (1, 6)])
def test_a_client_is_kept_busy_until_the_time_is_up_and_all_is_answered(side_by_side: int, messages: int) -> None:
    counting = CountingClient(side_by_side, messages)
    plan = SendPlan(0.1, 0.05, 128, connections=1, outstanding=side_by_side * messages)
    report = drive_client(
        Client("counting", "asyncio", counting.open), RunningPeer("127.0.0.1:1", ServerProcess(os.getpid())), plan
    )
    assert counting.bodies == {bytes(128)}
    assert counting.most_open == side_by_side
    assert counting.open_now == 0
    assert 0 < report.messages < counting.acknowledged  # the warm-up does not count
    assert report.latency["reply"].p50 > 0


def test_what_a_client_raises_ends_the_load() -> None:
    @asynccontextmanager
    async def refusing(address: str, body: bytes, in_flight: int) -> AsyncIterator[Calls]:
        async def call() -> None:
            raise PeerFailed("no space left")

        yield Calls(call, side_by_side=in_flight)

    running = RunningPeer("127.0.0.1:1", ServerProcess(os.getpid()))
    with pytest.raises(PeerFailed, match="no space left"):
        drive_client(Client("refusing", "asyncio", refusing), running, SendPlan(0.1, 0.05, 128, outstanding=3))


def test_a_client_that_is_not_installed_is_missing() -> None:
    assert Client("x", "no_such_module_anywhere", CountingClient(1, 1).open).missing()
    assert not Client("x", "asyncio", CountingClient(1, 1).open).missing()


def test_each_row_is_compared_with_ours_of_the_same_promise_and_the_same_way_of_driving() -> None:
    assert BASES["Redis Streams"] == "Downrange"
    assert BASES["NATS JetStream by nats-py"] == "Downrange by AsyncProducer"
    assert BASES["Downrange by AsyncProducer.send_all"] == "Downrange by AsyncProducer"
    assert BASES["RabbitMQ quorum synced"] == "Downrange synced"
    assert BASES["Redis Streams synced by redis-py"] == "Downrange synced by AsyncProducer"


def test_nats_acknowledgements_are_counted_wherever_the_answer_is_cut() -> None:
    def serve(connected: socket.socket) -> None:
        connected.sendall(b'INFO {"server_id":"x","jetstream":true}\r\n')
        said = b""
        while not said.endswith(b"PING\r\n"):
            said += connected.recv(1000)
        connected.sendall(b"PONG\r\n" if said.startswith(b"CONNECT {") else b"-ERR 'Unknown'\r\n")

    with peer_that(serve) as address:
        answers = (
            b'MSG _INBOX.x 1 26\r\n{"stream":"bench","seq":9}\r\nMSG _INBOX.x 1 27\r\n{"stream":"bench","seq":10}\r\n'
        )
        for cut in range(len(answers) + 1):
            session = opened(nats.Session, address)
            assert session.feed(answers[:cut]) + session.feed(answers[cut:]) == 2
        with pytest.raises(PeerFailed, match="no responders"):
            session.feed(b'MSG _INBOX.x 1 60\r\n{"error":{"code":503,"description":"no responders"}}\r\n')
        inbox = session.request(b"xyz").split()[2]
        assert session.request(b"xyz") == b"PUB bench %b 3\r\nxyz\r\n" % inbox
        assert opened(nats.Session, address).request(b"").split()[2] != inbox


def rabbitmq_server(connected: socket.socket) -> None:
    """The answers of a handshake that goes well, each after what the driver must have sent before it."""
    assert connected.recv(8, socket.MSG_WAITALL) == b"AMQP\0\0\x09\x01"
    answers = [
        (
            rabbitmq.method(
                0, 10, 10, b"\0\x09" + rabbitmq.long(b"") + rabbitmq.long(b"PLAIN") + rabbitmq.long(b"en_US")
            ),
            11,
        ),
        (rabbitmq.method(0, 10, 30, struct.pack(">HIH", 2047, 131072, 60)), 31),
        (None, 40),
        (rabbitmq.method(0, 10, 41, b"\0"), 10),
        (rabbitmq.method(1, 20, 11, rabbitmq.long(b"")), 10),
        (rabbitmq.method(1, 50, 11, rabbitmq.short(b"bench") + bytes(8)), 10),
        (rabbitmq.method(1, 85, 11), None),
    ]
    for answer, then in answers:
        if answer is not None:
            connected.sendall(answer)
        if then is not None:
            head = connected.recv(7, socket.MSG_WAITALL)
            payload = connected.recv(struct.unpack(">BHI", head)[2] + 1, socket.MSG_WAITALL)
            assert payload[2:4] == then.to_bytes(2, "big")


def confirmed(tag: int, multiple: bool = False) -> bytes:
    return rabbitmq.method(1, 60, 80, struct.pack(">QB", tag, multiple))


def test_rabbitmq_confirms_count_once_single_multiple_and_out_of_turn() -> None:
    with peer_that(rabbitmq_server) as address:
        session = opened(rabbitmq.Session, address)
    assert session.feed(confirmed(1)) == 1
    assert session.feed(confirmed(4)) == 1
    assert session.feed(confirmed(5, multiple=True)) == 3  # 2, 3 and 5
    answers = confirmed(7) + confirmed(6) + confirmed(20, multiple=True)
    cut = len(answers) // 2
    assert session.feed(answers[:cut]) + session.feed(answers[cut:]) == 15
    with pytest.raises(PeerFailed, match="nack"):
        session.feed(rabbitmq.method(1, 60, 120, struct.pack(">QB", 21, 0)))


def test_a_rabbitmq_that_says_something_else_is_told_apart() -> None:
    def serve(connected: socket.socket) -> None:
        connected.recv(8)
        connected.sendall(rabbitmq.method(0, 10, 50, b"\x01\x93" + rabbitmq.short(b"ACCESS_REFUSED") + bytes(4)))

    with peer_that(serve) as address, pytest.raises(PeerFailed, match="ACCESS_REFUSED"):
        opened(rabbitmq.Session, address)
