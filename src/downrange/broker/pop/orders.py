"""Ordered pops: a queue is blocked for a group while one of its consumers holds messages of the queue.

The offset of the group moves when messages are acknowledged, not when they are popped: a lease that ends needs no
record, its messages are popped again from where they are. `OrderStates` knows which queues are blocked and how
often each message was delivered; it is kept in config/consumerOrderInfo.json, and what changed since that was saved in
records of the revive topic. Pure but for the file. [ConsumerOrderInfoManager]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import field as member

from msgspec import field

from downrange.broker.json_file import JsonFile, SavedTable
from downrange.protocol.bodies.body import Body
from downrange.protocol.bodies.fields import Int64

_FORGET_AFTER_MILLIS = 24 * 3600 * 1000

OrderKey = tuple[str, str, int]
"""Topic, group, queue id."""


class OrderInfoBody(Body, frozen=True, kw_only=True):
    """The state of one queue as it is saved. [OrderInfo]"""

    pop_time: Int64
    invisible_time: Int64 | None = field(name="i", default=None)
    offsets: tuple[Int64, ...] = field(name="o", default=())
    visible_times: dict[int, Int64] | None = field(name="ot", default=None)
    consumed_counts: dict[int, Int64] | None = field(name="oc", default=None)
    last_consume_time: Int64 = field(name="l", default=0)
    commit_bits: Int64 = field(name="cm", default=0)
    attempt_id: str | None = field(name="a", default=None)
    ahead: tuple[Int64, ...] | None = field(name="ahead", default=None)
    """Not RocketMQ's, which ignores it."""


class OrderInfoTable(Body, frozen=True, kw_only=True):
    """The content of consumerOrderInfo.json: `topic@group` -> queue id -> state."""

    table: dict[str, dict[int, OrderInfoBody]] = field(default_factory=dict)


@dataclass(slots=True)
class OrderState:
    """The messages of one queue that were popped last for one group."""

    pop_time: int
    invisible_time: int
    offsets: tuple[int, ...]
    attempt_id: str | None = None
    acked: int = 0
    visible_times: dict[int, int] = member(default_factory=dict)
    """Offset -> when the message is visible again, where its invisible time was changed."""
    counts: dict[int, int] = member(default_factory=dict)
    """Offset -> how often the message was delivered before."""

    ahead: tuple[int, ...] = ()
    """Offsets behind those of this pop that were acknowledged already, when an earlier pop had them."""

    @property
    def left(self) -> list[int]:
        """The offsets that were not acknowledged."""
        return [offset for number, offset in enumerate(self.offsets) if not self.acked >> number & 1]

    @property
    def blocked_until(self) -> int:
        """When the last message that was not acknowledged is visible again; 0 when all were acknowledged."""
        usual = self.pop_time + self.invisible_time
        return max((self.visible_times.get(offset, usual) for offset in self.left), default=0)

    @property
    def next_offset(self) -> int:
        """The offset of the first message that was not acknowledged, or the one behind the last message."""
        if left := self.left:
            return left[0]
        offset = self.offsets[-1] + 1
        while offset in self.ahead:
            offset += 1
        return offset


class OrderStates(SavedTable):
    """(topic, group, queue id) -> the state of its last ordered pop.

    Holds always: a state that is neither in the file nor about to be has its record at or behind `needed_from`.
    """

    def __init__(self, file: JsonFile) -> None:
        super().__init__(file)
        self._table: dict[OrderKey, OrderState] = {}
        self.on_save: Callable[[], None] = lambda: None
        """Called before the table is saved: records of the revive topic may be given up afterwards."""
        self._unsaved: dict[int, int] = {}
        self._saving: dict[int, int] = {}
        saved = file.load(OrderInfoTable)
        if saved is not None:
            self._fill(saved)

    def _fill(self, saved: OrderInfoTable) -> None:
        for name, queues in saved.table.items():
            topic, _, group = name.partition("@")
            for queue_id, body in queues.items():
                if body.offsets:
                    self._table[topic, group, queue_id] = _state(body)

    def follow(self, table: OrderInfoTable) -> None:
        """Take over the table of a master."""
        self._table.clear()
        self._unsaved.clear()
        self._fill(table)
        self.mark_unsaved()

    def __len__(self) -> int:
        return len(self._table)

    def noted(self, revive_queue: int, revive_offset: int) -> None:
        """A record of the revive topic has a change that is not in the file."""
        self._unsaved.setdefault(revive_queue, revive_offset)

    def needed_from(self, revive_queue: int, end: int) -> int:
        """The offset of the first record of a revive queue that the file does not know of; `end` when there is none."""
        return min(self._unsaved.get(revive_queue, end), self._saving.get(revive_queue, end))

    def prepare_save(self) -> Callable[[], None] | None:
        write = super().prepare_save()
        if write is None:
            return None
        self.on_save()
        for queue_id, offset in self._unsaved.items():
            self._saving.setdefault(queue_id, offset)
        self._unsaved = {}

        def save() -> None:
            write()
            self._saving = {}

        return save

    def get(self, key: OrderKey) -> OrderState | None:
        return self._table.get(key)

    def is_blocked(self, key: OrderKey, attempt_id: str | None, now: int) -> bool:
        """Whether another pop holds the queue. A pop with the attempt id of that pop repeats it, and may."""
        state = self._table.get(key)
        if state is None or (attempt_id is not None and attempt_id == state.attempt_id):
            return False
        return state.blocked_until > now

    def blocked_until(self, key: OrderKey) -> int:
        state = self._table.get(key)
        return 0 if state is None else state.blocked_until

    def acked_from(self, key: OrderKey, offset: int) -> list[int]:
        """Offsets that were acknowledged although messages before them were not: they do not come again."""
        state = self._table.get(key)
        if state is None:
            return []
        left = set(state.left)
        return [each for each in (*state.offsets, *state.ahead) if each >= offset and each not in left]

    def popped(
        self, key: OrderKey, offsets: Sequence[int], pop_time: int, invisible_time: int, attempt_id: str | None
    ) -> list[int]:
        """Messages were popped; say how often each of them was delivered before."""
        known = self._table.get(key)
        counts: dict[int, int] = {}
        if known is not None:
            more = 0 if attempt_id is not None and attempt_id == known.attempt_id else 1
            counts = dict(known.counts)
            for offset in known.left:
                counts[offset] = counts.get(offset, 0) + more
            counts = {offset: times for offset, times in counts.items() if times and offset >= offsets[0]}
        acked = self.acked_from(key, offsets[0])
        last = offsets[-1]
        inside = [offset for offset in acked if offset < last]
        every = tuple(sorted({*offsets, *inside}))
        state = OrderState(pop_time, invisible_time, every, attempt_id, counts=counts)
        state.acked = sum(1 << every.index(offset) for offset in inside)
        state.ahead = tuple(offset for offset in acked if offset > last)
        self._table[key] = state
        self.mark_unsaved()
        return [counts.get(offset, 0) for offset in offsets]

    def acknowledge(self, key: OrderKey, offset: int, pop_time: int) -> int | None:
        """A message was acknowledged: the group's new offset, or None when the pop is not the last of its queue.

        Raises KeyError when the pop did not have this message.
        """
        state = self._table.get(key)
        if state is None or state.pop_time != pop_time:
            return None
        if offset not in state.offsets:
            raise KeyError(offset)
        state.acked |= 1 << state.offsets.index(offset)
        self.mark_unsaved()
        return state.next_offset

    def change(self, key: OrderKey, offset: int, pop_time: int, visible_at: int) -> bool:
        """Set when a message is visible again; False when the pop is not the last of its queue, or did not
        have the message."""
        state = self._table.get(key)
        if state is None or state.pop_time != pop_time or offset not in state.left:
            return False
        state.visible_times[offset] = visible_at
        self.mark_unsaved()
        return True

    def repeat(self, key: OrderKey, body: OrderInfoBody) -> None:
        """Take a state from a record, unless the file has a newer one."""
        known = self._table.get(key)
        if body.offsets and (known is None or known.pop_time <= body.pop_time):
            state = _state(body)
            if known is not None and known.pop_time == body.pop_time:
                state.acked |= known.acked
            self._table[key] = state
            self.mark_unsaved()

    def body(self, key: OrderKey) -> OrderInfoBody:
        """A state as it is saved."""
        return _body(self._table[key])

    def forget(self, topic: str | None = None, group: str | None = None) -> None:
        """A topic or a group was deleted."""
        for key in [key for key in self._table if topic in (None, key[0]) and group in (None, key[1])]:
            del self._table[key]
            self.mark_unsaved()

    def clean(self, now: int) -> None:
        """Forget queues that were not popped for a day."""
        for key, state in list(self._table.items()):
            if state.pop_time + _FORGET_AFTER_MILLIS < now and state.blocked_until <= now:
                del self._table[key]
                self.mark_unsaved()

    def table(self) -> OrderInfoTable:
        table: dict[str, dict[int, OrderInfoBody]] = {}
        for (topic, group, queue_id), state in self._table.items():
            table.setdefault(f"{topic}@{group}", {})[queue_id] = _body(state)
        return OrderInfoTable(table=table)


def _state(body: OrderInfoBody) -> OrderState:
    first, *differences = body.offsets
    return OrderState(
        body.pop_time,
        body.invisible_time or 0,
        (first, *(first + difference for difference in differences)),
        body.attempt_id,
        body.commit_bits,
        dict(body.visible_times or {}),
        dict(body.consumed_counts or {}),
        body.ahead or (),
    )


def _body(state: OrderState) -> OrderInfoBody:
    first, *others = state.offsets
    return OrderInfoBody(
        pop_time=state.pop_time,
        invisible_time=state.invisible_time,
        offsets=(first, *(offset - first for offset in others)),
        visible_times=state.visible_times or None,
        consumed_counts=state.counts or None,
        last_consume_time=state.pop_time,
        commit_bits=state.acked,
        attempt_id=state.attempt_id,
        ahead=state.ahead or None,
    )
