"""Pulls ranges of queues from brokers, with several pulls under way at once, and gives the records in order.

An answer has few messages (32 from RocketMQ's broker), so pulling one after the other would mostly be waiting. A pull
needs only an offset, not the answer to the pull before: a range is cut into stretches that are fetched in parallel.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from downrange.model.subscription import SUB_ALL
from downrange.protocol.codes import ResponseCode
from downrange.spark.brokers import BrokerAway, Brokers, Pulled
from downrange.spark.cluster import subscription_of
from downrange.spark.decoder import Fetched, Origin
from downrange.spark.errors import DataLost
from downrange.spark.options import SourceOptions
from downrange.spark.planner import Loss, QueueRange, Reach
from downrange.spark.pull_connection import PullConnections
from downrange.spark.record_arrays import Positions, field, walk
from downrange.spark.worker_loop import WorkerLoop

log = logging.getLogger(__name__)

_FIRST_STRETCH: Final = 32
_PULLS_OF_A_STRETCH: Final = 8
_MOST_OF_A_STRETCH: Final = 1 << 16
_STRETCH_BYTES: Final = 1 << 20
_MOST_OF_A_PULL: Final = 4096
# Answers to bulk pulls are so large that a few keep a broker busy; a stretch is one such answer.
_BULK_STRETCH_BYTES: Final = 7 << 19
_BULK_PULLS_IN_FLIGHT: Final = 4
# Rows of a good batch: with fewer rows the decoder needs longer for each, and joining more costs more than it saves.
_ENOUGH_ROWS: Final = 4096
_ENOUGH_BYTES: Final = 3 << 20
_SLAVE_PAUSE_SECONDS: Final = 0.2


class _Answer(NamedTuple):
    body: bytes | bytearray
    starts: Positions
    offset_delta: int


class _Stretch(NamedTuple):
    """The answers for one stretch, and the number of pulls."""

    answers: list[_Answer]
    pulls: int

    @property
    def rows(self) -> int:
        return sum(len(answer.starts) for answer in self.answers)

    @property
    def size(self) -> int:
        return sum(len(answer.body) for answer in self.answers)


class WireReader:
    """Fetches ranges for one task. Not thread-safe; pulls progress only while the caller waits for the next piece."""

    def __init__(self, options: SourceOptions, loop: WorkerLoop, bulk: frozenset[str] = frozenset()) -> None:
        """`bulk` has the names of brokers that take bulk pulls."""
        self._options = options
        self._bulk = bulk
        self._loop = loop
        session = loop.session(options.client_config())
        self._connections = PullConnections(session.config.connect_timeout_seconds, session.tls)
        self._brokers = Brokers(
            session,
            group=options.group,
            retry_seconds=options.retry_seconds,
            pull_connections=self._connections,
        )

    def read(self, ranges: Sequence[QueueRange]) -> Generator[Fetched, None, None]:
        under_way: deque[tuple[QueueRange, asyncio.Task[_Stretch]]] = deque()
        ready: list[_Answer] = []
        rows = size = 0
        pieces = _Stretches(ranges)
        in_flight = self._options.pulls_in_flight
        if all(one.queue.broker_name in self._bulk for one in ranges):
            in_flight = min(in_flight, _BULK_PULLS_IN_FLIGHT)
        try:
            while True:
                while len(under_way) < in_flight and (piece := pieces.next()) is not None:
                    under_way.append((piece, self._loop.spawn(self._fetch(piece))))
                    if pieces.is_probing:
                        break
                if not under_way:
                    break
                current, task = under_way.popleft()
                stretch = self._loop.run(task)
                pieces.learn(current, stretch, is_bulk=current.queue.broker_name in self._bulk)
                ready += stretch.answers
                rows += stretch.rows
                size += stretch.size
                is_last = not under_way or under_way[0][0].queue != current.queue
                if ready and (is_last or rows >= _ENOUGH_ROWS or size >= _ENOUGH_BYTES):
                    yield from _joined(ready, current)
                    ready, rows, size = [], 0, 0
        finally:
            for _, task in under_way:
                task.cancel()
            if under_way:
                self._loop.run(asyncio.gather(*(task for _, task in under_way), return_exceptions=True))
            self._loop.run(self._connections.close())

    async def _fetch(self, wanted: QueueRange) -> _Stretch:
        """Fetch all records of one stretch, pull by pull."""
        pulls = 0
        found: list[_Answer] = []
        subscription = subscription_of(self._options, wanted.queue.topic)
        is_filtered = subscription.expression != SUB_ALL
        is_bulk = wanted.queue.broker_name in self._bulk
        at = wanted.start
        begun = None
        while at < wanted.stop:
            most = min(wanted.stop - at, _MOST_OF_A_PULL)
            asked_for = subscription if is_filtered else None
            pulled = await self._brokers.pull(wanted.queue, at, most, asked_for, is_bulk=is_bulk)
            is_behind = pulled.is_of_slave and pulled.code == ResponseCode.PULL_OFFSET_MOVED and pulled.next_offset < at
            if pulled.next_offset == at or pulled.code == ResponseCode.PULL_NOT_FOUND or is_behind:
                # A slave may be behind its master, or a master may be starting: messages that exist will come.
                begun = await self._wait(wanted, at, pulled, begun)
                if begun is None:
                    at = wanted.stop
                continue
            begun = None
            pulls += 1
            if pulled.code == ResponseCode.PULL_OFFSET_MOVED:
                at = self._moved(wanted, at, pulled)
                continue
            starts = walk(pulled.body)
            if not is_filtered and len(starts) < pulled.next_offset - at:
                self._lost(wanted, at, pulled)
            if is_filtered and len(starts):
                # A broker that looks for matches goes on behind our stretch: those messages belong to the next stretch.
                offsets = field(np.frombuffer(pulled.body, np.uint8), ">i8", starts + 20) + pulled.offset_delta
                starts = starts[offsets < wanted.stop]
            if len(starts):
                found.append(_Answer(pulled.body, starts, pulled.offset_delta))
            at = pulled.next_offset
        return _Stretch(found, pulls)

    async def _wait(self, wanted: QueueRange, at: int, pulled: Pulled, begun: float | None) -> float | None:
        """Wait a little; return when the waiting began, None if it took too long and the messages are lost.

        A master whose machine lost power may have lost the end of a queue, and a batch that was planned before asks for
        it for ever. A slave that is behind proves nothing.
        """
        clock = self._brokers.session.clock
        now = clock.monotonic()
        if begun is not None and now - begun > self._options.retry_seconds:
            if not pulled.is_of_slave and not self._options.fail_on_data_loss:
                self._lost(wanted, at, pulled)
                return None
            raise BrokerAway(
                f"broker {wanted.queue.broker_name} does not give message {at} of {wanted.queue.topic} queue "
                f"{wanted.queue.queue_id}, which was there: it says the queue has {pulled.min_offset} to "
                f"{pulled.max_offset - 1}"
            )
        await clock.sleep(_SLAVE_PAUSE_SECONDS)
        return now if begun is None else begun

    def _moved(self, wanted: QueueRange, at: int, pulled: Pulled) -> int:
        """The offset to continue at, if the broker says that `at` is outside the queue; or raise DataLost."""
        if not (wanted.is_new and pulled.next_offset > at):
            self._lost(wanted, at, pulled)
        return pulled.next_offset if pulled.next_offset > at else wanted.stop

    def _lost(self, wanted: QueueRange, at: int, pulled: Pulled) -> None:
        first = pulled.min_offset if pulled.next_offset <= at else max(pulled.min_offset, pulled.next_offset)
        loss = Loss(wanted.queue, at, Reach(first, pulled.max_offset))
        if self._options.fail_on_data_loss:
            raise DataLost(f"{loss} (failOnDataLoss=false would go on without them)")
        log.warning("messages lost %s", loss)


class _Stretches:
    """Cuts ranges into stretches, whose size depends on the answers so far."""

    def __init__(self, ranges: Sequence[QueueRange]) -> None:
        self._rest = deque(ranges)
        self._size = _FIRST_STRETCH
        self.is_probing = True
        """While the size of messages is unknown, one stretch is fetched at a time."""

    def next(self) -> QueueRange | None:
        if not self._rest:
            return None
        first = self._rest.popleft()
        stop = min(first.start + self._size, first.stop)
        if stop < first.stop:
            self._rest.appendleft(first._replace(start=stop))
        return first._replace(stop=stop)

    def learn(self, wanted: QueueRange, stretch: _Stretch, *, is_bulk: bool) -> None:
        self.is_probing = False
        if is_bulk:
            most, most_bytes = _MOST_OF_A_PULL, _BULK_STRETCH_BYTES
        else:
            of_a_pull = max(_FIRST_STRETCH, wanted.size // max(1, stretch.pulls))
            most, most_bytes = min(of_a_pull * _PULLS_OF_A_STRETCH, _MOST_OF_A_STRETCH), _STRETCH_BYTES
        fitting = most_bytes * wanted.size // max(1, stretch.size)
        self._size = max(1, min(most, fitting))


def _joined(answers: Sequence[_Answer], wanted: QueueRange) -> Iterator[Fetched]:
    """The answers as one buffer; as several only if the queue was moved to another broker in between."""
    at = 0
    while at < len(answers):
        delta = answers[at].offset_delta
        end = at
        while end < len(answers) and answers[end].offset_delta == delta:
            end += 1
        same = answers[at:end]
        origin = Origin(wanted.queue, wanted.start, wanted.stop, delta)
        at = end
        if len(same) == 1:
            yield Fetched(same[0].body, same[0].starts, origin)
            continue
        bases = np.cumsum([0, *(len(answer.body) for answer in same[:-1])])
        starts = np.concatenate([answer.starts + base for answer, base in zip(same, bases, strict=True)])
        yield Fetched(b"".join(answer.body for answer in same), starts, origin)
