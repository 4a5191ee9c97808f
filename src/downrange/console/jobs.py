"""Jobs: dead letters that are sent again one by one, at a rate, with an outcome for each.

A job notes each letter before it sends it. After a crash a letter that was noted and has no outcome is looked for by
its mark in the retry topic, so that none is sent twice and none is left. A job that was running when the console ended
waits to be continued.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from downrange.client.admin import Admin
from downrange.client.resending import Noted, Pace, Place
from downrange.clock import Clock
from downrange.console.history_file import HistoryFile
from downrange.model.errors import MQError
from downrange.model.text import Text

if TYPE_CHECKING:
    from downrange.client.dead_letters import DeadLetter, DeadLetters

log = logging.getLogger(__name__)

WAITING: Final = "waiting"
NOTED: Final = "noted"
SENT: Final = "sent"
FAILED: Final = "failed"

RUNNING: Final = "running"
PAUSED: Final = "paused"
STOPPED: Final = "stopped"
DONE: Final = "done"
MOST_RATE: Final = 5000.0


class JobGone(MQError):
    """There is no such job."""


@dataclass(frozen=True, slots=True)
class Item:
    """One letter of a job: its place, its own id, and the id of the message it carries."""

    place: str
    number: int
    letter: str
    message: str
    state: str
    at: int
    result: str


@dataclass(slots=True)
class Job:
    """A job as its table has it, and how its letters stand."""

    id: str
    cluster: str
    group: str
    who: str
    created: int
    state: str
    rate: float
    detail: str
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def sent(self) -> int:
        return self.counts.get(SENT, 0)

    @property
    def failed(self) -> int:
        return self.counts.get(FAILED, 0)

    @property
    def left(self) -> int:
        return self.counts.get(WAITING, 0) + self.counts.get(NOTED, 0)

    @property
    def is_over(self) -> bool:
        return self.state in (DONE, STOPPED)


class Jobs:
    """All jobs, in the database of the console. One task runs each job that is running."""

    def __init__(self, file: HistoryFile, clock: Clock) -> None:
        self.file = file
        self.clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        detail = "the console was restarted meanwhile"
        file.execute("UPDATE jobs SET state = ?, detail = ? WHERE state = ?", (PAUSED, detail, RUNNING))

    # --- reading --------------------------------------------------------------------------------------------------

    def get(self, job_id: str, cluster: str) -> Job:
        rows = self.file.execute("SELECT * FROM jobs WHERE id = ? AND cluster = ?", (job_id, cluster))
        if not rows:
            raise JobGone(Text("there is no job {job_id}", job_id=job_id))
        return self._job(rows[0])

    def of_group(self, cluster: str, group: str) -> list[Job]:
        """The newest first."""
        rows = self.file.execute(
            "SELECT * FROM jobs WHERE cluster = ? AND subject = ? ORDER BY created DESC LIMIT 20", (cluster, group)
        )
        return [self._job(row) for row in rows]

    def items(self, job_id: str, state: str | None = None, limit: int = -1, offset: int = 0) -> list[Item]:
        rows = self.file.execute(
            "SELECT place, number, letter, message, state, at, result FROM items "
            "WHERE job = ? AND (? IS NULL OR state = ?) ORDER BY number LIMIT ? OFFSET ?",
            (job_id, state, state, limit, offset),
        )
        return [Item(*row) for row in rows]  # type: ignore[arg-type]  # the columns have these types

    def resent(self, cluster: str, group: str) -> set[str]:
        """Places of the letters of a group that jobs have sent again."""
        rows = self.file.execute(
            "SELECT items.place FROM items JOIN jobs ON jobs.id = items.job "
            "WHERE jobs.cluster = ? AND jobs.subject = ? AND items.state IN (?, ?)",
            (cluster, group, SENT, NOTED),
        )
        return {str(place) for (place,) in rows}

    def _job(self, row: tuple[object, ...]) -> Job:
        job_id, cluster, _, subject, who, created, state, rate, detail = row
        counts = self.file.execute("SELECT state, COUNT(*) FROM items WHERE job = ? GROUP BY state", (job_id,))
        return Job(
            str(job_id),
            str(cluster),
            str(subject),
            str(who),
            int(str(created)),
            str(state),
            float(str(rate)),
            str(detail),
            {str(name): int(str(count)) for name, count in counts},
        )

    # --- changing -------------------------------------------------------------------------------------------------

    def create(self, cluster: str, group: str, who: str, letters: Sequence[DeadLetter], detail: str = "") -> Job:
        """A job that waits for its trial or its start; `detail` is what its page says about it."""
        job_id = secrets.token_hex(4)
        now = self.clock.now()
        self.file.execute(
            "INSERT INTO jobs VALUES (?, ?, 'resend', ?, ?, ?, ?, 50, ?)",
            (job_id, cluster, group, who, now, PAUSED, detail),
        )
        self.file.execute_many(
            "INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, 0, '', '', '')",
            (
                (job_id, place_text(one.place), number, one.message.offset_message_id, one.message.message_id, WAITING)
                for number, one in enumerate(letters)
            ),
        )
        return self.get(job_id, cluster)

    def start(self, job: Job, admin: Admin, rate: float, most: int | None = None) -> None:
        """Send what is left, or the next `most` letters, in the background."""
        if job.id in self._tasks and not self._tasks[job.id].done():
            return
        self._set(job.id, RUNNING, "", rate)
        run = Run(self, job, admin, min(max(rate, 0.1), MOST_RATE), most)
        self._tasks[job.id] = asyncio.create_task(run.run(), name=f"job {job.id}")

    async def pause(self, job: Job, state: str = PAUSED) -> None:
        """Stop sending after the letter that is under way; `STOPPED` for good."""
        task = self._tasks.pop(job.id, None)
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait((task,))
        self._set(job.id, state, "")

    async def finished(self, job_id: str) -> None:
        """Wait for the task of a job."""
        task = self._tasks.get(job_id)
        if task is not None:
            await asyncio.wait((task,))

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    def _set(self, job_id: str, state: str, detail: str, rate: float | None = None) -> None:
        self.file.execute(
            "UPDATE jobs SET state = ?, detail = ?, rate = COALESCE(?, rate) WHERE id = ?",
            (state, detail, rate, job_id),
        )
        self.tell()

    def set_state(self, job_id: str, state: str, detail: str = "") -> None:
        self._set(job_id, state, detail)

    def note(self, job_id: str, place: str, state: str, result: str = "") -> None:
        """Write how a letter stands."""
        self.file.execute(
            "UPDATE items SET state = ?, at = ?, result = ? WHERE job = ? AND place = ?",
            (state, self.clock.now(), result, job_id, place),
        )
        self.tell()

    def tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self) -> None:
        """Wait until any job has changed."""
        await self._changed.wait()


class JobJournal:
    """The letters of one job in the database: what `DeadLetters.resend` notes and asks. [client.resending.Journal]"""

    def __init__(self, jobs: Jobs, job_id: str) -> None:
        self._jobs = jobs
        self._job_id = job_id

    def get(self, place: Place) -> Noted | None:
        rows = self._jobs.file.execute(
            "SELECT mark, topic, at, state, result FROM items WHERE job = ? AND place = ?",
            (self._job_id, place_text(place)),
        )
        if not rows or rows[0][3] == WAITING:
            return None
        mark, topic, at, state, result = (str(value) for value in rows[0])
        noted = Noted(mark, topic, int(at))
        if state == SENT:
            return replace(noted, sent_as=result)
        return replace(noted, error=result) if state == FAILED else noted

    def intend(self, place: Place, topic: str, timestamp: int) -> Noted:
        noted = Noted(secrets.token_hex(8), topic, timestamp)
        self._jobs.file.execute(
            "UPDATE items SET state = ?, at = ?, mark = ?, topic = ? WHERE job = ? AND place = ?",
            (NOTED, timestamp, noted.mark, topic, self._job_id, place_text(place)),
        )
        return noted

    def conclude(self, place: Place, sent_as: str | None, error: str | None) -> None:
        state = SENT if error is None else FAILED
        self._jobs.file.execute(
            "UPDATE items SET state = ?, at = ?, result = ? WHERE job = ? AND place = ?",
            (state, self._jobs.clock.now(), sent_as or error or "", self._job_id, place_text(place)),
        )
        self._jobs.tell()


class Run:
    """One run of a job: the letters without an outcome, or the first of them, one after another."""

    def __init__(self, jobs: Jobs, job: Job, admin: Admin, rate: float, most: int | None) -> None:
        self._jobs = jobs
        self._job = job
        self._admin = admin
        self._pace = Pace(jobs.clock, rate)
        self._most = most

    async def run(self) -> None:
        try:
            await self._send()
        except MQError as error:
            self._jobs.set_state(self._job.id, PAUSED, str(error))
            return
        left = self._jobs.get(self._job.id, self._job.cluster)
        self._jobs.set_state(self._job.id, PAUSED if left.left else DONE)

    async def _send(self) -> None:
        from downrange.client.dead_letters import DeadLetters  # the first page does not wait for it

        items = self._jobs.items(self._job.id, NOTED) + self._jobs.items(self._job.id, WAITING)
        wanted = {item.place: item for item in items[: self._most]}
        letters = DeadLetters(self._admin.session, self._job.group)
        journal = JobJournal(self._jobs, self._job.id)
        found = self._found(letters, wanted)
        async for outcome in letters.resend(found, pace=self._pace, journal=journal):
            wanted.pop(place_text(outcome.letter.place), None)
        if self._most is None:
            for item in wanted.values():
                self._jobs.note(self._job.id, item.place, FAILED, "the letter is no longer there")

    async def _found(self, letters: DeadLetters, wanted: dict[str, Item]) -> AsyncIterator[DeadLetter]:
        ids = {item.letter for item in wanted.values()}
        left = set(wanted)
        async for letter in letters.read(message_ids=ids):
            place = place_text(letter.place)
            if place in left:
                left.discard(place)
                yield letter
            if not left:
                return


def place_text(place: Place) -> str:
    queue, offset = place
    return f"{queue.broker_name}/{queue.queue_id}/{offset}"
