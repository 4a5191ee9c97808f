"""Plain pulls: what `PullHandlers.pull` does, for pulls that find messages.

That is how a backlog is drained and how a consumer that keeps up is woken the second time. What finds nothing, has to
wait, or is refused is left to the handler; both ways answer with the same bytes.
"""

from __future__ import annotations

from time import perf_counter
from typing import Final

from downrange.broker.filtering import EVERYTHING
from downrange.broker.flow_control import FlowControl
from downrange.broker.handlers.pull import PullHandlers
from downrange.broker.statistics import Statistics
from downrange.compiled import runs
from downrange.protocol.bodies.plain_pull import PullReplyHead, is_pull, parse_pull
from downrange.protocol.command import Buffer
from downrange.protocol.errors import BrokerError
from downrange.protocol.framing import Frame
from downrange.store.backlog import Backlog, records_of
from downrange.store.consume_queue import ENTRY_SIZE
from downrange.store.message_store import MessageStore
from downrange.transport.connection import Connection

_MOST_BYTES: Final = 1 << 20  # of messages in one reply; more may not fit a frame


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
        if not is_pull(frames[at]) or connection.last_active - flow.last_tick > flow.pull_patience:
            return at
        start = perf_counter()
        first = at
        for frame in frames[at:] if at else frames:
            reply = self._reply(frame, connection)
            if reply is None:
                break
            at += 1
            if not connection.reply_parts(reply):  # the peer has enough to read for now
                break
        if at > first:
            self._statistics.pulled_together(at - first, (perf_counter() - start) * 1000)
        return at

    def _reply(self, frame: Frame, connection: Connection) -> list[Buffer] | None:
        pull = parse_pull(frame)
        if pull is None:
            return None
        opaque, flag, request, offset, commit_offset = pull
        state = self._states.get((request.topic, request.queue_id))
        if flag or request.bulk or state is None or offset >= state.queue.max_offset:
            return None
        handlers = self._handlers
        try:
            group, wanted = handlers.agreed(request, connection)
        except BrokerError:
            return None
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
        suggested = handlers.suggested_broker(group, is_slow=is_cold)
        numbers = suggested, offset + scanned, queue.min_offset, queue.max_offset
        framed = self._framed(frame[0], opaque, numbers, backlog)
        if framed is None:
            return None
        parts, byte_count = framed
        count = len(backlog[0]) // ENTRY_SIZE
        self._statistics.got(request.topic, request.consumer_group, count, byte_count)
        handlers.commit(request, commit_offset)
        return parts

    def _framed(
        self, kind: int, opaque: int, numbers: tuple[int, int, int, int], backlog: Backlog
    ) -> tuple[list[Buffer], int] | None:
        """The whole reply, and how many bytes its records have."""
        if runs is not None:
            whole = runs.encode_pull(self._head.pieces[kind], kind, opaque, numbers, backlog)
            if whole is not None:
                return [whole[0]], whole[1]
        found = records_of(backlog)
        if found is None or found[2] > _MOST_BYTES:
            return None
        pieces, _, byte_count = found
        head = self._head.encode(kind, opaque, numbers, byte_count)
        return ([head, pieces[0]] if len(pieces) == 1 else [b"".join((head, *pieces))]), byte_count
