"""Acknowledgements of popped messages, 200051 and 200151: all that came at once are stored together.

[AckMessageProcessor]
"""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import Final

from downrange.broker.pop.leases import LeaseKey
from downrange.broker.pop.pop import Ack, Pop
from downrange.model.topics import pop_retry_topic
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.pop import (
    ORDERLY_REVIVE_QUEUE,
    AckMessageRequest,
    BatchAck,
    BatchAckMessageBody,
    ReceiptHandle,
    decode_bits,
)
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import RESPONSE_FLAG, Buffer, Command
from downrange.protocol.errors import BrokerError, RemoteProtocolError
from downrange.protocol.framing import Frame, decode_frame
from downrange.store.new_message import PutMessageStatus
from downrange.transport.connection import Connection
from downrange.transport.serving import encode_reply, error_reply

_ACK: Final = int(RequestCode.ACK_MESSAGE)
_BATCH: Final = int(RequestCode.BATCH_ACK_MESSAGE)


class Acks:
    """The family of acknowledgements."""

    codes: Final = frozenset((_ACK, _BATCH))

    def __init__(self, pop: Pop) -> None:
        self._pop = pop
        self._statistics = pop.writer.statistics

    def take(self, frames: list[Frame], origins: list[Connection], at: int, stop: int) -> None:
        """Answer the acknowledgements in `frames[at:stop]`, of which `frames[n]` came over `origins[n]`."""
        start = perf_counter()
        together: list[Ack] = []
        passed: list[tuple[Command, Connection]] = []
        replies: list[tuple[Command, Connection, Command]] = []
        for number in range(at, stop):
            frame, origin = frames[number], origins[number]
            if origin.is_full:
                origin.defer(frame)
                continue
            try:
                command = decode_frame(frame)
                if command.flag & RESPONSE_FLAG:
                    continue
                found = self._read(command, origin)
                if any(revive_queue == ORDERLY_REVIVE_QUEUE for _, _, revive_queue, _ in found):
                    self._pop.acknowledge(found)  # this may be refused for a single message
                else:
                    together += found
            except RemoteProtocolError as error:
                origin.break_off(error)
            except Exception as error:
                replies.append((command, origin, error_reply(command, error)))
            else:
                passed.append((command, origin))
        try:
            end_offset = self._pop.acknowledge(together) if together else 0
        except Exception as error:
            replies += [(command, origin, error_reply(command, error)) for command, origin in passed]
            passed = []
            end_offset = 0
        millis = (perf_counter() - start) * 1000 / (stop - at)
        self._answer(replies, millis)
        if end_offset and self._pop.writer.makes_wait:
            for _, origin in passed:
                origin.begin_answering(1)
            self._pop.writer.tell_when_safe(end_offset, partial(self._answer_later, passed, millis))
        else:
            self._answer([(command, origin, command.reply()) for command, origin in passed], millis)

    def _answer(self, replies: list[tuple[Command, Connection, Command]], millis: float) -> None:
        origins: dict[Connection, None] = {}
        for command, origin, reply in replies:
            self._statistics.rpc(command.code, reply.code, millis)
            if not command.is_oneway:
                origin.reply_parts(encode_reply(reply))
                origins[origin] = None
        for origin in origins:
            origin.flush()

    def _answer_later(self, passed: list[tuple[Command, Connection]], millis: float, status: PutMessageStatus) -> None:
        for command, origin in passed:
            reply = command.reply()
            if status is not PutMessageStatus.PUT_OK:
                reply = command.reply(ResponseCode.SYSTEM_ERROR, f"not safe yet: {status.value}")
            self._statistics.rpc(command.code, reply.code, millis)
            parts: list[Buffer] = [] if command.is_oneway else encode_reply(reply)
            origin.end_answering(1, *parts)

    # --- reading ------------------------------------------------------------------------------------------------

    def _read(self, command: Command, origin: Connection) -> list[Ack]:
        if command.code == _ACK:
            return [self._single(command, origin)]
        acks = decode_body(BatchAckMessageBody, command.body_bytes).acks if command.body_bytes else ()
        if not acks:
            raise BrokerError(None, ResponseCode.NO_MESSAGE)
        return [self._batch(ack) for ack in acks if self._is_here(ack)]

    def _single(self, command: Command, origin: Connection) -> Ack:
        header = command.header(AckMessageRequest)
        topic, queue_id, offset = header.topic, header.queue_id, header.offset
        self._pop.check_place(topic, queue_id, origin.peer)
        handle = ReceiptHandle.parse(header.extra_info)
        store = self._pop.store
        lowest, highest = store.min_offset_of(topic, queue_id), store.max_offset_of(topic, queue_id)
        if not lowest <= offset <= highest:
            raise BrokerError(
                f"offset is illegal, key:{topic}@{queue_id}, commit:{offset}, store:{lowest}~{highest}",
                ResponseCode.NO_MESSAGE,
            )
        key = LeaseKey(topic, header.consumer_group, queue_id, handle.start_offset, handle.pop_time)
        return key, (offset,), handle.revive_queue, handle.invisible_time

    def _batch(self, ack: BatchAck) -> Ack:
        key = LeaseKey(_source(ack), ack.consumer_group, ack.queue_id, ack.start_offset, ack.pop_time)
        return key, decode_bits(ack.bits, ack.start_offset), ack.revive_queue_id, ack.invisible_time

    def _is_here(self, ack: BatchAck) -> bool:
        """Entries with a topic or queue that is not here are passed over, as RocketMQ does."""
        topic = self._pop.tables.topics.get(_source(ack))
        return topic is not None and 0 <= ack.queue_id < topic.read_queue_nums


def _source(ack: BatchAck) -> str:
    """The topic that the messages of a batch ack were read from."""
    if ack.retry not in ("1", "2") or ack.revive_queue_id == ORDERLY_REVIVE_QUEUE:
        return ack.topic
    return pop_retry_topic(ack.consumer_group, ack.topic, version=int(ack.retry))
