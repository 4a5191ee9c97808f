"""Pops, 200050: all that came at once are leased together. [PopMessageProcessor]"""

from __future__ import annotations

import logging
from functools import lru_cache, partial
from time import perf_counter
from typing import Final

from downrange.broker.pop.pop import Pop
from downrange.broker.pop.pop_reply import encode_found, encode_pops, pop_response
from downrange.broker.pop.popped import Popped, PopRequest, pop_filter
from downrange.broker.pop.waiting import Waiter, wait_seconds
from downrange.compiled import steps
from downrange.model.errors import MQError
from downrange.protocol.bodies.fields import encode_fields
from downrange.protocol.bodies.pop import (
    PopMessageRequest,
    PopMessageResponse,
)
from downrange.protocol.bodies.pop_frames import FOUND_PIECES, cut_pops, read_pop
from downrange.protocol.codes import RequestCode, ResponseCode
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

log = logging.getLogger(__name__)

_POP: Final = int(RequestCode.POP_MESSAGE)
_IS_COMPILED: Final = steps is not None
_OK: Final = int(ResponseCode.SUCCESS)
_NOTHING: Final = int(ResponseCode.POLLING_TIMEOUT)
_FULL: Final = int(ResponseCode.POLLING_FULL)
_REFUSED: Final = encode_fields(PopMessageResponse())
_TOO_LATE_MILLIS: Final = 500
_NO_REPLY: Final = -1 << 31  # an opaque that no client takes
_REMARKS: Final = {_OK: "FOUND", _NOTHING: "NO_MESSAGE_IN_QUEUE", _FULL: "POLLING_FULL"}


_Asked = tuple[Connection, int, int]
"""One request for a pop: the connection that it came over, its opaque (_NO_REPLY if the client wants no reply), and the
time at which the client sent it (0 if the request does not tell)."""


class _Run:
    """Pops whose messages are leased together, and the answers to them."""

    __slots__ = ("asked", "began", "now", "others", "pops")

    def __init__(self, now: int) -> None:
        self.now = now
        self.began = perf_counter()
        self.asked: list[_Asked] = []
        self.pops: list[Popped] = []
        """The result of each pop in `asked`, in this order."""
        self.others: list[tuple[Connection, int, list[Buffer]]] = []
        """Answers to pops that are not carried out."""


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
        first = at
        run = _Run(self._state.clock.now())
        while at < stop:
            reached, text, opaques, borns = cut_pops(frames, at, stop)
            request = _usual(text) if reached > at else None
            asked = list(zip(origins[at:reached], opaques, borns, strict=True))
            if request is not None and self._take_usual(run, request, asked):
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
        if run.pops:
            self._receiving.lease(run.pops)
        self._answer(run, (perf_counter() - run.began) * 1000 / (stop - first))

    def _take_usual(self, run: _Run, request: PopRequest, asked: list[_Asked]) -> bool:
        """Carry out pops that ask for the same; False, and nothing is done, if they must be looked at one by one."""
        oldest = run.now - request.poll_millis - _TOO_LATE_MILLIS
        for origin, _, born in asked:
            if origin.is_full or 0 < born < oldest:
                return False
        if request.is_orderly and len(asked) > 1:
            return False  # each blocks queues for the next one
        try:
            topic = self._receiving.check(request, asked[0][0].peer)
            pops = self._receiving.take(request, topic, run.now, len(asked))
        except MQError:  # each of them gets its own answer
            return False
        except Exception:
            log.exception("pops could not be carried out together, trying one by one pops=%d", len(asked))
            return False
        self._add(run, asked, pops)
        return True

    def _take_one(self, run: _Run, frame: Frame, origin: Connection) -> None:
        """Carry out a pop that is not usual."""
        if origin.is_full:
            origin.defer(frame)
            return
        self.not_accelerated += 1
        try:
            command = decode_frame(frame)
            if command.flag & RESPONSE_FLAG:
                return
            header = command.header(PopMessageRequest)
            request, born = _request(header), header.born_time
            if born and run.now - born - request.poll_millis > _TOO_LATE_MILLIS:
                raise self._too_late()
            topic = self._receiving.check(request, origin.peer)
            opaque = _NO_REPLY if command.flag & ONEWAY_FLAG else command.opaque
            self._add(run, [(origin, opaque, born)], self._receiving.take(request, topic, run.now))
        except RemoteProtocolError as error:
            origin.break_off(error)
        except Exception as error:
            run.others.append((origin, *_refused(decode_frame(frame), error)))

    def _add(self, run: _Run, asked: list[_Asked], pops: list[Popped]) -> None:
        """Take pops into a run; those that found nothing wait, if they may."""
        for one, popped in zip(asked, pops, strict=True):
            if popped.queues or not self._waits(run, one, popped):
                run.asked.append(one)
                run.pops.append(popped)

    def _too_late(self) -> BrokerError:
        address = self._state.config.broker.broker_ip1
        return BrokerError(f"the broker[{address}] pop message is timeout too much", ResponseCode.POLLING_TIMEOUT)

    def _waits(self, run: _Run, asked: _Asked, popped: Popped) -> bool:
        """Whether a pop that found nothing waits; also if it is refused because too many do."""
        request, state = popped.request, self._state
        origin, opaque, born = asked
        seconds = wait_seconds(run.now, born, request.poll_millis)
        if seconds <= 0:
            return False
        waiting = state.waiting
        if waiting.is_full(request.topic, request.group, request.queue_id):
            popped.is_refused = True
            return False
        if origin.is_overloaded:
            error = SystemBusy("[OVERLOAD]system busy, start flow control for a while")
            run.others.append((origin, *_refused(Command(_POP, opaque), error)))
            return True
        origin.begin_answering(1)
        waiter = Waiter(
            request.topic,
            request.group,
            request.queue_id,
            partial(self._take_again, request),
            partial(self._receiving.nothing, request),
            partial(self._answer_waiting, asked, run.began),
            (request.filter, request.attempt_id if request.is_orderly else None),
            origin,
        )
        waiting.add(waiter, seconds)
        if popped.rest and not request.is_orderly:  # a filter that has not seen all messages yet
            waiting.wake(request.topic, request.group)
        return True

    def _take_again(self, request: PopRequest) -> Popped | None:
        self._state.refuse_on_slave()  # the broker may have been a master when the pop began to wait
        topic = self._state.tables.topics.get(request.topic)
        if topic is None:
            return None
        (popped,) = self._receiving.take(request, topic, self._state.clock.now())
        if popped.queues:
            return popped
        if popped.rest and not request.is_orderly:
            self._state.waiting.wake(request.topic, request.group)
        return None

    # --- answering ----------------------------------------------------------------------------------------------

    def _answer(self, run: _Run, millis: float) -> None:
        frames = None
        if run.pops and not run.others and not self._writer.makes_wait:
            opaques = [
                opaque
                for (_, opaque, _), popped in zip(run.asked, run.pops, strict=True)
                if popped.queues and popped.error is None and opaque != _NO_REPLY and not popped.request.is_orderly
            ]
            frames = encode_pops(FOUND_PIECES, run.pops, opaques) if len(opaques) == len(run.pops) else None
        if frames is None:
            self._answer_each(run, millis)
        else:
            self._statistics.rpc(_POP, _OK, millis, len(run.pops))
            send_replies([origin for origin, _, _ in run.asked], frames)

    def _answer_each(self, run: _Run, millis: float) -> None:
        """Answer pops of any kind."""
        others = run.others
        for asked, popped in zip(run.asked, run.pops, strict=True):
            if popped.end_offset and self._writer.makes_wait:
                asked[0].begin_answering(1)
                self._writer.tell_when_safe(popped.end_offset, partial(self._answer_safe, asked, run.began, popped))
            else:
                others.append((asked[0], *_reply(asked, popped)))
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

    def _answer_waiting(self, asked: _Asked, began: float, result: Popped | Exception | None) -> None:
        """Answer a pop that has waited; not if its connection is gone."""
        if result is None:
            asked[0].end_answering(1)
        elif isinstance(result, Exception):
            self._answer_later(asked, began, *_error(asked, result))
        elif result.end_offset and self._writer.makes_wait:
            self._writer.tell_when_safe(result.end_offset, partial(self._answer_safe, asked, began, result))
        else:
            self._answer_later(asked, began, *_reply(asked, result))

    def _answer_safe(self, asked: _Asked, began: float, popped: Popped, status: PutMessageStatus) -> None:
        if status.is_safe_here:  # a consumer must go on without slaves: a lease that they lack ends with the master
            answer = _reply(asked, popped)
        else:
            answer = _error(asked, ServiceNotAvailable(f"not safe yet: {status.value}"))
        self._answer_later(asked, began, *answer)

    def _answer_later(self, asked: _Asked, began: float, code: int, parts: list[Buffer]) -> None:
        self._statistics.rpc(_POP, code, (perf_counter() - began) * 1000)
        asked[0].end_answering(1, *parts)


# --- reading ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _usual(text: bytes) -> PopRequest | None:
    """The request in headers that `cut_pops` has cut; None when only the whole command tells what to answer."""
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
    _, opaque, _ = asked
    if popped.error is not None:
        return _error(asked, popped.error)
    if opaque == _NO_REPLY:
        return _OK, []
    if popped.queues and not popped.request.is_orderly:
        return _OK, encode_found(popped, opaque)
    code = _OK if popped.queues else _FULL if popped.is_refused else _NOTHING
    fields = encode_fields(pop_response(popped))
    return code, encode_reply(Command(code, opaque, RESPONSE_FLAG, fields, popped.records(), remark=_REMARKS[code]))


def _error(asked: _Asked, error: Exception) -> _Answer:
    """The reply to a pop that has failed after its request was read."""
    _, opaque, _ = asked
    reply = error_reply(Command(_POP, opaque), error)
    return reply.code, [] if opaque == _NO_REPLY else encode_reply(reply)


def _refused(command: Command, error: Exception) -> _Answer:
    """The reply to a pop that is not carried out."""
    if isinstance(error, BrokerError):
        reply = command.reply(error.code, error.remark, ext_fields=_REFUSED)
    else:
        reply = error_reply(command, error)
    return reply.code, [] if command.is_oneway or command.opaque == _NO_REPLY else encode_reply(reply)
