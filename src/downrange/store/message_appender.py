"""The way into the store: from a batch of messages to records in the log, and on to queues and index."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from downrange.model.message import PhysicalOffset
from downrange.model.topics import MAX_TOPIC_LENGTH
from downrange.store.dispatcher import LogFollower
from downrange.store.errors import DiskFull, StoreError
from downrange.store.log.commit_log import CommitLog
from downrange.store.message_limits import MessageLimits
from downrange.store.new_message import NewMessage, PutMessageStatus, Refusal
from downrange.store.new_messages import NewMessages
from downrange.store.queue.queues import QueueState, check_storable
from downrange.store.refusals import Refusals

log = logging.getLogger(__name__)

# A clock that was set back by less than this is waited for; a larger step is believed.
_CLOCK_STEP_MILLIS: Final = 60_000


class MessageAppender:
    """Gives messages their places in queues and log, and applies them at once where that is possible.

    Holds always: store times do not run backwards; a message that was refused, or did not fit, has taken no place.
    For the store's own thread.
    """

    def __init__(
        self,
        commit_log: CommitLog,
        follower: LogFollower,
        limits: MessageLimits,
        refusals: Refusals,
        now: Callable[[], int],
    ) -> None:
        self._commit_log = commit_log
        self._follower = follower
        self._apply = follower.dispatcher.apply
        self._queues = follower.dispatcher.queues
        self._states = self._queues.states
        self._rows = self._queues.tails.rows
        self._limits = limits
        self._refusals = refusals
        self._now = now

    def add(self, messages: NewMessages, group: Sequence[NewMessage]) -> Refusal | None:
        """Add messages to a batch, to be stored together or not at all; or say why they cannot be stored."""
        if self._refusals.any:
            return self._refusal()
        if len(group) > 1 or len(group[0].body) + len(group[0].properties) > self._limits.surely_fits:
            refusal = self._limits.check(group)
            if refusal is not None:
                return refusal
        try:
            states = [self._states[message.topic, message.queue_id] for message in group]
        except KeyError:
            made = list(map(self._make_state, group))
            states = [state for state in made if not isinstance(state, Refusal)]
            if len(states) < len(made):
                return next(state for state in made if isinstance(state, Refusal))
        begins_group = True
        for message, state in zip(group, states, strict=True):
            messages.add(state, message, begins_group)
            begins_group = False
        return None

    def add_each(self, messages: NewMessages, singles: Sequence[NewMessage]) -> Refusal | None:
        """Add messages of which each may be stored without the others; or say why one cannot be stored."""
        states, fits = self._states, self._limits.surely_fits
        if not self._refusals.any:
            for message in singles:
                state = dict.get(states, (message.topic, message.queue_id))
                if state is None or len(message.body) + len(message.properties) > fits:
                    refusal = self.add(messages, (message,))
                    if refusal is not None:
                        return refusal
                else:
                    messages.add(state, message, True)
            return None
        return self._refusal()

    def append(self, messages: NewMessages) -> Refusal | None:
        """Store a batch in its order. On failure say why; then only the first `messages.stored` messages are stored."""
        if self._refusals.any:
            return self._refusal()
        commit_log, follower = self._commit_log, self._follower
        now = self._now()
        if now < commit_log.last_store_timestamp:
            now = self._not_before(now)
        number, count, apply = 0, len(messages), self._apply
        while number < count:
            try:
                stop = commit_log.append(messages, number, self._rows, now)
            except StoreError as error:
                return self._failed(error)
            if follower.at_once:
                begin, end = messages.bounds(number, stop)
                if follower.offset == begin:
                    try:
                        apply(messages, number, stop)
                        follower.offset = end
                    except (OSError, StoreError) as error:
                        follower.failed(error)
                else:
                    follower.dispatch_pending()  # with what was left before them
            number = stop
        return None

    def append_data(self, start: int, data: bytes | memoryview) -> None:
        """Take log bytes from a master; `dispatch_pending` then makes whole records readable by queue."""
        self._refusals.check_takes_data()
        empty = not len(self._commit_log.segments)
        self._commit_log.append_data(offset := PhysicalOffset(start), data)
        if empty:
            self._follower.offset = offset

    def _make_state(self, message: NewMessage) -> QueueState | Refusal:
        reason = check_storable(message.topic, message.queue_id)
        if reason is None and len(message.topic.encode()) > MAX_TOPIC_LENGTH:
            reason = f"message topic length too long {len(message.topic)}"
        if reason is not None:
            return Refusal(PutMessageStatus.MESSAGE_ILLEGAL, reason)
        try:
            return self._queues.get_or_make(message.topic, message.queue_id)
        except StoreError as error:
            return Refusal(PutMessageStatus.UNKNOWN_ERROR, str(error))

    def _not_before(self, now: int) -> int:
        """Store times do not run backwards: recovery and the search by time rely on it."""
        last = self._commit_log.last_store_timestamp
        return last if last - _CLOCK_STEP_MILLIS < now < last else now

    def _refusal(self) -> Refusal:
        return Refusal(PutMessageStatus.SERVICE_NOT_AVAILABLE, str(self._refusals))

    @staticmethod
    def _failed(error: StoreError) -> Refusal:
        log.error("append failed: %s", error)
        is_full = isinstance(error, DiskFull)
        status = PutMessageStatus.SERVICE_NOT_AVAILABLE if is_full else PutMessageStatus.CREATE_MAPEDFILE_FAILED
        return Refusal(status, str(error))
