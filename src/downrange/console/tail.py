"""The live tail of a topic: what matches, as it arrives; nothing is committed.

Every tenth of a second there is one batch: how many messages matched, and at most 50 of them, drawn by a reservoir
sample: "every n-th" would show a single queue, since messages go round the queues.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from downrange.client.session import Session
from downrange.model.errors import MQError
from downrange.model.properties import find_property
from downrange.model.sql.expression import compile_sql
from downrange.model.subscription import SUB_ALL
from downrange.model.topics import TOOLS_GROUP

if TYPE_CHECKING:
    from downrange.client.consumer.lite_pull import AsyncLitePullConsumer
    from downrange.client.consumer.messages import ReceivedMessage

BATCH_SECONDS: Final = 0.1
ROWS_A_BATCH: Final = 50


class Reservoir:
    """A sample of fixed size of a stream, in which every item has the same chance."""

    def __init__(self, most: int = ROWS_A_BATCH, source: random.Random | None = None) -> None:
        self._most = most
        self._random = source or random.Random()  # noqa: S311  it chooses what is shown, and guards nothing
        self.seen = 0
        self.kept: list[ReceivedMessage] = []

    def add(self, message: ReceivedMessage) -> None:
        self.seen += 1
        if len(self.kept) < self._most:
            self.kept.append(message)
            return
        at = self._random.randrange(self.seen)
        if at < self._most:
            self.kept[at] = message


@dataclass(frozen=True, slots=True)
class TailBatch:
    """What came in a tenth of a second: how many, and some of them in the order of their arrival."""

    matched: int
    messages: list[ReceivedMessage] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TailFilter:
    """Which messages of a topic are wanted."""

    topic: str
    tags: str = ""
    sql: str = ""


class Tail:
    """An open tail. `filtered_here`: the broker cannot evaluate SQL92, so that the console does."""

    def __init__(self, consumer: AsyncLitePullConsumer, matches: Callable[[ReceivedMessage], bool] | None) -> None:
        self._consumer = consumer
        self._matches = matches
        self.filtered_here = matches is not None

    async def batch(self) -> TailBatch:
        """Wait a tenth of a second, and return what came."""
        clock = self._consumer.session.clock
        end = clock.monotonic() + BATCH_SECONDS
        reservoir = Reservoir()
        while (left := end - clock.monotonic()) > 0:
            for message in await self._consumer.poll(left, 1000):
                if self._matches is None or self._matches(message):
                    reservoir.add(message)
        kept = sorted(reservoir.kept, key=lambda one: (one.store_timestamp, one.physical_offset))
        return TailBatch(reservoir.seen, kept)


@asynccontextmanager
async def tailing(session: Session, wanted: TailFilter) -> AsyncIterator[Tail]:
    """A tail from now on, for the length of a block; raises MQError for a wrong expression or topic."""
    from downrange.client.consumer.lite_pull import AsyncLitePullConsumer  # the start of a console does without it
    from downrange.client.consumer.lite_pull_config import LitePullConfig

    config = LitePullConfig(auto_commit=False, pull_batch_size=256)
    expression = compile_sql(wanted.sql) if wanted.sql else None
    async with AsyncLitePullConsumer(TOOLS_GROUP, config=config, session=session) as consumer:
        queues = await consumer.queues(wanted.topic)
        matches: Callable[[ReceivedMessage], bool] | None = None
        try:
            await consumer.assign(queues, wanted.tags or SUB_ALL, sql=wanted.sql or None)
        except MQError as error:
            if expression is None or "not support" not in str(error):
                raise
            await consumer.assign(queues, SUB_ALL)

            def matches_here(message: ReceivedMessage) -> bool:
                return expression.matches(partial(find_property, message.properties_text))

            matches = matches_here
        for queue in queues:
            await consumer.seek_to_end(queue)
        yield Tail(consumer, matches)
