"""Connections, servers and the pool over real sockets on loopback."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from downrange.compiled import steps
from downrange.model.errors import MQError
from downrange.protocol.codes import ResponseCode, SerializeType
from downrange.protocol.command import Command, request
from downrange.protocol.errors import NoPermission, RemoteProtocolError
from downrange.protocol.framing import encode
from downrange.transport.connection import Connection
from downrange.transport.errors import ConnectFailed, ConnectionLost, ListenFailed, RequestTimedOut, TransportClosed
from downrange.transport.limits import Limits
from downrange.transport.pool import Pool, connect
from downrange.transport.server import Server
from downrange.transport.serving import Endpoint, LaterReply, serve_commands
from tests.support.lasting_port import lasting_port

ECHO, LATER, NEVER, FAIL, REFUSE, BAD_BYTES, ASK_BACK, BIG, CRASH = range(1, 10)


class Peer:
    """A server whose requests do one thing each."""

    def __init__(self) -> None:
        self.later: list[tuple[Command, LaterReply]] = []
        self.seen: list[int] = []
        self.closed: list[Connection] = []
        self.serve = serve_commands(self.handle)

    def handle(self, command: Command, connection: Connection) -> Command | LaterReply | None:
        self.seen.append(command.code)
        match command.code:
            case 1:
                return command.reply(ext_fields=command.ext_fields, body=command.body)
            case 2:
                later: LaterReply = asyncio.get_running_loop().create_future()
                self.later.append((command, later))
                return later
            case 3:
                return None
            case 4:
                raise MQError("this went wrong")
            case 5:
                raise NoPermission("not for you")
            case 6:
                raise RemoteProtocolError("unreadable")
            case 7:
                return asyncio.ensure_future(self.ask_back(command, connection))
            case 8:
                return command.reply(body=[memoryview(bytes(200_000)), bytes(100_000)])
            case _:
                raise ZeroDivisionError("a bug")

    async def ask_back(self, command: Command, connection: Connection) -> Command | None:
        answer = await connection.request(request(40, ext_fields={"who": "you"}), timeout=30)
        return command.reply(body=answer.body)


@pytest.fixture(params=["together", "by the loop"], autouse=True)
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server reads its connections together where it can, else by the loop's own transports."""
    if request.param == "by the loop":
        monkeypatch.setattr("downrange.transport.server.READS_TOGETHER", False)
    elif steps is None:
        pytest.skip("this needs the compiled module")


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest.fixture
async def server(peer: Peer) -> AsyncIterator[Server]:
    async with Server(peer.serve, on_close=peer.closed.append, limits=Limits(drain_seconds=2)) as server:
        yield server


def address(server: Server) -> str:
    return f"127.0.0.1:{server.port}"


async def until(condition: Callable[[], object], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("kind", SerializeType)
async def test_a_request_gets_its_reply_in_the_encoding_it_used(server: Server, kind: SerializeType) -> None:
    client = await connect(address(server))
    reply = await client.request(request(ECHO, ext_fields={"a": "1"}, body=b"hello", serialize_type=kind), timeout=30)
    assert (reply.code, reply.body, reply.ext_fields, reply.serialize_type) == (0, b"hello", {"a": "1"}, kind)
    await client.drain(1)


async def test_replies_are_matched_by_opaque_whatever_their_order(server: Server, peer: Peer) -> None:
    client = await connect(address(server))
    first = client.request_nowait(request(LATER))
    second = client.request_nowait(request(LATER))
    await until(lambda: len(peer.later) == 2)
    for command, later in reversed(peer.later):
        later.set_result(command.reply(body=b"%d" % command.opaque))
    assert (await second).body == b"2"
    assert (await first).body == b"1"
    await client.drain(1)


async def test_hundreds_of_requests_in_flight_all_come_back(server: Server) -> None:
    client = await connect(address(server))
    replies = await asyncio.gather(
        *(client.request(request(ECHO, body=bytes([n % 256]) * n), timeout=10) for n in range(500))
    )
    assert [len(reply.body) for reply in replies] == list(range(500))
    await client.drain(1)


async def test_frames_received_in_one_chunk_are_answered_in_one_go(server: Server) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    frame = encode(request(ECHO, body=b"x"))
    writer.write(frame * 100)
    expected = len(encode(request(ECHO, body=b"x").reply(ext_fields={}, body=b"x"))) * 100
    async with asyncio.timeout(30):
        assert len(await reader.readexactly(expected)) == expected
    writer.close()


async def test_a_oneway_request_is_never_answered(server: Server, peer: Peer) -> None:
    client = await connect(address(server))
    for code in (ECHO, FAIL, LATER):
        client.oneway(request(code, oneway=True))
    assert (await client.request(request(ECHO, body=b"end"), timeout=30)).body == b"end"
    for command, later in peer.later:
        later.set_result(command.reply())
    assert (await client.request(request(ECHO, body=b"end"), timeout=30)).body == b"end"
    assert peer.seen == [ECHO, FAIL, LATER, ECHO, ECHO]
    await client.drain(1)


async def test_errors_become_reply_codes(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    client = await connect(address(server))
    failed = await client.request(request(FAIL), timeout=30)
    assert (failed.code, failed.remark) == (ResponseCode.SYSTEM_ERROR, "this went wrong")
    refused = await client.request(request(REFUSE), timeout=30)
    assert (refused.code, refused.remark) == (ResponseCode.NO_PERMISSION, "not for you")
    crashed = await client.request(request(CRASH), timeout=30)
    assert (crashed.code, crashed.remark) == (ResponseCode.SYSTEM_ERROR, "ZeroDivisionError: a bug")
    assert "a bug" in caplog.text
    await client.drain(1)


async def test_a_later_reply_may_fail_or_be_given_up(server: Server, peer: Peer) -> None:
    client = await connect(address(server))
    failing = client.request_nowait(request(LATER))
    given_up = client.request_nowait(request(LATER))
    nothing = client.request_nowait(request(LATER))
    await until(lambda: len(peer.later) == 3)
    peer.later[0][1].set_exception(NoPermission("later"))
    peer.later[1][1].cancel()
    peer.later[2][1].set_result(None)
    assert (await failing).code == ResponseCode.NO_PERMISSION
    assert (await given_up).code == ResponseCode.SYSTEM_ERROR
    assert (await client.request(request(ECHO), timeout=30)).code == 0
    assert not nothing.done()
    nothing.cancel()
    await client.drain(1)


async def test_a_server_may_ask_its_client(server: Server) -> None:
    def answer(command: Command, connection: Connection) -> Command:
        return command.reply(body=command.ext_fields["who"].encode())

    client = await connect(address(server), Endpoint(serve_commands(answer)))
    assert (await client.request(request(ASK_BACK), timeout=30)).body == b"you"
    await client.drain(1)


async def test_no_answer_in_time(server: Server) -> None:
    client = await connect(address(server))
    with pytest.raises(RequestTimedOut, match=r"did not answer request 3 within 0\.05 s"):
        await client.request(request(NEVER), timeout=0.05)
    assert (await client.request(request(ECHO), timeout=30)).code == 0
    assert "asked=0" in repr(client)
    await client.drain(1)


async def test_a_lost_connection_ends_every_request_that_waits(server: Server, peer: Peer) -> None:
    client = await connect(address(server))
    waiting = [asyncio.ensure_future(client.request(request(NEVER), timeout=30)) for _ in range(3)]
    await until(lambda: len(peer.seen) == 3)
    for connection in list(server.connections):
        connection.abort()
    for one in waiting:
        with pytest.raises(ConnectionLost):
            await one
    with pytest.raises(TransportClosed):
        client.oneway(request(ECHO))
    await until(lambda: len(peer.closed) == 1)


async def test_a_peer_that_speaks_another_protocol_is_known_by_what_it_said() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    web = await asyncio.start_server(answer, "127.0.0.1", 0)
    client = await connect(f"127.0.0.1:{web.sockets[0].getsockname()[1]}")
    with pytest.raises(ConnectionLost, match="was lost: the other end speaks HTTP"):
        await client.request(request(ECHO), timeout=5)
    with pytest.raises(TransportClosed, match="is closed: the other end speaks HTTP"):
        client.oneway(request(ECHO))
    web.close()


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 8, b"\x00\x00\x00\x06\x00\x00\x00\x02{]"])
async def test_garbage_closes_its_connection_and_no_other(server: Server, garbage: bytes) -> None:
    client = await connect(address(server))
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(encode(request(ECHO, body=b"before")) + garbage)
    async with asyncio.timeout(30):
        received = await reader.read()
    assert received == b"" or received.endswith(b"before")
    writer.close()
    assert (await client.request(request(ECHO), timeout=30)).code == 0
    unreadable = client.request_nowait(request(BAD_BYTES))
    with pytest.raises(ConnectionLost):
        await unreadable


async def test_a_peer_that_does_not_read_is_cut_off_and_costs_bounded_memory(peer: Peer) -> None:
    limits = Limits(max_unsent_bytes_per_connection=2_000_000)
    async with Server(peer.serve, limits=limits, on_close=peer.closed.append) as server:
        slow = socket.create_connection(("127.0.0.1", server.port))
        normal = await connect(address(server))
        ask = encode(request(LATER))
        slow.sendall(ask * 2000)
        await until(lambda: len(peer.later) == 2000)
        for command, later in peer.later:
            later.set_result(command.reply(body=bytes(100_000)))
        await until(lambda: len(peer.closed) == 1)
        assert (await normal.request(request(BIG), timeout=30)).code == 0
        assert server.usage.unsent_bytes == 0
        assert server.usage.requests == 0
        slow.close()
        await normal.drain(1)


async def test_a_peer_that_does_not_read_is_not_read_from(server: Server, peer: Peer) -> None:
    slow = socket.create_connection(("127.0.0.1", server.port))
    slow.setblocking(False)
    ask = encode(request(BIG, body=bytes(5000)))
    loop = asyncio.get_running_loop()
    sending = asyncio.ensure_future(loop.sock_sendall(slow, ask * 600))
    await asyncio.sleep(0.3)
    seen = len(peer.seen)
    assert seen < 600
    received = 0
    async with asyncio.timeout(30):
        while len(peer.seen) < 600 or received < 600 * 300_000:
            received += len(await loop.sock_recv(slow, 1_000_000))
    await sending
    slow.close()


async def test_requests_beyond_the_limit_are_answered_busy(peer: Peer) -> None:
    async with Server(peer.serve, limits=Limits(max_requests_per_connection=5, drain_seconds=0.1)) as server:
        client = await connect(address(server))
        replies = [client.request_nowait(request(LATER)) for _ in range(8)]
        busy = await asyncio.gather(*replies[5:])
        assert {reply.code for reply in busy} == {ResponseCode.SYSTEM_BUSY}
        assert busy[0].remark == "[OVERLOAD]system busy, start flow control for a while"
        assert not any(reply.done() for reply in replies[:5])
        for command, later in peer.later:
            later.set_result(command.reply())
        await asyncio.gather(*replies[:5])
        await client.drain(1)


async def test_a_client_waits_for_room_when_it_has_asked_enough(server: Server, peer: Peer) -> None:
    client = await connect(address(server), Endpoint(limits=Limits(max_requests_per_connection=2)))
    asked = [asyncio.ensure_future(client.request(request(LATER), timeout=30)) for _ in range(4)]
    await until(lambda: len(peer.later) == 2)
    with pytest.raises(RequestTimedOut, match="was not sent"):
        await client.request(request(ECHO), timeout=0.05)
    answered = 0
    while answered < 4:
        await until(lambda: len(peer.later) > answered)  # noqa: B023
        command, later = peer.later[answered]
        later.set_result(command.reply())
        answered += 1
    assert [reply.code for reply in await asyncio.gather(*asked)] == [0, 0, 0, 0]
    await client.drain(1)


async def test_idle_and_unfinished_connections_are_closed(peer: Peer) -> None:
    limits = Limits(idle_seconds=0.2, frame_seconds=0.1)
    async with Server(peer.serve, limits=limits, on_close=peer.closed.append) as server:
        idle = await connect(address(server))
        await asyncio.wait_for(idle.wait_closed(), 5)
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        async with asyncio.timeout(30):
            while len(peer.closed) < 2:  # a byte now and then does not keep an unfinished frame alive
                writer.write(b"\x00")
                await asyncio.sleep(0.02)
        writer.close()


async def test_stopping_answers_what_is_in_flight(peer: Peer) -> None:
    server = Server(peer.serve, limits=Limits(drain_seconds=5))
    await server.start()
    client = await connect(address(server))
    waiting = client.request_nowait(request(LATER))
    await until(lambda: peer.later)
    stopping = asyncio.ensure_future(server.stop())
    await asyncio.sleep(0.05)
    with pytest.raises(ConnectFailed):
        await connect(address(server))
    command, later = peer.later[0]
    later.set_result(command.reply(body=b"just in time"))
    assert (await waiting).body == b"just in time"
    await stopping
    await client.wait_closed()
    assert not server.connections


async def test_a_port_in_use_is_one_clear_line(server: Server) -> None:
    with pytest.raises(ListenFailed, match=rf"cannot listen on 127\.0\.0\.1:{server.port}: .*in use"):
        await Server(Peer().serve, port=server.port).start()


async def test_the_pool_connects_once_and_again_after_a_loss(server: Server) -> None:
    pool = Pool()
    first = await asyncio.gather(*(pool.get(address(server)) for _ in range(10)))
    assert len({id(connection) for connection in first}) == 1
    for connection in list(server.connections):
        connection.abort()
    await first[0].wait_closed()
    assert (await pool.request(address(server), request(ECHO, body=b"again"), timeout=30)).body == b"again"
    await pool.oneway(address(server), request(ECHO, oneway=True))
    await pool.close()
    with pytest.raises(TransportClosed):
        await pool.get(address(server))


async def test_the_pool_backs_off_from_an_address_that_refuses() -> None:
    pool = Pool()
    port = lasting_port()
    where = f"127.0.0.1:{port}"
    loop = asyncio.get_running_loop()
    for _ in range(3):
        with pytest.raises(ConnectFailed, match="cannot connect"):
            await pool.get(where)
    attempts = 0
    original = loop.create_connection

    async def counted(*arguments: object, **keywords: object) -> object:
        nonlocal attempts
        attempts += 1
        return await original(*arguments, **keywords)  # type: ignore[call-overload]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(loop), "create_connection", lambda _, *a, **k: counted(*a, **k), raising=False)
        end = loop.time() + 0.3
        while loop.time() < end:
            with pytest.raises(ConnectFailed):
                await pool.get(where)
            await asyncio.sleep(0)
    assert attempts <= 4
    async with Server(Peer().serve, port=port):
        async with asyncio.timeout(30):
            while True:
                try:
                    connection = await pool.get(where)
                    break
                except ConnectFailed:
                    await asyncio.sleep(0.02)
        assert connection.is_open
        await pool.close()


@pytest.mark.parametrize("text", ["nonsense", "host:", ":1", "host:0", "host:70000", "host:x", ""])
async def test_what_is_not_an_address_is_said_so(text: str) -> None:
    with pytest.raises(ConnectFailed, match="not an address"):
        await connect(text)


# --- closed connections are no garbage ----------------------------------------------------------------------------


async def ask_and_close(client: Connection) -> None:
    await client.request(request(ECHO), timeout=30)
    client.close()


UNREADABLE = bytes((0, 0, 0, 12, 0, 0, 0, 8)) + b"{nonsense"[:8]


async def break_the_protocol(client: Connection) -> None:
    client.write(b"\xff" * 64)


async def send_an_unreadable_header(client: Connection) -> None:
    client.write(UNREADABLE)


async def answer_rubbish(client: Connection) -> None:
    """The server reads it while it waits for the answer to a question of its own."""
    client.write(encode(request(ASK_BACK)))


async def vanish_in_the_middle(client: Connection) -> None:
    client.write(encode(request(LATER)) + encode(request(ECHO))[:9])
    client.close()


def answer_all(peer: Peer) -> None:
    while peer.later:
        command, later = peer.later.pop()
        later.set_result(command.reply())


@pytest.mark.parametrize(
    "end",
    [ask_and_close, break_the_protocol, send_an_unreadable_header, answer_rubbish, vanish_in_the_middle],
)
async def test_a_closed_connection_is_freed_without_the_garbage_collector(
    server: Server,
    peer: Peer,
    caplog: pytest.LogCaptureFixture,
    end: Callable[[Connection], Awaitable[None]],
) -> None:
    """Else a server with thousands of connections pauses, again and again, to look for those that were closed."""
    rubbish = Endpoint(lambda frames, origins: origins[0].write(UNREADABLE))
    # The lists of the fixtures would hold them, and so would the errors that are logged.
    server.on_close = None
    caplog.set_level(logging.CRITICAL)
    gc.collect()
    gc.disable()
    try:
        client = await connect(address(server), endpoint=rubbish)
        await until(lambda: server.connections)
        (accepted,) = (weakref.ref(one) for one in server.connections)
        own = weakref.ref(client)
        await end(client)
        del client
        await until(lambda: not server.connections)
        answer_all(peer)
        await until(lambda: accepted() is None and own() is None, 10)
    finally:
        gc.enable()
