"""Messages of a topic by the time they were stored: all its queues, merged, page by page, both ways.

Brokers skip what tags or an SQL92 expression exclude. A broker that cannot evaluate SQL92 sends all messages, and the
expression is evaluated here; `SearchPage.filtered_here` says so.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.pull import PullConsumer, PullResult, PullStatus
from downrange.client.consumer.rebalance import readable_queues
from downrange.client.errors import ClientError, NoRoute
from downrange.client.session import Session
from downrange.clock import Clock
from downrange.model.errors import MessageError, MQError
from downrange.model.message import MessageQueue
from downrange.model.properties import find_property
from downrange.model.sql.expression import SqlExpression, compile_sql
from downrange.model.subscription import SQL92, SUB_ALL, Subscription, parse_tags, subscribe
from downrange.model.text import Text
from downrange.model.topics import TOOLS_GROUP
from downrange.protocol.errors import InternalError
from downrange.transport.errors import RequestTimedOut

T = TypeVar("T")

END_OF_TIME: Final = 0x7FFF_FFFF_FFFF_FFFF
AT_ONCE: Final = 8
"""Queues that are read in parallel."""
_FIRST_WINDOW: Final = 32
_WIDEST_WINDOW: Final = 1024


class WrongCursor(ClientError):
    """The text of a cursor is damaged or belongs to another topic."""


@dataclass(frozen=True, slots=True)
class Budget:
    """When a page ends: after so many messages that match, messages looked at, or seconds, whichever comes first."""

    messages: int = 100
    looked_at: int = 50_000
    seconds: float = 2.0


@dataclass(frozen=True, slots=True)
class SearchCursor:
    """A place between the messages of a topic: in each queue the offset of the first message behind the place."""

    offsets: Mapping[MessageQueue, int]

    def encode(self) -> str:
        """The cursor as text for an address or a command line."""
        rows = [[*queue, offset] for queue, offset in sorted(self.offsets.items())]
        return base64.urlsafe_b64encode(json.dumps(rows, separators=(",", ":")).encode()).decode().rstrip("=")

    @classmethod
    def decode(cls, text: str) -> SearchCursor:
        try:
            rows = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
            found = {MessageQueue(str(topic), str(name), int(number)): int(at) for topic, name, number, at in rows}
        except (ValueError, TypeError):
            raise WrongCursor(Text("the cursor is damaged; begin the search anew without a cursor")) from None
        return cls(found)


@dataclass(frozen=True, slots=True)
class SearchPage:
    """Messages that match, oldest first, and the places before and after them, from which to go on either way.

    `is_last`: there is nothing more in the direction of reading. Messages of the queues in `failed` are missing.
    """

    messages: Sequence[ReceivedMessage]
    before: SearchCursor
    after: SearchCursor
    is_last: bool
    looked_at: int
    filtered_here: bool = False
    failed: Mapping[MessageQueue, MQError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which messages of a topic a search wants: stored between two times, both included, with a tag, and so on."""

    topic: str
    begin: int = 0
    end: int = END_OF_TIME
    tags: str | None = None
    sql: str | None = None
    text: str | None = None

    def subscription(self) -> Subscription:
        """The part that brokers can decide; raises SqlError for a wrong expression."""
        if self.tags is not None and self.sql is not None:
            raise MessageError(Text("a search by tags and by SQL92 at once: SQL92 knows the tag as TAGS"))
        if self.sql is not None:
            return subscribe(self.topic, self.sql, SQL92)
        return subscribe(self.topic, self.tags or SUB_ALL)

    def condition(self) -> Callable[[ReceivedMessage], bool]:
        """The test of one message; raises SqlError for a wrong expression."""
        tags = parse_tags(self.tags)
        expression = None if self.sql is None else compile_sql(self.sql)
        needle = None if not self.text else self.text.encode()

        def matches(message: ReceivedMessage) -> bool:
            return (
                self.begin <= message.store_timestamp <= self.end
                and (not tags or message.tags in tags)
                and (expression is None or _matches_sql(expression, message))
                and (needle is None or needle in _body(message))
            )

        return matches


def _matches_sql(expression: SqlExpression, message: ReceivedMessage) -> bool:
    return expression.matches(partial(find_property, message.properties_text))


def _body(message: ReceivedMessage) -> bytes:
    try:
        return message.body
    except MessageError:  # a body that cannot be decompressed is searched as it lies there
        return message.stored_body


class QueueScan:
    """The messages of one queue that were read and not yet taken. `low` and `high` bound what may be read.

    Holds always: `scanned` lies between them; what lies between the start and `scanned` was read; `found` is in the
    order of reading.
    """

    def __init__(self, queue: MessageQueue, low: int, high: int, start: int, *, backwards: bool) -> None:
        self.queue = queue
        self.low, self.high = low, max(low, high)
        self.start = self.scanned = min(max(start, self.low), self.high)
        self.backwards = backwards
        self.found: deque[ReceivedMessage] = deque()
        self.error: MQError | None = None
        self._window = _FIRST_WINDOW

    @property
    def is_finished(self) -> bool:
        return self.error is not None or self.scanned == (self.low if self.backwards else self.high)

    @property
    def boundary(self) -> int:
        """The place of this queue in the cursor to go on from."""
        if not self.found:
            return self.scanned
        return self.found[0].queue_offset + (1 if self.backwards else 0)

    def window(self) -> tuple[int, int]:
        """The offsets to read next: as far as one pull goes, or backwards a window that widens while it is empty."""
        if self.backwards:
            return max(self.low, self.scanned - self._window), self.scanned
        return self.scanned, self.high

    def take(self, messages: Sequence[ReceivedMessage], begin: int, end: int) -> None:
        """Note that `begin` to `end` was read, and which messages in it match."""
        if self.backwards:
            self.found.extend(reversed(messages))
            self.scanned = begin
            self._window = _FIRST_WINDOW if messages else min(2 * self._window, _WIDEST_WINDOW)
        else:
            self.found.extend(messages)
            self.scanned = min(end, self.high)


def next_of(scans: Sequence[QueueScan]) -> QueueScan | None:
    """The scan that has the next message of the merged queues; None: there is none, or a scan must read on first."""
    heads = [scan for scan in scans if scan.found]
    if not heads or any(not scan.found and not scan.is_finished for scan in scans):
        return None

    def place(scan: QueueScan) -> tuple[int, MessageQueue]:
        return scan.found[0].store_timestamp, scan.queue

    return max(heads, key=place) if heads[0].backwards else min(heads, key=place)


class _Reader:
    """Reads queues for one page."""

    def __init__(self, session: Session, wanted: Wanted, budget: Budget) -> None:
        self._consumer = PullConsumer(TOOLS_GROUP, session=session)
        self._clock: Clock = session.clock
        self._wanted = wanted
        self._subscription = wanted.subscription()
        self._matches = wanted.condition()
        self._budget = budget
        self._deadline = session.clock.monotonic() + budget.seconds
        self._gate = asyncio.Semaphore(AT_ONCE)
        self.looked_at = 0
        self.filtered_here = False

    @property
    def is_spent(self) -> bool:
        return self.looked_at >= self._budget.looked_at or self._clock.monotonic() >= self._deadline

    async def open(self, queue: MessageQueue, cursor: SearchCursor | None, *, backwards: bool) -> QueueScan:
        """The scan of one queue, with the offsets that hold every message of the wanted times."""
        try:
            low, high = await self._within(queue, self._edges(queue))
        except MQError as error:
            beginning = END_OF_TIME if backwards else 0
            start = beginning if cursor is None else cursor.offsets.get(queue, 0)
            failed = QueueScan(queue, start, start, start, backwards=backwards)
            failed.error = error
            return failed
        start = high if backwards else low
        if cursor is not None:
            start = cursor.offsets.get(queue, low)  # a queue that is newer than the cursor lies behind it as a whole
        return QueueScan(queue, low, high, start, backwards=backwards)

    async def _edges(self, queue: MessageQueue) -> tuple[int, int]:
        # Brokers of 4.9 answer with the nearest message, or with any of one millisecond: so we ask for one earlier or
        # later, and `Wanted.condition` looks at the times of the messages themselves.
        low = await self._consumer.min_offset(queue)
        high = await self._consumer.max_offset(queue)
        if self._wanted.begin > 0:
            low = max(low, await self._consumer.offset_at(queue, self._wanted.begin - 1))
        if self._wanted.end < self._clock.now():
            high = min(high, await self._consumer.offset_at(queue, self._wanted.end + 1) + 1)
        return low, high

    async def read_on(self, scan: QueueScan) -> None:
        """Read one window of a queue; an error is noted in the scan."""
        try:
            await self._within(scan.queue, self._read_window(scan))
        except MQError as error:
            scan.error = error

    async def _read_window(self, scan: QueueScan) -> None:
        begin, end = scan.window()
        at = begin
        found: list[ReceivedMessage] = []
        while at < end:
            result = await self._pull(scan.queue, at)
            found += [one for one in result.messages if one.queue_offset < end and self._matches(one)]
            is_stuck = result.status is PullStatus.NO_NEW_MSG or result.next_offset <= at
            self.looked_at += (end if is_stuck else min(result.next_offset, end)) - at
            at = end if is_stuck else result.next_offset
            if not scan.backwards:
                break
        scan.take(found, begin, at)

    async def _pull(self, queue: MessageQueue, offset: int) -> PullResult:
        subscription = self._subscription
        try:
            return await self._consumer.pull(queue, offset, subscription=subscription)
        except InternalError as error:
            if subscription.is_tag_type or "does not support" not in error.remark:
                raise
            self.filtered_here = True
            self._subscription = subscribe(queue.topic, SUB_ALL)
            return await self._consumer.pull(queue, offset)

    async def _within(self, queue: MessageQueue, work: Awaitable[T]) -> T:
        """What `work` gives, within the seconds of the budget."""
        async with self._gate:
            try:
                async with asyncio.timeout(self._budget.seconds):
                    return await work
            except TimeoutError:
                raise RequestTimedOut(
                    Text(
                        "{broker_name} did not answer within {seconds:g} s",
                        broker_name=queue.broker_name,
                        seconds=self._budget.seconds,
                    )
                ) from None


async def search(
    session: Session, wanted: Wanted, cursor: SearchCursor | None, budget: Budget, *, backwards: bool
) -> SearchPage:
    """One page of the messages that are wanted, from the cursor on, or backwards from it."""
    reader = _Reader(session, wanted, budget)
    queues = readable_queues(wanted.topic, await session.look_up_route(wanted.topic))
    if not queues:
        raise NoRoute(
            wanted.topic, Text("the topic {topic} has no queue that may be read at the moment", topic=wanted.topic)
        )
    if cursor is not None and any(queue.topic != wanted.topic for queue in cursor.offsets):
        raise WrongCursor(
            Text(
                "the cursor belongs to another topic than {topic}; begin the search anew without it", topic=wanted.topic
            )
        )
    scans = await asyncio.gather(*(reader.open(queue, cursor, backwards=backwards) for queue in queues))
    page: list[ReceivedMessage] = []
    while len(page) < budget.messages:
        if (scan := next_of(scans)) is not None:
            page.append(scan.found.popleft())
            continue
        behind = [scan for scan in scans if not scan.found and not scan.is_finished]
        if not behind or reader.is_spent:
            break
        await asyncio.gather(*map(reader.read_on, behind))
    started = SearchCursor({scan.queue: scan.start for scan in scans})
    reached = SearchCursor({scan.queue: scan.boundary for scan in scans})
    return SearchPage(
        messages=page[::-1] if backwards else page,
        before=reached if backwards else started,
        after=started if backwards else reached,
        is_last=all(scan.is_finished and not scan.found and scan.error is None for scan in scans),
        looked_at=reader.looked_at,
        filtered_here=reader.filtered_here,
        failed={scan.queue: scan.error for scan in scans if scan.error is not None},
    )
