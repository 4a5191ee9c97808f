"""Plain pulls: what `PullHandlers.pull` does, for pulls that find messages or wait at the end of a queue.

That is how a backlog is drained and how a consumer keeps up. What is refused, or has an offset outside of the queue, is
left to the handler; both ways answer with the same bytes.
"""

from __future__ import annotations

from time import perf_counter
from typing import Final

from downrange.broker.admission import FlowControl
from downrange.broker.filtering import EVERYTHING, MessageFilter
from downrange.broker.handlers.pull import SUSPEND, PullHandlers
from downrange.broker.held_pulls import HeldPull
from downrange.broker.statistics import Statistics
from downrange.compiled import steps
from downrange.model.message import TopicQueue
from downrange.model.topics import SubscriptionGroupConfig
from downrange.protocol.bodies.plain_pull import PULL_HEADER, PullReplyHead, parse_pull
from downrange.protocol.bodies.pull import PullMessageRequest
from downrange.protocol.command import Buffer
from downrange.protocol.errors import BrokerError
from downrange.protocol.framing import Frame, decode_frame
from downrange.store.message_store import MessageStore
from downrange.store.queue.backlog import Backlog, records_of
from downrange.store.queue.consume_queue import ENTRY_SIZE
from downrange.store.queue.queues import QueueState
from downrange.transport.connection import Connection
from downrange.transport.serving import encode_reply, error_reply

_MOST_BYTES: Final = 1 << 20  # of messages in one reply; more may not fit a frame


_HELD: Final[list[Buffer]] = []


class PlainPull(HeldPull):
    """A plain pull that found nothing new and waits. Its connection counts it among those that are answered later."""

    __slots__ = ("_pulls", "frame", "group", "opaque", "request")

    def __init__(
        self,
        pulls: PlainPulls,
        frame: Frame,
        opaque: int,
        request: PullMessageRequest,
        offset: int,
        group: SubscriptionGroupConfig,
        wanted: MessageFilter,
        connection: Connection,
    ) -> None:
        super().__init__(TopicQueue(request.topic, request.queue_id), offset, wanted, connection)
        self._pulls = pulls
        self.frame = frame
        self.opaque = opaque
        self.request = request
        self.group = group

    def answer(self) -> None:
        self.connection.end_answering(1, *self._pulls.again(self))

    def give_up(self) -> None:
        self.connection.end_answering(1)


class PlainPulls:
    """Hands messages to consumers, the fast way. `take` is an `Express` of the broker's main server."""

    def __init__(self, handlers: PullHandlers, store: MessageStore, statistics: Statistics, flow: FlowControl) -> None:
        self._handlers = handlers
        self._store = store
        self._states = store.queues.states
        self._statistics = statistics
        self._flow = flow
        self._head = PullReplyHead()

    def take(self, frames: list[Frame], at: int, connection: Connection) -> int:
        """Answer what is plain, from `frames[at]` on; return the place of the first frame that is not."""
        flow = self._flow
        if not frames[at][1].startswith(PULL_HEADER.starts) or flow.calm_until < flow._loop.time():
            return at
        start = perf_counter()
        answered = 0
        for frame in frames[at:] if at else frames:
            reply = self._reply(frame, connection)
            if reply is None:
                break
            at += 1
            if reply is _HELD:
                continue
            answered += 1
            if not connection.reply_parts(reply):  # the peer has enough to read for now
                break
        if answered:
            self._statistics.pulled_together(answered, (perf_counter() - start) * 1000)
        return at

    def _reply(self, frame: Frame, connection: Connection) -> list[Buffer] | None:
        """The whole reply; None when it takes the handler, nothing when it comes later."""
        pull = parse_pull(frame)
        if pull is None:
            return None
        opaque, flag, request, offset, commit_offset = pull
        state = self._states.get((request.topic, request.queue_id))
        end = 0 if state is None else state.queue.max_offset
        if flag or request.bulk or offset > end or (offset == end and not request.sys_flag & SUSPEND):
            return None
        handlers = self._handlers
        try:
            group, wanted = handlers.agreed(request, connection)
        except BrokerError:
            return None
        if offset < end:
            reply = None if state is None else self._found(state, frame[0], opaque, request, offset, group, wanted)
            if reply is None:
                return None
        else:
            if connection.is_overloaded:
                return None
            connection.begin_answering(1)
            held = PlainPull(self, frame, opaque, request, offset, group, wanted, connection)
            handlers.held.keep(held, handlers.wait_seconds(request))
            self._statistics.get_missed()
            reply = _HELD
        handlers.commit(request, commit_offset)
        return reply

    def again(self, held: PlainPull) -> list[Buffer]:
        """The whole reply to a pull that has waited."""
        state = self._states.get(held.queue)
        frame, group, wanted = held.frame, held.group, held.filter
        try:
            if state is not None:
                found = self._found(state, frame[0], held.opaque, held.request, held.offset, group, wanted)
                if found is not None:
                    return found
            reply = self._handlers.again(decode_frame(frame), group, wanted)
        except Exception as error:
            reply = error_reply(decode_frame(frame), error)
        return encode_reply(reply)

    def _found(
        self,
        state: QueueState,
        kind: int,
        opaque: int,
        request: PullMessageRequest,
        offset: int,
        group: SubscriptionGroupConfig,
        wanted: MessageFilter,
    ) -> list[Buffer] | None:
        """The whole reply with the messages that were found; None when there are none, or it is not simple."""
        store = self._store
        picker = None
        if wanted is not EVERYTHING:
            picker = store.picker_of(state, wanted.matches_entry, wanted.matches_record)
            if picker is None:
                return None
        found = store.backlog(state, offset, request.max_msg_nums, picker)
        if found is None or not found[0][0]:
            return None
        backlog, scanned, is_cold = found
        queue = state.queue
        suggested = self._handlers.suggested_broker(group, is_slow=is_cold)
        numbers = suggested, offset + scanned, queue.min_offset, queue.max_offset
        framed = self._framed(kind, opaque, numbers, backlog)
        if framed is None:
            return None
        parts, byte_count = framed
        count = len(backlog[0]) // ENTRY_SIZE
        self._statistics.got(request.topic, request.consumer_group, count, byte_count)
        return parts

    def _framed(
        self, kind: int, opaque: int, numbers: tuple[int, int, int, int], backlog: Backlog
    ) -> tuple[list[Buffer], int] | None:
        """The whole reply, and how many bytes its records have."""
        if steps is not None:
            whole = steps.encode_pull(self._head.pieces[kind], kind, opaque, numbers, backlog)
            if whole is not None:
                return [whole[0]], whole[1]
        found = records_of(backlog)
        if found is None or found[2] > _MOST_BYTES:
            return None
        pieces, _, byte_count = found
        head = self._head.encode(kind, opaque, numbers, byte_count)
        return ([head, pieces[0]] if len(pieces) == 1 else [b"".join((head, *pieces))]), byte_count
