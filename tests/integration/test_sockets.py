"""Frames of many connections are served together, over real sockets on loopback."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec import structs

from downrange.compiled import steps
from downrange.protocol.command import ONEWAY_FLAG, Command, request
from downrange.protocol.framing import Frame, decode_frame, encode
from downrange.transport import accepting
from downrange.transport.busy_poll import BusyPoll
from downrange.transport.connection import Connection
from downrange.transport.limits import Limits
from downrange.transport.pool import connect
from downrange.transport.server import READS_TOGETHER, Server
from downrange.transport.serving import answer_frame, send_replies
from tests.support.broker_client import client_of, standalone
from tests.support.callers import callers, reply, until
from tests.support.requests import create_topic

PLAIN, SILENT, OTHER, BIG, BUG, ASK = range(1, 7)
BIG_BODY = bytes(range(256)) * 40_000  # 10 MB


def frame(code: int, opaque: int, body: bytes = b"") -> bytes:
    return encode(request(code, body=body), opaque)


needs_compiled = pytest.mark.skipif(not READS_TOGETHER, reason="this needs the compiled module")


class Peer:
    """Answers PLAIN requests of all connections in one go, any other one by one; knows what it was given."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        """The opaques of each call."""
        self.closed: list[Connection] = []
        self.holds_back = False
        self.held: list[tuple[list[Connection], bytes]] = []
        self.answers: list[bytes] = []
        """To be sent instead of the right replies."""
        self.answered_back: list[bytes] = []

    def serve(self, frames: list[Frame], origins: list[Connection]) -> None:
        commands = [decode_frame(frame) for frame in frames]
        self.calls.append([command.opaque for command in commands])
        at = 0
        while at < len(frames):
            end = at
            while end < len(frames) and commands[end].code in (PLAIN, SILENT) and not origins[end].is_full:
                end += 1
            if end > at:
                self._answer(commands[at:end], origins[at:end])
                at = end
            else:
                answer_frame(self.handle, frames[at], origins[at])
                origins[at].flush()
                at += 1

    def _answer(self, commands: list[Command], origins: list[Connection]) -> None:
        wanted = [number for number, command in enumerate(commands) if command.code == PLAIN]
        to = [origins[number] for number in wanted]
        replies = b"".join(
            encode(commands[number].reply(body=commands[number].body_bytes + origins[number].peer_host))
            for number in wanted
        )
        if self.holds_back:
            for origin in to:
                origin.begin_answering(1)
            self.held.append((to, replies))
        else:
            send_replies(to, self.answers.pop() if self.answers else replies)

    def answer_held(self) -> None:
        for origins, replies in self.held:
            for origin in origins:
                origin.end_answering(1)
            send_replies(origins, replies)

    def handle(self, command: Command, connection: Connection) -> Command | None:
        if command.code == BUG:
            connection.reply_parts = None  # type: ignore[method-assign, assignment]
        if command.code == ASK:
            reply = connection.request_nowait(request(OTHER, body=command.body))
            reply.add_done_callback(lambda done: self.answered_back.append(done.result().body_bytes))
        return command.reply(body=BIG_BODY if command.code == BIG else command.body_bytes + connection.peer_host)


@asynccontextmanager
async def serving(peer: Peer, limits: Limits | None = None, busy_poll: BusyPoll | None = None) -> AsyncIterator[Server]:
    server = Server(peer.serve, limits=limits or Limits(drain_seconds=1), on_close=peer.closed.append)
    server.busy_poll = busy_poll
    async with server:
        yield server


@pytest.fixture(params=["together", "by the loop"], autouse=True)
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server reads its connections together where it can, else by the loop's own transports."""
    if request.param == "by the loop":
        monkeypatch.setattr("downrange.transport.server.READS_TOGETHER", False)
    elif not READS_TOGETHER:
        pytest.skip("this needs the compiled module")


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest.fixture
async def server(peer: Peer) -> AsyncIterator[Server]:
    async with serving(peer) as server:
        yield server


def host(caller: socket.socket) -> bytes:
    address, port = caller.getsockname()
    return socket.inet_aton(address) + struct.pack(">i", port)


async def test_requests_of_many_connections_each_get_their_own_reply(server: Server, peer: Peer) -> None:
    with callers(server.port, 20) as opened:
        await until(lambda: len(server.connections) == 20)
        for number, caller in enumerate(opened):
            caller.sendall(b"".join(frame(PLAIN, 10 * number + n, b"%d " % number) for n in range(number % 4 + 1)))
        for number, caller in enumerate(opened):
            for n in range(number % 4 + 1):
                answer = await reply(caller)
                assert (answer.opaque, answer.body) == (10 * number + n, b"%d " % number + host(caller))
    if server._sockets is not None:
        assert [len(opaques) for opaques in peer.calls] == [50], "all were there before the loop's next turn"
    else:
        assert sum(map(len, peer.calls)) == 50


async def test_the_order_of_a_connection_is_kept_whoever_answers(server: Server, peer: Peer) -> None:
    codes = [PLAIN, SILENT, PLAIN, OTHER, PLAIN, OTHER, OTHER, PLAIN]
    with callers(server.port, 8) as opened:
        await until(lambda: len(server.connections) == 8)
        for number, caller in enumerate(opened):  # each begins with something else
            rotated = codes[number:] + codes[:number]
            caller.sendall(b"".join(frame(code, 100 * number + n) for n, code in enumerate(rotated)))
        for number, caller in enumerate(opened):
            rotated = codes[number:] + codes[:number]
            expected = [100 * number + n for n, code in enumerate(rotated) if code != SILENT]
            assert [(await reply(caller)).opaque for _ in expected] == expected


async def test_however_much_comes_it_is_taken_in_pieces_and_all_are_served(server: Server, peer: Peer) -> None:
    body = bytes(400)
    with callers(server.port, 10) as opened:
        await until(lambda: len(server.connections) == 10)
        for number, caller in enumerate(opened):
            caller.sendall(b"".join(frame(PLAIN, 100 * number + n, body) for n in range(100)))
        for number, caller in enumerate(opened):
            assert [(await reply(caller)).opaque for _ in range(100)] == [100 * number + n for n in range(100)]
    assert sum(map(len, peer.calls)) == 1000
    assert max(map(len, peer.calls)) <= 200  # two of them exceed what is enough for one turn


async def test_frames_may_be_cut_anywhere(server: Server, peer: Peer) -> None:
    wire = b"".join(frame(PLAIN, number, b"x" * number) for number in range(5))
    with callers(server.port, 2) as (slow, quick):
        await until(lambda: len(server.connections) == 2)
        for at in range(len(wire)):
            slow.sendall(wire[at : at + 1])
            quick.sendall(frame(PLAIN, at))
            assert (await reply(quick)).opaque == at
        assert [(await reply(slow)).opaque for _ in range(5)] == list(range(5))


async def test_a_reset_in_the_middle_costs_nobody_else_anything(server: Server, peer: Peer) -> None:
    with callers(server.port, 30) as opened:
        await until(lambda: len(server.connections) == 30)
        for number, caller in enumerate(opened):
            caller.sendall(frame(PLAIN, number))
            if number % 3 == 0:
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                caller.close()
        for number, caller in enumerate(opened):
            if number % 3:
                assert (await reply(caller)).opaque == number
        await until(lambda: len(peer.closed) == 10)
        assert len(server.connections) == 20


async def test_a_peer_that_has_said_everything_still_gets_its_answers(server: Server) -> None:
    with callers(server.port, 2) as opened:
        for caller in opened:
            caller.sendall(frame(OTHER, 1) + frame(PLAIN, 2))
            caller.shutdown(socket.SHUT_WR)
        for caller in opened:
            assert [(await reply(caller)).opaque for _ in range(2)] == [1, 2]
            assert await asyncio.get_running_loop().sock_recv(caller, 1) == b""
    await until(lambda: not server.connections)


async def test_a_huge_reply_arrives_whole_though_its_reader_is_slow(server: Server, peer: Peer) -> None:
    with callers(server.port, 2) as (slow, other):
        slow.sendall(frame(BIG, 1) + frame(BIG, 2) + frame(PLAIN, 3))
        await until(lambda: server.usage.unsent_bytes)
        slow.sendall(frame(PLAIN, 4))
        for number in range(20):  # who reads is served meanwhile
            other.sendall(frame(PLAIN, number))
            assert (await reply(other)).opaque == number
        for number in (1, 2):
            answer = await reply(slow)
            assert answer.opaque == number
            assert answer.body == BIG_BODY
        assert [(await reply(slow)).opaque for _ in range(2)] == [3, 4]
        await until(lambda: not server.usage.unsent_bytes)


async def test_replies_to_a_peer_that_does_not_read_are_kept_for_it(server: Server, peer: Peer) -> None:
    body = bytes(50_000)
    with callers(server.port, 2) as (slow, other):
        await until(lambda: len(server.connections) == 2)
        for number in range(200):  # 10 MB, more than the kernel keeps for it
            slow.sendall(frame(PLAIN, number, body))
            other.sendall(frame(PLAIN, number))
            assert (await reply(other)).opaque == number
            if server.usage.unsent_bytes:
                break
        assert server.usage.unsent_bytes
        for sent in range(number + 1):
            answer = await reply(slow)
            assert (answer.opaque, len(answer.body)) == (sent, len(body) + 8)


@pytest.mark.parametrize("number", [1, 2])
async def test_deferred_requests_are_served_in_their_order_when_the_peer_reads(
    server: Server, peer: Peer, number: int
) -> None:
    with callers(server.port, number) as opened:
        await until(lambda: len(server.connections) == number)
        for caller in opened:
            caller.sendall(frame(BIG, 1) + frame(PLAIN, 2) + frame(OTHER, 3) + frame(SILENT, 4) + frame(PLAIN, 5))
        await until(lambda: sum(len(connection._deferred) for connection in server.connections) == 4 * number)
        for caller in opened:
            caller.sendall(frame(PLAIN, 6))
        for caller in opened:
            assert [(await reply(caller)).opaque for _ in range(5)] == [1, 2, 3, 5, 6]
        assert not any(connection.is_full for connection in server.connections)
        first = opened[0]
        first.sendall(frame(OTHER, 7))
        assert (await reply(first)).opaque == 7


async def test_replies_do_not_overtake_output_that_is_queued(server: Server, peer: Peer) -> None:
    with callers(server.port, 2) as opened:
        await until(lambda: len(server.connections) == 2)
        origins = list(server.connections)
        for origin in origins:
            origin.oneway(request(OTHER))  # leaves at the end of the loop's turn
        send_replies(origins, b"".join(encode(Command(0, number, 1)) for number in range(2)))
        replies = {host(caller): [await reply(caller), await reply(caller)] for caller in opened}
        for number, origin in enumerate(origins):
            assert [(one.code, one.is_response) for one in replies[origin.peer_host]] == [(OTHER, False), (0, True)]
            assert replies[origin.peer_host][1].opaque == number


async def test_replies_and_requests_may_come_mixed_over_one_connection(server: Server, peer: Peer) -> None:
    with callers(server.port, 2) as (caller, other):
        caller.sendall(frame(ASK, 1, b"a") + frame(ASK, 2, b"b"))
        other.sendall(frame(PLAIN, 1))
        received = [await reply(caller) for _ in range(4)]
        asked = [one for one in received if not one.is_response]
        assert [one.opaque for one in received if one.is_response] == [1, 2]
        back = [encode(one.reply(body=one.body_bytes * 2)) for one in asked]
        late = encode(Command(0, 99, 1))
        caller.sendall(frame(PLAIN, 3) + back[1] + frame(OTHER, 4) + late + back[0] + frame(PLAIN, 5))
        assert [(await reply(caller)).opaque for _ in range(3)] == [3, 4, 5]
        assert peer.answered_back == [b"bb", b"aa"]
        caller.sendall(late + frame(PLAIN, 6))
        assert (await reply(caller)).opaque == 6
        assert (await reply(other)).opaque == 1


async def test_replies_may_come_later_and_are_waited_for_when_the_server_stops(peer: Peer) -> None:
    peer.holds_back = True
    async with serving(peer) as server:
        with callers(server.port, 4) as (first, second, silent, gone):
            await until(lambda: len(server.connections) == 4)
            for caller, code in ((first, PLAIN), (silent, SILENT), (second, PLAIN), (gone, PLAIN)):
                caller.sendall(frame(code, 1))
            await until(lambda: sum(map(len, peer.calls)) == 4)
            assert server.usage.requests == 3
            gone.close()
            await until(lambda: len(peer.closed) == 1)
            stopping = asyncio.ensure_future(server.stop())
            with pytest.raises(ConnectionResetError, match="the server closed"):  # it waits for no reply
                await reply(silent)
            peer.answer_held()
            for caller in (first, second):
                assert (await reply(caller)).opaque == 1
                assert await asyncio.get_running_loop().sock_recv(caller, 1) == b""
            await stopping
            assert server.usage.requests == 0


async def test_closing_sends_what_waits_and_aborting_does_not(server: Server, peer: Peer) -> None:
    with callers(server.port, 2) as opened:
        for caller in opened:
            caller.sendall(frame(BIG, 1))
        await until(lambda: sum(map(len, peer.calls)) == 2)
        for connection in server.connections:
            closing = connection.peer_host == host(opened[0])
            connection.close() if closing else connection.abort()
            assert not connection.is_open
        assert (await reply(opened[0])).body == BIG_BODY
        assert await asyncio.get_running_loop().sock_recv(opened[0], 1) == b""
        with pytest.raises(ConnectionResetError):
            await reply(opened[1])
        await until(lambda: len(peer.closed) == 2)


@pytest.mark.parametrize("garbage", [b"\xff" * 40, b"\0\0\0\x02\0\0\0\0", b"GET / HTTP/1.1\r\n\r\n" * 9])
async def test_garbage_behind_requests_closes_its_connection_only(server: Server, peer: Peer, garbage: bytes) -> None:
    with callers(server.port, 3) as (first, bad, last):
        await until(lambda: len(server.connections) == 3)
        for caller, tail in ((first, b""), (bad, garbage), (last, b"")):
            caller.sendall(frame(PLAIN, 1) + tail)
        assert [(await reply(caller)).opaque for caller in (first, last)] == [1, 1]
        await until(lambda: len(peer.closed) == 1)
        first.sendall(frame(OTHER, 2))
        assert (await reply(first)).opaque == 2


async def test_a_bug_closes_the_connections_of_its_call_and_no_other(
    server: Server, peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    with callers(server.port, 4) as (first, bad, last, other):
        await until(lambda: len(server.connections) == 4)
        part = frame(OTHER, 2)
        other.sendall(part[:5])
        await until(lambda: any(connection._decoder.buffered for connection in server.connections))
        for caller, wire in (
            (first, frame(PLAIN, 1)),
            (bad, frame(BUG, 1)),
            (last, frame(PLAIN, 1)),
            (other, part[5:]),
        ):
            caller.sendall(wire)
        assert (await reply(other)).opaque == 2, "it came in pieces, so it is not served with others"
        with pytest.raises(ConnectionResetError):
            await reply(bad)
        hit = 3 if server._sockets is not None and [1, 1, 1] in peer.calls else 1
        await until(lambda: len(peer.closed) == hit)
        other.sendall(frame(OTHER, 3))
        assert (await reply(other)).opaque == 3
    assert "TypeError: 'NoneType' object is not callable" in caplog.text
    assert f"{hit} connections closed reason=a bug" in caplog.text


@pytest.mark.parametrize("answer", [b"", b"no frame", frame(PLAIN, 1), frame(PLAIN, 1) * 3], ids=len)
async def test_replies_that_do_not_fit_their_requests_close_the_connections(
    server: Server, peer: Peer, caplog: pytest.LogCaptureFixture, answer: bytes
) -> None:
    with callers(server.port, 3) as (*_, other):
        await until(lambda: len(server.connections) == 3)
        asked = [one for one in server.connections if one.peer_host != host(other)]
        send_replies(asked, answer)
        await until(lambda: len(peer.closed) == 2)
        assert "2 connections closed reason=a bug" in caplog.text
        other.sendall(frame(PLAIN, 7))
        assert (await reply(other)).opaque == 7


async def test_a_lone_caller_is_polled_for_and_two_are_not(peer: Peer) -> None:
    poll = BusyPoll(asyncio.get_running_loop(), 1.0)
    async with serving(peer, busy_poll=poll) as server:
        first, second = [await connect(f"127.0.0.1:{server.port}") for _ in range(2)]
        for _ in range(20):
            await first.request(request(PLAIN), 10)
        assert poll.is_polling
        await asyncio.gather(first.request(request(PLAIN), 10), second.request(request(PLAIN), 10))
        await until(lambda: not poll.is_polling)
        first.close()
        second.close()
    assert not poll.looks


async def test_accepting_goes_on_when_descriptors_have_run_out_for_a_while(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Exhausted(socket.socket):
        refusals = 2

        def accept(self) -> tuple[socket.socket, tuple[str, int]]:
            if self.refusals:
                self.refusals -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    monkeypatch.setattr(accepting, "_PAUSE_SECONDS", 0.01)
    server = Server(peer.serve)
    listening = Exhausted()
    listening.bind(("127.0.0.1", 0))
    acceptor = accepting.Acceptor(server._accept, server.limits)
    acceptor.listen([listening])
    with callers(listening.getsockname()[1], 1) as (caller,):
        caller.sendall(frame(OTHER, 1))
        assert (await reply(caller)).opaque == 1
    assert caplog.text.count("no connection can be accepted reason=Too many open files") == 2
    await until(lambda: not server.connections)
    await acceptor.stop()


async def test_two_thousand_connections(server: Server, peer: Peer) -> None:
    count = 2000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2 * count + 200:
        if hard != resource.RLIM_INFINITY and hard < 2 * count + 200:
            pytest.skip("this process may not have so many descriptors")
        resource.setrlimit(resource.RLIMIT_NOFILE, (2 * count + 200, hard))
    opened: list[socket.socket] = []
    try:
        while len(opened) < count:
            opened += [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(500)]
            accepted = len(opened)
            await until(lambda expected=accepted: len(server.connections) == expected, 60)  # type: ignore[misc]
        for round_number in range(2):
            for number, caller in enumerate(opened):
                caller.setblocking(True)
                caller.sendall(frame(PLAIN if number % 10 else OTHER, number))
            for number, caller in enumerate(opened):
                assert (await reply(caller)).opaque == number, round_number
    finally:
        for caller in opened:
            caller.close()
    await until(lambda: not server.connections, 60)
    assert sum(map(len, peer.calls)) == 2 * count


@needs_compiled
def test_send_frames_refuses_what_is_no_frame_for_each() -> None:
    class One(steps.Socket):
        pass

    lonely = One()
    assert lonely.descriptor == -1
    wire = frame(PLAIN, 1)
    assert steps.send_frames([lonely, lonely], wire * 2) == [(lonely, wire * 2)]
    assert steps.send_frames([], b"") == []
    for wanted, frames in (
        ([lonely], b""),
        ([lonely], wire[:-1]),
        ([lonely], b"\xff\xff\xff\xff"),
        ([lonely] * 2, wire),
        ([lonely], wire * 2),
    ):
        with pytest.raises(ValueError, match="a socket and a frame for each"):
            steps.send_frames(wanted, frames)
    with pytest.raises(ValueError, match="a socket and a frame for each"):
        steps.send_frames([None], wire)  # type: ignore[type-var]
    assert steps.send_frames([lonely], memoryview(bytearray(wire))) == [(lonely, wire)]
    with pytest.raises(TypeError, match="a list of sockets"):
        steps.send_frames((lonely,), wire)  # type: ignore[arg-type]
    lonely.has_queued = True
    assert steps.send_frames([lonely], wire) == [(lonely, wire)]
    with pytest.raises(TypeError, match="bytes-like"):
        steps.send_frames([lonely], 4)  # type: ignore[arg-type]


@needs_compiled
async def test_a_transport_tells_where_it_comes_from(server: Server) -> None:
    with callers(server.port, 1) as (caller,):
        await until(lambda: server.connections)
        (connection,) = server.connections
        transport = connection._transport
        assert transport is not None
        assert transport.get_extra_info("peername") == caller.getsockname()
        assert transport.get_extra_info("sockname") == caller.getpeername()
        assert transport.get_extra_info("cipher", "none") == "none"


async def test_a_broker_stores_what_many_send_at_once_with_the_host_of_each(tmp_path: Path) -> None:
    async with standalone(tmp_path) as broker, client_of(broker) as client:
        await create_topic(client, "orders", 4)
        await client.send("orders", b"first")  # so that the queue is known
        with callers(broker.server.port, 12) as opened:
            for number, caller in enumerate(opened):
                body = b"%d" % number
                send = client.send_command("orders", body, properties={"KEYS": f"k{number}", "WAIT": "true"})
                oneway = structs.replace(client.send_command("orders", body + b" oneway"), flag=ONEWAY_FLAG)
                caller.sendall(encode(send, number) + encode(oneway, 1000 + number))
            answers = [await reply(caller) for caller in opened]
            assert [(answer.code, answer.opaque) for answer in answers] == [(0, number) for number in range(12)]
            hosts = {b"%d" % number: caller.getsockname() for number, caller in enumerate(opened)}
        stored, _ = await client.pull("orders", offset=1)
        assert len(stored) == 24
        assert {one.body.partition(b" ")[0]: tuple(one.born_host) for one in stored} == hosts
        offsets = {one.body: one.queue_offset for one in stored}
        for number, answer in enumerate(answers):
            assert int(answer.ext_fields["queueOffset"]) == offsets[b"%d" % number]
