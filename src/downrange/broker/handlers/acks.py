"""Acknowledgements of popped messages, 200051 and 200151: all that came at once are stored together.

[AckMessageProcessor]
"""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from time import perf_counter
from typing import Final, NamedTuple

from downrange.broker.pop.leases import Lease, LeaseKey, bits_of
from downrange.broker.pop.pop import Pop
from downrange.compiled import steps
from downrange.model.topics import pop_retry_topic
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.pop import (
    ORDERLY_REVIVE_QUEUE,
    AckMessageRequest,
    BatchAck,
    BatchAckMessageBody,
    ReceiptHandle,
    decode_bits,
    offsets_of,
)
from downrange.protocol.bodies.pop_frames import DONE_PIECES, AckGroup, read_acks
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import RESPONSE_FLAG, Command
from downrange.protocol.errors import BrokerError, RemoteProtocolError
from downrange.protocol.framing import Frame, decode_frame
from downrange.store.new_message import PutMessageStatus
from downrange.transport.connection import Connection
from downrange.transport.serving import encode_reply, error_reply, send_replies

_ACK: Final = int(RequestCode.ACK_MESSAGE)
_BATCH: Final = int(RequestCode.BATCH_ACK_MESSAGE)
_OK: Final = int(ResponseCode.SUCCESS)
_IS_COMPILED: Final = steps is not None
_is_full = attrgetter("is_full")


class _Answered(NamedTuple):
    """Neighbouring requests with one code, their connections, and their replies with one code, one behind the other."""

    request_code: int
    frames: list[Frame]
    origins: list[Connection]
    code: int
    replies: bytes


class _Run:
    """Acknowledgements that are stored together, and what is answered then."""

    __slots__ = ("acks", "answers")

    def __init__(self) -> None:
        self.acks: dict[Lease, int] = {}
        """The bits of each lease."""
        self.answers: list[_Answered] = []

    def add(self, lease: Lease | None, bits: int) -> None:
        """Acknowledge messages of a lease; None: it is over."""
        if lease is not None:
            self.acks[lease] = self.acks.get(lease, 0) | bits

    @property
    def origins(self) -> list[Connection]:
        """The connection of each request."""
        return [origin for answered in self.answers for origin in answered.origins]


class Acks:
    """The family of acknowledgements."""

    codes: Final = frozenset((_ACK, _BATCH))

    def __init__(self, pop: Pop) -> None:
        self._state = pop.state
        self._acknowledging = pop.acknowledging
        self._writer = pop.state.writer
        self._statistics = pop.state.writer.statistics
        self.accelerated = self.not_accelerated = 0
        """How many requests the compiled step has read, and how many were read in Python."""

    def take(self, frames: list[Frame], origins: list[Connection], at: int, stop: int) -> None:
        """Answer the acknowledgements in `frames[at:stop]`, of which `frames[n]` came over `origins[n]`."""
        began, first = perf_counter(), at
        run = _Run()
        while at < stop:
            reached, code, groups, replies = read_acks(frames, at, stop, DONE_PIECES)
            if reached > at and self._take_usual(run, groups, origins[at:reached]):
                run.answers.append(_Answered(code, frames[at:reached], origins[at:reached], _OK, replies))
                if _IS_COMPILED:
                    self.accelerated += reached - at
                else:
                    self.not_accelerated += reached - at
                at = reached
                continue
            reached = max(reached, at + 1)
            for number in range(at, reached):
                self._take_one(run, frames[number], origins[number])
            at = reached
        end_offset = 0
        try:
            end_offset = self._acknowledging.acknowledge(run.acks)
        except Exception as error:
            _refuse(run, error)
        millis = (perf_counter() - began) * 1000 / (stop - first)
        if end_offset and self._writer.makes_wait:
            for origin in run.origins:
                origin.begin_answering(1)
            self._writer.tell_when_safe(end_offset, partial(self._safe, run, millis))
        else:
            self._answer(run, millis)

    def _take_usual(self, run: _Run, groups: list[AckGroup], origins: list[Connection]) -> bool:
        """Take acknowledgements that `read_acks` has read; False when they have to be looked at one by one."""
        if any(map(_is_full, origins)):
            return False
        topics, find = self._state.tables.topics, self._state.leases.get
        acks: list[tuple[Lease | None, int]] = []
        for topic, group, queue_id, start, pop_time, _, revive_queue, bits in groups:
            known = topics.get(topic)
            if known is None or not 0 <= queue_id < known.read_queue_nums or revive_queue == ORDERLY_REVIVE_QUEUE:
                return False
            lease = find((topic, group, queue_id, start, pop_time))
            if (lease is None or bits & ~lease.held) and not self._are_stored(topic, queue_id, start, bits):
                return False
            acks.append((lease, bits))
        for lease, bits in acks:
            run.add(lease, bits)
        return True

    def _are_stored(self, topic: str, queue_id: int, start: int, bits: int) -> bool:
        """Whether all these messages are in the store, or may come next."""
        lowest, highest = self._state.offset_range(topic, queue_id)
        return lowest <= start + (bits & -bits).bit_length() - 1 and start + bits.bit_length() - 1 <= highest

    def _take_one(self, run: _Run, frame: Frame, origin: Connection) -> None:
        """Take a request that is not usual."""
        if origin.is_full:
            origin.defer(frame)
            return
        self.not_accelerated += 1
        try:
            command = decode_frame(frame)
            if command.flag & RESPONSE_FLAG:
                return
            try:
                if command.code == _ACK:
                    self._read_single(run, command, origin)
                else:
                    self._read_batch(run, command)
                reply = command.reply()
            except RemoteProtocolError:
                raise
            except Exception as error:
                reply = error_reply(command, error)
        except RemoteProtocolError as error:
            origin.break_off(error)
            return
        run.answers.append(_answered(command, frame, origin, reply))

    # --- reading ------------------------------------------------------------------------------------------------

    def _read_single(self, run: _Run, command: Command, origin: Connection) -> None:
        header = command.header(AckMessageRequest)
        topic, queue_id, offset = header.topic, header.queue_id, header.offset
        self._state.check_place(topic, queue_id, origin.peer)
        handle = ReceiptHandle.parse(header.extra_info)
        lowest, highest = self._state.offset_range(topic, queue_id)
        if not lowest <= offset <= highest:
            raise BrokerError(
                f"offset is illegal, key:{topic}@{queue_id}, commit:{offset}, store:{lowest}~{highest}",
                ResponseCode.NO_MESSAGE,
            )
        key = LeaseKey(topic, header.consumer_group, queue_id, handle.start_offset, handle.pop_time)
        if handle.is_orderly:
            self._acknowledging.acknowledge_in_order(key, (offset,), handle.invisible_time)
        else:
            run.add(self._state.leases.get(key), bits_of(handle.start_offset, (offset,)))

    def _read_batch(self, run: _Run, command: Command) -> None:
        acks = decode_body(BatchAckMessageBody, command.body_bytes).acks if command.body_bytes else ()
        if not acks:
            raise BrokerError(None, ResponseCode.NO_MESSAGE)
        found: list[tuple[BatchAck, LeaseKey, int]] = []
        for ack in acks:
            source = _source(ack)
            topic = self._state.tables.topics.get(source)
            if topic is None or not 0 <= ack.queue_id < topic.read_queue_nums:
                continue  # entries with a topic or queue that is not here are passed over, as RocketMQ does
            key = LeaseKey(source, ack.consumer_group, ack.queue_id, ack.start_offset, ack.pop_time)
            found.append((ack, key, decode_bits(ack.bits)))
        for ack, key, bits in found:
            if ack.revive_queue_id == ORDERLY_REVIVE_QUEUE:
                offsets = offsets_of(ack.start_offset, bits)
                self._acknowledging.acknowledge_in_order(key, offsets, ack.invisible_time)
            else:
                run.add(self._state.leases.get(key), bits)

    # --- answering ----------------------------------------------------------------------------------------------

    def _safe(self, run: _Run, millis: float, status: PutMessageStatus) -> None:
        for origin in run.origins:
            origin.end_answering(1)
        if not status.is_safe_here:
            _refuse(run, BrokerError(f"not safe yet: {status.value}", ResponseCode.SYSTEM_ERROR))
        self._answer(run, millis)

    def _answer(self, run: _Run, millis: float) -> None:
        for answered in run.answers:
            self._statistics.rpc(answered.request_code, answered.code, millis, len(answered.frames))
        answers = [answered for answered in run.answers if answered.replies]
        if len(answers) == 1:
            send_replies(answers[0].origins, answers[0].replies)
        elif answers:
            origins = [origin for answered in answers for origin in answered.origins]
            send_replies(origins, b"".join([answered.replies for answered in answers]))


def _refuse(run: _Run, error: Exception) -> None:
    """Acknowledgements were not stored: all requests that would have been answered with yes get an error."""
    answers, run.answers = run.answers, []
    for answered in answers:
        if answered.code != _OK:
            run.answers.append(answered)
            continue
        for frame, origin in zip(answered.frames, answered.origins, strict=True):
            command = decode_frame(frame)
            run.answers.append(_answered(command, frame, origin, error_reply(command, error)))


def _answered(command: Command, frame: Frame, origin: Connection, reply: Command) -> _Answered:
    text = b"" if command.is_oneway else b"".join(encode_reply(reply))
    return _Answered(command.code, [frame], [origin], reply.code, text)


def _source(ack: BatchAck) -> str:
    """The topic that the messages of a batch ack were read from."""
    if ack.retry not in ("1", "2") or ack.revive_queue_id == ORDERLY_REVIVE_QUEUE:
        return ack.topic
    return pop_retry_topic(ack.consumer_group, ack.topic, version=int(ack.retry))
