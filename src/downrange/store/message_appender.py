"""The writing half of a store: from messages to records in the log, and on to queues and index."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from downrange.model.topics import MAX_TOPIC_LENGTH
from downrange.store.dispatching import Dispatching
from downrange.store.errors import DiskFull, StoreError
from downrange.store.log.commit_log import CommitLog
from downrange.store.message_limits import MessageLimits
from downrange.store.new_message import AppendResult, BatchUnit, NewMessage, PutMessageStatus, join_properties
from downrange.store.queue.queues import QueueState, check_storable
from downrange.store.refusals import Refusals
from downrange.store.run import Place, PlainMessage, Run, run_of

log = logging.getLogger(__name__)

_PUT_OK: Final = PutMessageStatus.PUT_OK
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
        dispatching: Dispatching,
        limits: MessageLimits,
        refusals: Refusals,
        now: Callable[[], int],
    ) -> None:
        self._commit_log = commit_log
        self._segments = commit_log.segments
        self._dispatching = dispatching
        self._dispatcher = dispatching.dispatcher
        self._queues = dispatching.dispatcher.queues
        self._states = self._queues.states
        self._limits = limits
        self._refusals = refusals
        self._now = now

    def append(self, message: NewMessage, now: int | None = None) -> AppendResult:
        """Store one message. Who stores many at once may read the clock for all of them and pass `now`."""
        if self._refusals.any:
            return self._refusal()
        if len(message.body) + len(message.properties) > self._limits.surely_fits:
            refused = self._limits.check(message)
            if refused is not None:
                return refused
        state = self._states.get((message.topic, message.queue_id))
        if state is None:
            made = self._make_state(message)
            if isinstance(made, AppendResult):
                return made
            state = made
        sys_flag = message.sys_flag
        takes_place = not sys_flag & 4  # neither prepared nor rolled back: the message gets a queue offset
        queue_offset = state.next_offset if takes_place else 0
        commit_log = self._commit_log
        if now is None:
            now = self._now()
        if now < commit_log.last_store_timestamp:
            now = self._not_before(now)
        try:
            physical_offset, size = commit_log.append(message, state.topic_field, queue_offset, now)
        except StoreError as error:
            return self._failed(error)
        if takes_place:
            state.next_offset = queue_offset + 1
        dispatching = self._dispatching
        if dispatching.at_once:
            if dispatching.offset == physical_offset:
                try:
                    text = message.properties.decode("utf-8", "replace")
                    self._dispatcher.apply(state, queue_offset, physical_offset, size, sys_flag, now, text)
                    dispatching.offset = physical_offset + size
                except (OSError, StoreError) as error:
                    dispatching.failed(error)
            else:
                dispatching.dispatch_pending()
        return AppendResult(_PUT_OK, physical_offset, size, queue_offset, now)

    def append_run(self, run: Run, born_host: bytes | list[bytes], store_host: bytes, now: int) -> bool:
        """Store many messages at once; False when nothing was stored, and `append` knows why.

        For messages that need no further look: they fit (`MessageLimits.surely_fits`), are not transactional, and their
        queues exist and are not special.
        """
        commit_log, dispatching = self._commit_log, self._dispatching
        if self._refusals.any or not dispatching.at_once or dispatching.offset != self._segments.wrote_offset:
            return False
        if now < commit_log.last_store_timestamp:
            now = self._not_before(now)
        if not commit_log.append_run(run, self._queues.tails, born_host, store_host, now):
            return False
        try:
            self._dispatcher.apply_run(run, now)
            dispatching.offset = run.end
        except (OSError, StoreError) as error:
            dispatching.failed(error)
        return True

    def takes_together(self, message: NewMessage) -> bool:
        """Does the message need no further look: it fits, gets a place in a queue, and that queue exists?"""
        return (
            len(message.body) + len(message.properties) <= self._limits.surely_fits
            and (message.topic, message.queue_id) in self._states
            and not message.sys_flag & 4
        )

    def append_together(self, messages: Sequence[NewMessage], now: int) -> list[Place] | None:
        """`append_run` for messages of all kinds that `takes_together` says yes to.

        As those of a run they are counted by their queues; see `ConsumeQueues.take_counts`.
        """
        commit_log, dispatching = self._commit_log, self._dispatching
        if self._refusals.any or not dispatching.at_once or dispatching.offset != self._segments.wrote_offset:
            return None
        if now < commit_log.last_store_timestamp:
            now = self._not_before(now)
        states = self._states
        run = [(states[message.topic, message.queue_id], message) for message in messages]
        try:
            places = commit_log.append_together(run, now)
        except StoreError:
            return None
        try:
            self._apply_together(run, places, now)
        except (OSError, StoreError) as error:
            dispatching.failed(error)
        return places

    def _apply_together(self, run: Sequence[tuple[QueueState, NewMessage]], places: list[Place], now: int) -> None:
        if any(state.is_special for state, _ in run):
            for (state, message), (physical_offset, size, queue_offset) in zip(run, places, strict=True):
                text = message.properties.decode("utf-8", "replace")
                self._dispatcher.apply(state, queue_offset, physical_offset, size, message.sys_flag, now, text)
                state.count(1, size)
        else:
            plain: list[PlainMessage] = [
                (
                    state, message.body, message.properties, message.properties.decode("utf-8", "replace"),
                    message.born_timestamp, message.flag, message.sys_flag, message.reconsume_times,
                )
                for state, message in run
            ]  # fmt: skip
            applied = run_of(plain)
            applied.places = places
            self._dispatcher.apply_run(applied, now)
        offset, size, _ = places[-1]
        self._dispatching.offset = offset + size

    def append_batch(self, message: NewMessage, units: Sequence[BatchUnit]) -> AppendResult:
        """Store several messages of one queue, all or none; `message` carries what they share, its body is not used."""
        if self._refusals.any:
            return self._refusal()
        refused = self._limits.check_batch(message, units)
        if refused is not None:
            return refused
        state = self._states.get((message.topic, message.queue_id))
        if state is None:
            made = self._make_state(message)
            if isinstance(made, AppendResult):
                return made
            state = made
        now = self._not_before(self._now())
        places = self._append_as_run(state, message, units, now)
        if places is None:
            run = [(state, unit.message_of(message)) for unit in units]
            try:
                places = self._commit_log.append_together(run, now)
            except StoreError as error:
                return self._failed(error)
            self._apply_batch(run, places, now)
        offsets = tuple(place[0] for place in places)
        return AppendResult(_PUT_OK, offsets[0], sum(place[1] for place in places), places[0][2], now, offsets)

    def _append_as_run(
        self, state: QueueState, message: NewMessage, units: Sequence[BatchUnit], now: int
    ) -> list[Place] | None:
        """A batch by the fast way of plain messages, which is whole or not at all, too; None when it is not plain."""
        if state.is_special or message.prepared_transaction_offset:
            return None
        messages: list[PlainMessage] = []
        for unit in units:
            properties = join_properties(unit.properties, message.properties)
            text = properties.decode("utf-8", "replace")
            messages.append(
                (
                    state, unit.body, properties, text, message.born_timestamp, unit.flag, message.sys_flag,
                    message.reconsume_times,
                )
            )  # fmt: skip
        run = run_of(messages)
        if not self.append_run(run, message.born_host, message.store_host, now):
            return None
        places = run.places
        state.uncount(len(places), sum(place[1] for place in places))
        return places

    def _apply_batch(self, run: Sequence[tuple[QueueState, NewMessage]], places: list[Place], now: int) -> None:
        """As `_apply_together`, for what others may lie before in the log, and what is counted by who sent it."""
        dispatching = self._dispatching
        if not dispatching.at_once:
            return
        if dispatching.offset != places[0][0]:
            dispatching.dispatch_pending()
            return
        try:
            for (state, message), (physical_offset, size, queue_offset) in zip(run, places, strict=True):
                text = message.properties.decode("utf-8", "replace")
                self._dispatcher.apply(state, queue_offset, physical_offset, size, message.sys_flag, now, text)
            dispatching.offset = physical_offset + size
        except (OSError, StoreError) as error:
            dispatching.failed(error)

    def append_data(self, start: int, data: bytes | memoryview) -> None:
        """Take log bytes from a master; `dispatch_pending` then makes whole records readable by queue."""
        self._refusals.check_takes_data()
        empty = not len(self._segments)
        self._commit_log.append_data(start, data)
        if empty:
            self._dispatching.offset = start

    def _make_state(self, message: NewMessage) -> QueueState | AppendResult:
        reason = check_storable(message.topic, message.queue_id)
        if reason is None and len(message.topic.encode()) > MAX_TOPIC_LENGTH:
            reason = f"message topic length too long {len(message.topic)}"
        if reason is not None:
            return AppendResult(PutMessageStatus.MESSAGE_ILLEGAL, reason=reason)
        try:
            return self._queues.get_or_make(message.topic, message.queue_id)
        except StoreError as error:
            return AppendResult(PutMessageStatus.UNKNOWN_ERROR, reason=str(error))

    def _not_before(self, now: int) -> int:
        """Store times do not run backwards: recovery and the search by time rely on it."""
        last = self._commit_log.last_store_timestamp
        return last if last - _CLOCK_STEP_MILLIS < now < last else now

    def _refusal(self) -> AppendResult:
        return AppendResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, reason=str(self._refusals))

    @staticmethod
    def _failed(error: StoreError) -> AppendResult:
        log.error("append failed: %s", error)
        status = (
            PutMessageStatus.SERVICE_NOT_AVAILABLE
            if isinstance(error, DiskFull)
            else PutMessageStatus.CREATE_MAPEDFILE_FAILED
        )
        return AppendResult(status, reason=str(error))
