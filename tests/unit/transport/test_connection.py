"""A connection on a transport that a test makes up."""

from __future__ import annotations

import asyncio

from downrange.protocol.command import Command, request
from downrange.protocol.framing import Frame, FrameDecoder, decode_frame, encode
from downrange.transport.connection import Connection
from downrange.transport.serving import Endpoint, serve_commands


class Nameless(asyncio.Transport):
    """To a peer that was gone when its name was asked for; what it had sent is there nevertheless."""

    def __init__(self, connection: Connection, sent: bytes) -> None:
        super().__init__()
        self._is_closing = False
        connection.connection_made(self)
        if not self._is_closing:
            connection.data_received(sent)
        connection.connection_lost(None)

    def is_closing(self) -> bool:
        return self._is_closing

    def abort(self) -> None:
        self._is_closing = True


async def test_who_has_gone_before_it_was_known_is_not_listened_to() -> None:
    asked: list[Command] = []
    events: list[str] = []

    def handle(command: Command, connection: Connection) -> None:
        asked.append(command)

    connection = Connection(
        Endpoint(serve_commands(handle)),
        on_open=lambda _: events.append("open"),
        on_close=lambda _: events.append("closed"),
    )
    Nameless(connection, encode(request(1), 1))
    assert asked == []
    assert events == ["open", "closed"]


class Named(asyncio.Transport):
    """To a peer that reads as much as a test allows."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.written = b""
        self.reads = True
        connection.connection_made(self)

    def get_extra_info(self, name: str, default: object = None) -> object:
        return ("10.0.0.2", 42911) if name == "peername" else default

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def replies(self) -> list[int]:
        written, self.written = self.written, b""
        return [command.opaque for command in FrameDecoder().feed(written)]


class Waiter:
    """Keeps its reply."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def done(self) -> bool:
        return bool(self.told)

    def set_result(self, reply: object, /) -> None:
        self.told.append(reply)

    def set_exception(self, error: BaseException, /) -> None:
        self.told.append(error)


async def test_the_reply_reader_takes_its_replies_and_requests_are_served() -> None:
    served: list[int] = []
    frames_read: list[int] = []

    def read(frames: list[Frame], at: int, connection: Connection) -> int:
        """Takes replies to requests that expect something."""
        while at < len(frames):
            command = decode_frame(frames[at])
            asked = connection.requests.get(command.opaque) if command.is_response else None
            if asked is None or asked[4] is None:
                break
            del connection.requests[command.opaque]
            asked[0].set_result((asked[4], command.opaque))
            frames_read.append(command.opaque)
            at += 1
        return at

    def handle(command: Command, connection: Connection) -> Command:
        served.append(command.opaque)
        return command.reply()

    connection = Connection(Endpoint(serve_commands(handle), read_replies=read))
    transport = Named(connection)
    waiters = [Waiter(), Waiter(), Waiter()]
    for expected, waiter in zip(("first", None, "third"), waiters, strict=True):
        opaque = connection.next_opaque()
        connection.ask_encoded(opaque, encode(request(1), opaque), waiter, 1, 30, expected)
    await asyncio.sleep(0)
    assert transport.replies() == [1, 2, 3]

    def reply(opaque: int) -> bytes:
        return encode(Command(0, opaque, 1))

    connection.data_received(
        encode(request(7), 11) + reply(3) + reply(2) + encode(request(7), 12) + reply(1) + reply(99)
    )
    assert (served, transport.replies(), frames_read) == ([11, 12], [11, 12], [3, 1])
    assert [waiters[0].told, waiters[2].told] == [[("first", 1)], [("third", 3)]]
    (told,) = waiters[1].told
    assert isinstance(told, Command)
    connection.data_received(reply(1) + encode(request(7), 13))  # nothing is outstanding: the reply is late
    assert (served, frames_read) == ([11, 12, 13], [3, 1])
    connection.connection_lost(None)


async def test_deferred_frames_are_served_first_and_in_their_order() -> None:
    served: list[int] = []

    def handle(command: Command, connection: Connection) -> Command:
        served.append(command.opaque)
        if command.code == 8:
            connection.pause_writing()
        return command.reply()

    connection = Connection(Endpoint(serve_commands(handle)))
    transport = Named(connection)
    connection.data_received(encode(request(7), 1) + encode(request(8), 2) + encode(request(7), 3))
    assert (served, connection.is_full, transport.reads) == ([1, 2], True, False)
    connection.data_received(encode(request(8), 4) + encode(request(7), 5))
    assert served == [1, 2]
    connection.resume_writing()
    assert (served, connection.is_full) == ([1, 2, 3, 4], True)
    connection.data_received(encode(request(7), 6))
    connection.resume_writing()
    assert (served, connection.is_full, transport.reads) == ([1, 2, 3, 4, 5, 6], False, True)
    assert transport.replies() == [1, 2, 3, 4, 5, 6]
    connection.connection_lost(None)
