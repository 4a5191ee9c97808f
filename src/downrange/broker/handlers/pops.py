"""Pops, 200050: all that came at once are leased together. [PopMessageProcessor]"""

from __future__ import annotations

from functools import lru_cache, partial
from time import perf_counter
from typing import Final

from downrange.broker.pop.pop import Pop
from downrange.broker.pop.pop_reply import encode_found, pop_response
from downrange.broker.pop.popped import Popped, PopRequest, pop_filter
from downrange.broker.pop.waiting import Waiter, wait_seconds
from downrange.compiled import steps
from downrange.model.topics import TopicConfig
from downrange.protocol.bodies.fields import encode_fields
from downrange.protocol.bodies.pop import (
    PopMessageRequest,
    PopMessageResponse,
)
from downrange.protocol.bodies.pop_frames import cut_pop, read_pop
from downrange.protocol.codes import RequestCode, ResponseCode, SerializeType
from downrange.protocol.command import ONEWAY_FLAG, RESPONSE_FLAG, Buffer, Command
from downrange.protocol.errors import (
    BrokerError,
    RemoteProtocolError,
    ServiceNotAvailable,
    SubscriptionParseFailed,
    SystemBusy,
)
from downrange.protocol.framing import Frame, decode_frame
from downrange.store.new_message import PutMessageStatus
from downrange.transport.connection import Connection
from downrange.transport.serving import encode_reply, error_reply, send_replies

_POP: Final = int(RequestCode.POP_MESSAGE)
_IS_COMPILED: Final = steps is not None
_JSON: Final = int(SerializeType.JSON)
_OK: Final = int(ResponseCode.SUCCESS)
_NOTHING: Final = int(ResponseCode.POLLING_TIMEOUT)
_FULL: Final = int(ResponseCode.POLLING_FULL)
_REFUSED: Final = encode_fields(PopMessageResponse())
_TOO_LATE_MILLIS: Final = 500
_NO_REPLY: Final = -1 << 31  # an opaque that no client takes
_REMARKS: Final = {_OK: "FOUND", _NOTHING: "NO_MESSAGE_IN_QUEUE", _FULL: "POLLING_FULL"}


class _Asked:
    """A pop that was asked for."""

    __slots__ = ("began", "born", "is_usual", "opaque", "origin", "request")

    def __init__(
        self, request: PopRequest, born: int, opaque: int, origin: Connection, began: float, *, is_usual: bool
    ) -> None:
        self.request = request
        self.born = born
        """When the client sent it; 0 if it does not say so."""
        self.opaque = opaque
        """_NO_REPLY if the peer wants none."""
        self.origin = origin
        self.began = began
        self.is_usual = is_usual
        """Whether `cut_pop` has read its header."""


class Pops:
    """The family of pops."""

    codes: Final = frozenset((_POP,))

    def __init__(self, pop: Pop) -> None:
        self._state = pop.state
        self._receiving = pop.receiving
        self._writer = pop.state.writer
        self._statistics = pop.state.writer.statistics
        self.accelerated = self.not_accelerated = 0
        """How many requests the compiled step has read, and how many were read in Python."""

    def take(self, frames: list[Frame], origins: list[Connection], at: int, stop: int) -> None:
        """Answer the pops in `frames[at:stop]`, of which `frames[n]` came over `origins[n]`; all were admitted."""
        began = perf_counter()
        read = accelerated = 0
        found: list[tuple[_Asked, Popped]] = []
        others: list[tuple[Connection, int, list[Buffer]]] = []
        now = self._state.clock.now()
        checked: PopRequest | None = None  # the consumers of a group ask for the same: what holds for one holds for all
        for number in range(at, stop):
            frame, origin = frames[number], origins[number]
            if origin.is_full:
                origin.defer(frame)
                continue
            try:
                read += 1
                asked = _read(frame, origin, began)
                if asked is None:
                    continue
                accelerated += asked.is_usual
                if asked.born and now - asked.born - asked.request.poll_millis > _TOO_LATE_MILLIS:
                    raise self._too_late()
                if asked.request is not checked:
                    topic = self._receiving.check(asked.request, origin.peer)
                    checked = asked.request
                popped = self._take_one(asked, topic, now)
            except RemoteProtocolError as error:
                origin.break_off(error)
            except Exception as error:
                others.append((origin, *_refusal(frame, error)))
            else:
                if popped is not None:
                    found.append((asked, popped))
        accelerated *= _IS_COMPILED
        self.accelerated += accelerated
        self.not_accelerated += read - accelerated
        if found:
            self._receiving.lease([popped for _, popped in found])
        self._answer(found, others, (perf_counter() - began) * 1000 / (stop - at))

    def _too_late(self) -> BrokerError:
        address = self._state.config.broker.broker_ip1
        return BrokerError(f"the broker[{address}] pop message is timeout too much", ResponseCode.POLLING_TIMEOUT)

    def _take_one(self, asked: _Asked, topic: TopicConfig, now: int) -> Popped | None:
        """What a pop has found; None when the pop waits."""
        request, state = asked.request, self._state
        popped = self._receiving.take(request, topic, now)
        if popped.queues:
            return popped
        seconds = wait_seconds(now, asked.born, request.poll_millis)
        if seconds <= 0:
            return popped
        waiting = state.waiting
        if waiting.is_full(request.topic, request.group, request.queue_id):
            popped.is_refused = True
            return popped
        if asked.origin.is_overloaded:
            raise SystemBusy("[OVERLOAD]system busy, start flow control for a while")
        asked.origin.begin_answering(1)
        waiter = Waiter(
            request.topic,
            request.group,
            request.queue_id,
            partial(self._take_again, request),
            partial(self._receiving.nothing, request),
            partial(self._answer_waiting, asked),
            (request.filter, request.attempt_id if request.is_orderly else None),
            asked.origin,
        )
        waiting.add(waiter, seconds)
        if popped.rest and not request.is_orderly:  # a filter that has not seen all messages yet
            waiting.wake(request.topic, request.group)
        return None

    def _take_again(self, request: PopRequest) -> Popped | None:
        self._state.refuse_on_slave()  # the broker may have been a master when the pop began to wait
        topic = self._state.tables.topics.get(request.topic)
        if topic is None:
            return None
        popped = self._receiving.take(request, topic, self._state.clock.now())
        if popped.queues:
            return popped
        if popped.rest and not request.is_orderly:
            self._state.waiting.wake(request.topic, request.group)
        return None

    # --- answering ----------------------------------------------------------------------------------------------

    def _answer(
        self, found: list[tuple[_Asked, Popped]], others: list[tuple[Connection, int, list[Buffer]]], millis: float
    ) -> None:
        for asked, popped in found:
            if popped.end_offset and self._writer.makes_wait:
                asked.origin.begin_answering(1)
                self._writer.tell_when_safe(popped.end_offset, partial(self._answer_safe, asked, popped))
            else:
                others.append((asked.origin, *_reply(asked, popped)))
        codes: dict[int, int] = {}
        frames: list[bytes] = []
        origins: list[Connection] = []
        for origin, code, parts in others:
            codes[code] = codes.get(code, 0) + 1
            if len(parts) == 1 and isinstance(parts[0], bytes):
                frames.append(parts[0])
                origins.append(origin)
            elif parts:
                origin.reply_parts(parts)
                origin.flush()
        for code, count in codes.items():
            self._statistics.rpc(_POP, code, millis, count)
        send_replies(origins, frames[0] if len(frames) == 1 else b"".join(frames))

    def _answer_waiting(self, asked: _Asked, result: Popped | Exception | None) -> None:
        """Answer a pop that has waited; not if its connection is gone."""
        if result is None:
            asked.origin.end_answering(1)
        elif isinstance(result, Exception):
            self._answer_later(asked, *_error(asked, result))
        elif result.end_offset and self._writer.makes_wait:
            self._writer.tell_when_safe(result.end_offset, partial(self._answer_safe, asked, result))
        else:
            self._answer_later(asked, *_reply(asked, result))

    def _answer_safe(self, asked: _Asked, popped: Popped, status: PutMessageStatus) -> None:
        if status.is_safe_here:  # a consumer must go on without slaves: a lease that they lack ends with the master
            self._answer_later(asked, *_reply(asked, popped))
        else:
            self._answer_later(asked, *_error(asked, ServiceNotAvailable(f"not safe yet: {status.value}")))

    def _answer_later(self, asked: _Asked, code: int, parts: list[Buffer]) -> None:
        self._statistics.rpc(_POP, code, (perf_counter() - asked.began) * 1000)
        asked.origin.end_answering(1, *parts)


# --- reading ----------------------------------------------------------------------------------------------------------


def _read(frame: Frame, origin: Connection, began: float) -> _Asked | None:
    """The pop in a frame; None for a reply, which nobody has asked for. Raises what `error_reply` is for."""
    kind, header, _ = frame
    cut = cut_pop(header) if kind == _JSON else None
    if cut is not None:
        text, opaque, born = cut
        usual = _usual(text)
        if usual is not None:
            return _Asked(usual, born, opaque, origin, began, is_usual=True)
    command = decode_frame(frame)
    if command.flag & RESPONSE_FLAG:
        return None
    asked = command.header(PopMessageRequest)
    opaque = _NO_REPLY if command.flag & ONEWAY_FLAG else command.opaque
    return _Asked(_request(asked), asked.born_time, opaque, origin, began, is_usual=False)


@lru_cache(maxsize=4096)
def _usual(text: bytes) -> PopRequest | None:
    """The request in a header that `cut_pop` has cut; None when only the whole command tells what to answer."""
    header = read_pop(text)
    try:
        return None if header is None else _request(header)
    except SubscriptionParseFailed:
        return None


def _request(header: PopMessageRequest) -> PopRequest:
    return PopRequest(
        topic=header.topic,
        group=header.consumer_group,
        invisible_millis=header.invisible_time,
        queue_id=header.queue_id,
        max_messages=header.max_msg_nums,
        poll_millis=header.poll_time,
        init_mode=header.init_mode,
        filter=pop_filter(header.exp_type, header.exp),
        is_orderly=header.order,
        attempt_id=header.attempt_id,
    )


# --- replies ----------------------------------------------------------------------------------------------------------

# The code of each, and its frame; no frame when the peer wants none.
_Answer = tuple[int, list[Buffer]]


def _reply(asked: _Asked, popped: Popped) -> _Answer:
    """The reply to a pop that was carried out."""
    if popped.error is not None:
        return _error(asked, popped.error)
    if asked.opaque == _NO_REPLY:
        return _OK, []
    if popped.queues and not popped.request.is_orderly:
        return _OK, encode_found(popped, asked.opaque)
    code = _OK if popped.queues else _FULL if popped.is_refused else _NOTHING
    fields = encode_fields(pop_response(popped))
    return code, encode_reply(
        Command(code, asked.opaque, RESPONSE_FLAG, fields, popped.records(), remark=_REMARKS[code])
    )


def _error(asked: _Asked, error: Exception) -> _Answer:
    """The reply to a pop that has failed after its request was read."""
    reply = error_reply(Command(_POP, asked.opaque), error)
    return reply.code, [] if asked.opaque == _NO_REPLY else encode_reply(reply)


def _refusal(frame: Frame, error: Exception) -> _Answer:
    """The reply to a pop that is not carried out."""
    command = decode_frame(frame)
    if isinstance(error, BrokerError):
        reply = command.reply(error.code, error.remark, ext_fields=_REFUSED)
    else:
        reply = error_reply(command, error)
    return reply.code, [] if command.is_oneway else encode_reply(reply)
