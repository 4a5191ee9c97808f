"""Replies read in one step say what they say when read in several."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import cast

from downrange.client.producer.outgoing import Outgoing
from downrange.client.producer.send_requests import results_of
from downrange.client.producer.send_result import Expected, SendResult, SendStatus
from downrange.client.producer.stored_reply import read_stored, result_of, take_stored
from downrange.model.message import Message, MessageQueue
from downrange.protocol.bodies.send import SendMessageResponse
from downrange.protocol.codes import ResponseCode, SerializeType
from downrange.protocol.command import Command
from downrange.protocol.errors import RemoteProtocolError
from downrange.protocol.framing import Frame, FrameDecoder, decode_frame, encode
from downrange.transport.connection import Connection
from downrange.transport.outstanding import Asked
from tests.support.golden import scenarios

QUEUE = MessageQueue("orders", "broker-a", 1)
READY = Outgoing(310, "orders", b"body", 0, 0, "", ("ID",), (Message("orders", b"body"),), 0)
EXPECTED = ("ID", "orders", QUEUE)
STORED = SendMessageResponse(msg_id="0A00000100002A9F00000000000003E8", queue_id=1, queue_offset=7)


def frame_of(command: Command) -> Frame:
    (frame,) = FrameDecoder().frames(encode(command))
    return frame


def reply(opaque: int, code: int = ResponseCode.SUCCESS) -> Frame:
    return frame_of(Command(310, opaque).reply(code, header=STORED))


def agrees(frame: Frame) -> bool:
    """Whether the frame is a StoredReply; it must mean what the general way finds in it."""
    stored = read_stored(frame)
    if stored is None:
        return False
    command = decode_frame(frame)
    assert (command.code, command.opaque, command.is_response) == (0, stored.opaque, True)
    assert results_of(command, READY, QUEUE) == (result_of(stored.stored, SendStatus.SEND_OK, EXPECTED),)
    return True


def captured_frames() -> list[Frame]:
    return [frame for rows in scenarios().values() for row in rows for frame in FrameDecoder().frames(row.frame)]


def test_what_genuine_brokers_answered() -> None:
    found = sum(map(agrees, captured_frames()))
    assert found > 20


def test_damaged_replies_are_left_to_the_general_way_or_mean_the_same() -> None:
    source = random.Random(4)
    frames = [reply(5), *(frame for frame in captured_frames() if read_stored(frame) is not None)][:60]
    for _ in range(20_000):
        kind, header, body = source.choice(frames)
        damaged = bytearray(header)
        for _ in range(source.randint(1, 3)):
            damaged[source.randrange(len(damaged))] = source.choice(b'{}[]":,0123456789-tfn\\\x00\xff')
        with suppress(RemoteProtocolError):  # the general way also reads the language, the remark and the version
            agrees((kind, bytes(damaged), body))


def test_only_success_is_read() -> None:
    assert read_stored(reply(1, ResponseCode.FLUSH_DISK_TIMEOUT)) is None
    assert read_stored(reply(1, ResponseCode.SYSTEM_ERROR)) is None
    assert read_stored(frame_of(Command(0, 1, 0, {"msgId": "x", "queueId": "1", "queueOffset": "7"}))) is None
    assert read_stored(frame_of(Command(0, 1, 1))) is None
    assert read_stored(frame_of(Command(0, 1, 1, {"queueId": "x"}))) is None
    binary = Command(310, 1, serialize_type=int(SerializeType.ROCKETMQ)).reply(header=STORED)
    assert read_stored(frame_of(binary)) is None


class Asking:
    """A connection, as far as `take_stored` needs it."""

    def __init__(self) -> None:
        self.requests: dict[int, Asked] = {}
        self.room = 0

    def ask(self, opaque: int, expected: Expected | None = EXPECTED) -> asyncio.Future[object]:
        waiter: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.requests[opaque] = (waiter, 0.0, 310, 3.0, expected)
        return waiter

    def room_made(self, replies: int) -> None:
        self.room += replies

    def take(self, *frames: Frame) -> int:
        return take_stored(list(frames), 0, cast(Connection, self))


async def test_each_reply_reaches_who_asked() -> None:
    asking = Asking()
    waiters = [asking.ask(number) for number in (1, 2, 3)]
    assert asking.take(reply(3), reply(1)) == 2
    assert [waiter.done() for waiter in waiters] == [True, False, True]
    first = waiters[0].result()
    assert isinstance(first, SendResult)
    assert (first.status, first.message_id, first.queue, first.queue_offset) == (SendStatus.SEND_OK, "ID", QUEUE, 7)
    assert (list(asking.requests), asking.room) == ([2], 2)


async def test_the_rest_is_left_from_the_first_frame_that_is_not_ours() -> None:
    asking = Asking()
    asking.ask(1)
    other = asking.ask(2, expected=None)
    asking.ask(3)
    assert asking.take(reply(1), reply(2), reply(3)) == 1, "who asked with a command gets a command"
    assert asking.take(reply(9)) == 0, "nobody waits for it"
    assert asking.take(reply(3, ResponseCode.SYSTEM_BUSY)) == 0
    assert (list(asking.requests), asking.room, other.done()) == ([2, 3], 1, False)


async def test_who_gave_up_is_told_nothing_but_makes_room() -> None:
    asking = Asking()
    asking.ask(1).cancel()
    assert asking.take(reply(1)) == 1
    assert (asking.requests, asking.room) == ({}, 1)
