"""Sends chosen dead letters of a table back to their groups, each once, with an outcome for each.

The letters come from the brokers, and are sent as `downrange dlq resend` sends them (client/dead_letters.py).
A journal beside the table notes each letter before it is sent and its outcome afterwards: a run that was killed goes on
with the same call, and finds out about the one letter that was under way.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812

from downrange.client.config import ClientConfig
from downrange.client.dead_letters import DeadLetter, DeadLetters, Resent
from downrange.client.errors import GroupNotFound
from downrange.client.resending import JournalFile, Pace, Place
from downrange.client.session import Session
from downrange.model.message import MessageQueue
from downrange.model.topics import dlq_topic, retry_topic
from downrange.spark.pipelines.errors import PipelineError, told_in_one_line
from downrange.spark.worker_loop import WorkerLoop

log = logging.getLogger(__name__)

JOURNAL: Final = "resent.jsonl"


class Fate(Enum):
    """What became of a chosen letter."""

    PLANNED = "to be sent"
    SENT = "sent"
    FAILED = "failed"
    SENT_BEFORE = "sent before"
    GONE = "gone"
    """The broker has deleted it: only the table has it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One chosen letter: where it is, where it goes, and what became of it."""

    group: str
    place: Place
    unique_key: str | None
    topic: str
    fate: Fate
    offset_message_id: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """How letters are sent again. `to_own`: to the topic each was first sent to, for all its groups."""

    to_own: bool = False
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.rate is not None and not self.rate > 0:
            raise PipelineError(f"a rate of {self.rate:g} messages a second would never end")

    def target(self, row: Row) -> str:
        """The topic to which a letter goes."""
        return str(row["origin_topic"]) if self.to_own else retry_topic(row["consumer_group"])


def chosen(letters: DataFrame, condition: str, job: Job) -> list[Outcome]:
    """The letters for which the Spark SQL `condition` is true, each to be sent, in the order of sending."""
    order = ("consumer_group", "origin_topic", "broker", "queue_id", "queue_offset")
    with told_in_one_line():
        rows = letters.where(F.expr(condition)).select(*order, "unique_key").orderBy(*order).collect()
    return [
        Outcome(row["consumer_group"], _place(row), row["unique_key"], job.target(row), Fate.PLANNED) for row in rows
    ]


def _place(row: Row) -> Place:
    return MessageQueue(dlq_topic(row["consumer_group"]), row["broker"], row["queue_id"]), row["queue_offset"]


def resend(
    planned: Sequence[Outcome],
    out: Path,
    namesrv: str | ClientConfig | None,
    job: Job,
    *,
    on_outcome: Callable[[Outcome], None] | None = None,
    stop: threading.Event | None = None,
) -> list[Outcome]:
    """Send letters that `chosen` has found, with the journal in `out`; one outcome for each.

    Setting `stop` ends it after a letter; the next call goes on. A letter that failed is tried again by the next call.
    """
    config = namesrv if isinstance(namesrv, ClientConfig) else ClientConfig.of(namesrv)
    told: list[Outcome] = []

    def tell(outcome: Outcome) -> None:
        told.append(outcome)
        if on_outcome is not None:
            on_outcome(outcome)

    with (
        _alone(out),
        JournalFile(out / JOURNAL, retry_failed=True) as journal,
        closing(WorkerLoop()) as loop,
    ):
        sending = _Sending(loop.session(config), journal, job, stop or threading.Event())
        for (group, topic), part in itertools.groupby(planned, lambda one: (one.group, one.topic)):
            if sending.is_stopped:
                break
            loop.run(sending.send(group, topic, {one.place: one for one in part}, tell))
    return told


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Two runs with one journal would send letters twice."""
    with (out / f"{JOURNAL}.lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise PipelineError(f"another run is sending dead letters of {out}: wait for it, or stop it") from None
        yield


class _Sending:
    """One run, on the event loop of its session."""

    def __init__(self, session: Session, journal: JournalFile, job: Job, stop: threading.Event) -> None:
        self._session = session
        self._journal = journal
        self._job = job
        self._stop = stop
        self._pace = Pace(session.clock, job.rate)

    @property
    def is_stopped(self) -> bool:
        return self._stop.is_set()

    async def send(
        self, group: str, topic: str, planned: dict[Place, Outcome], tell: Callable[[Outcome], None]
    ) -> None:
        """Send letters of one group to one topic."""
        letters = DeadLetters(self._session, group)
        left = dict(planned)

        async def wanted() -> AsyncIterator[DeadLetter]:
            async for letter in letters.read(places=frozenset(planned)):
                noted = self._journal.get(letter.place)
                is_done = letter.was_resent if noted is None else noted.sent_as is not None
                if is_done:
                    was_sent_as = None if noted is None else noted.sent_as
                    tell(_with(left.pop(letter.place), Fate.SENT_BEFORE, was_sent_as))
                if noted is not None or not is_done:  # those of the journal are passed over, and counted as sent
                    yield letter

        target = topic if self._job.to_own else None
        try:
            async with aclosing(letters.resend(wanted(), target, pace=self._pace, journal=self._journal)) as outcomes:
                async for outcome in outcomes:
                    tell(_of(left.pop(outcome.letter.place), outcome))
                    if self.is_stopped:
                        return
        except GroupNotFound as error:  # group and topic were deleted
            log.warning("dead letters not found group=%s reason=%s", group, error)
        for missing in left.values():
            tell(_with(missing, Fate.GONE))


def _of(planned: Outcome, resent: Resent) -> Outcome:
    if resent.error is not None:
        return _with(planned, Fate.FAILED, error=str(resent.error))
    return _with(planned, Fate.SENT, resent.offset_message_id)


def _with(planned: Outcome, fate: Fate, offset_message_id: str | None = None, error: str | None = None) -> Outcome:
    return Outcome(planned.group, planned.place, planned.unique_key, planned.topic, fate, offset_message_id, error)
