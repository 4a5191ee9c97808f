"""Verifies every invariant of a store directory and changes nothing.

    report = check(StoreDirectory(path))

Log, queues and index are compared with each other, so that what one of them lost is seen in another. Works on a store
that a broker is writing at the moment: what lags behind for a moment is then no problem. Two passes: one over the log,
side by side with the index, whose keys stand in the same order; one over every queue, looking up each record.
"""

from __future__ import annotations

import bisect
import itertools
import json
import mmap
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from downrange.model.message import PhysicalOffset
from downrange.model.record import MAGIC_BLANK, PHYSICAL_OFFSET_AT, SIZE_AND_MAGIC
from downrange.store.check.check_index import IndexCheck
from downrange.store.check.check_queues import QueueCheck
from downrange.store.check.check_timer import timer_problems
from downrange.store.check.directory import Problem, StoreDirectory, StoreState
from downrange.store.check.queues_in_log import QueuesInLog
from downrange.store.config import BLANK_SIZE
from downrange.store.log.segment import Segment
from downrange.store.log.walk import WalkedRecord
from downrange.store.recovery import has_torn_text

# name of the pass, how much of it is done, how much there is to do
Progress = Callable[[str, int, int], None]

_PROGRESS_EVERY: Final = 10_000
_TIME_SLACK_MILLIS: Final = 60_000
_WRITER_PAUSE_SECONDS: Final = 0.02
_WRITER_ROUNDS: Final = 10
# A string, which stays as it is, or a number that stands as a key without quotes, as Java writes it.
_BARE_KEY: Final = re.compile(rb'("(?:[^"\\]|\\.)*")|([{,]\s*)(-?\d+)(\s*:)', re.DOTALL)


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What a check found: numbers, remarks that need no action, and problems."""

    root: str
    state: StoreState
    owner: int | None
    log_files: int
    log_bytes: int
    min_offset: int
    max_offset: int
    records: int
    first_timestamp: int
    last_timestamp: int
    queues: int
    queue_files: int
    queue_bytes: int
    queue_entries: int
    index_files: int
    index_bytes: int
    index_keys: int
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]

    @property
    def is_clean(self) -> bool:
        return not self.problems


def check(directory: StoreDirectory, progress: Progress = lambda what, done, total: None) -> StoreReport:
    """Read everything, record by record."""
    log = _LogCheck(directory, progress)
    log.run()
    queues = QueueCheck(directory, log.queues, log.is_damaged, log.end, directory.recovery_start())
    queues.run(lambda done, total: progress("queues", done, total), _queues_of_topics(directory))
    _check_gaps(directory)
    _check_checkpoint(directory, log.newest_timestamp)
    _check_config(directory)
    if directory.state is StoreState.STOPPED:  # a crash leaves work for the next start
        for problem in timer_problems(directory.root):
            where, _, what = problem.partition(": ")
            directory.problems.add(where, what, what, "remove timerlog and timerwheel: the next start makes them again")
    _check_state(directory, queues.lagging, log.index.lagging)
    return StoreReport(
        root=str(directory.root),
        state=directory.state,
        owner=directory.owner,
        log_files=len(directory.segments),
        log_bytes=len(directory.segments) * directory.segments.file_size,
        min_offset=max(0, directory.segments.min_offset),
        max_offset=log.end,
        records=log.records,
        first_timestamp=log.first_timestamp,
        last_timestamp=log.last_timestamp,
        queues=len(directory.queues),
        queue_files=queues.files,
        queue_bytes=queues.bytes,
        queue_entries=queues.entries,
        index_files=log.index.files,
        index_bytes=log.index.bytes,
        index_keys=log.index.keys,
        notes=tuple(directory.notes),
        problems=directory.problems.all(),
    )


class _LogCheck:
    """One pass over the log and, beside it, the index."""

    def __init__(self, directory: StoreDirectory, progress: Progress) -> None:
        self._directory = directory
        self._problems = directory.problems
        self._segments = directory.segments
        self._progress = progress
        self.queues = QueuesInLog(directory.problems)
        self.index = IndexCheck(directory)
        self.records = 0
        self.first_timestamp = self.last_timestamp = self.newest_timestamp = 0
        self.end = PhysicalOffset(max(0, self._segments.min_offset))
        self._limit: PhysicalOffset | None = None
        self._expected = self.end  # where the next record should begin
        self._segment: Segment | None = None  # the file of the last record
        self._mapping: mmap.mmap | bytes = b""
        # Ranges that hold no readable records, in order.
        self._damage_starts: list[int] = []
        self._damage_ends: list[int] = []

    def is_damaged(self, offset: PhysicalOffset) -> bool:
        at = bisect.bisect_right(self._damage_starts, offset) - 1
        return at >= 0 and offset < self._damage_ends[at]

    def run(self) -> None:
        self._limit = limit = self._end_when_live() if self._directory.is_live else None
        while len(self._segments):
            damage = self._walk()
            if limit is not None and self.end >= limit:
                break
            if damage is None and not self._directory.has_data_from(self.end):
                break
            following = self._directory.next_record(PhysicalOffset(self.end + 1))
            self._report_damage(damage, following)
            if following is None:
                break
            self.end = following
            self.queues.note_gap()
        self.index.finish(self.is_damaged)
        if not self._directory.index_files and self.records:
            self._directory.notes.append("there is no key index: nothing can be found by key")

    def _end_when_live(self) -> PhysicalOffset | None:
        """Where the log ends now; the check goes no further, or a busy writer would keep it running for ever."""
        last = self._directory.last_segment_with_data()
        end = PhysicalOffset(last.start if last is not None else 0)
        for _ in range(_WRITER_ROUNDS):
            walk = self._directory.commit_log.walk(end)
            for _record in walk:
                pass
            if walk.records or (walk.damage is None and not self._directory.has_data_from(walk.end)):
                return walk.end
            end = walk.end
            time.sleep(_WRITER_PAUSE_SECONDS)  # a record may be half written at the moment
        return None

    def _walk(self) -> str | None:
        """Check records from `end` on, up to the first that cannot be read; return the damage there, if it is one."""
        walk = self._directory.commit_log.walk(self.end, check_crc=True)
        self._expected = self.end
        for record in walk:
            if self._limit is not None and record.physical_offset >= self._limit:
                walk.end = record.physical_offset
                break
            self._check(record)
        self.end = walk.end
        if walk.end > self._expected:
            self._check_blank(self._expected)
        return walk.damage

    def _check(self, record: WalkedRecord) -> None:
        physical_offset, timestamp = record.physical_offset, record.store_timestamp
        segment = self._segment
        if segment is None or not segment.start <= physical_offset < segment.start + segment.size:
            segment = self._segment = self._segments.find(physical_offset)
            assert segment is not None
            self._mapping = segment.mapping
        if physical_offset != self._expected:
            self._check_blank(self._expected)
        at = physical_offset - segment.start
        stored = int.from_bytes(self._mapping[at + PHYSICAL_OFFSET_AT : at + PHYSICAL_OFFSET_AT + 8], "big")
        if stored != physical_offset:
            what = f"record at {physical_offset} says that it lies at {stored}"
            self._add_problem("place", what, "its message id leads elsewhere; restore the file from a copy")
        if timestamp < self.last_timestamp:
            what = f"record at {physical_offset} was stored {self.last_timestamp - timestamp} ms before the last one"
            self._add_problem("time", what, "the clock was set back: a search by time may miss messages")
        if has_torn_text(record):
            what = f"topic or properties of the record at {physical_offset} are no text"
            self._add_problem("text", what, "restore the file from a copy; clients may refuse the message")
        if not self.records:
            self.first_timestamp = timestamp
        self._pass(physical_offset, timestamp)
        self.queues.add(record)
        self.index.add(record, self.is_damaged)
        self._expected = PhysicalOffset(physical_offset + record.size)

    def _add_problem(self, kind: str, what: str, remedy: str) -> None:
        assert self._segment is not None
        self._problems.add(self._directory.name_of(self._segment.path), kind, what, remedy)

    def _pass(self, last_offset: PhysicalOffset, last_timestamp: int) -> None:
        self.records += 1
        self.last_timestamp = last_timestamp
        self.newest_timestamp = max(self.newest_timestamp, last_timestamp)
        if not self.records % _PROGRESS_EVERY:
            start = max(0, self._segments.min_offset)
            self._progress("log", last_offset - start, self._segments.max_offset - start)

    def _check_blank(self, offset: PhysicalOffset) -> None:
        """A file whose records do not fill it ends with a blank record that says how many bytes are left."""
        segment = self._segments.find(offset)
        if segment is None or offset == segment.start:
            return
        at = offset - segment.start
        left = segment.size - at
        raw = segment.mapping[at : at + BLANK_SIZE]
        right = SIZE_AND_MAGIC.pack(left, MAGIC_BLANK)
        if raw != right[: len(raw)]:
            what = f"the blank record at {offset} says {int.from_bytes(raw[:4], 'big')} bytes, {left} are left"
            self._problems.add(self._directory.name_of(segment.path), "blank", what, "nothing is lost; no action")

    def _report_damage(self, damage: str | None, following: PhysicalOffset | None) -> None:
        segment = self._segments.find(self.end)
        where = self._directory.name_of(segment.path) if segment is not None else "commitlog"
        self._damage_starts.append(self.end)
        self._damage_ends.append(following if following is not None else 1 << 63)
        if damage is None:
            damage = f"the log seems to end at {self.end}, but there is data behind it"
        if following is not None:
            what = f"{damage}; {following - self.end} bytes up to the next record cannot be read"
            if self._directory.is_live:
                remedy = "stop the broker and keep a copy: after a crash everything behind this place is cut off"
            else:
                remedy = "keep a copy: a start may cut off everything behind this place (it puts it aside)"
        else:
            what = f"torn tail: {damage}; no whole record follows"
            remedy = f"the next start cuts the log at {self.end}"
        self._problems.add(where, f"damage {self.end}", what, remedy)


def _check_gaps(directory: StoreDirectory) -> None:
    for before, after in itertools.pairwise(directory.segments):
        if after.start != before.start + before.size:
            what = f"the files between {before.path.name} and {after.path.name} are missing"
            directory.problems.add("commitlog", "gap", what, "restore them from a copy; their messages cannot be read")


def _check_checkpoint(directory: StoreDirectory, newest_timestamp: int) -> None:
    path = directory.root / "checkpoint"
    remedy = "remove it: the next start reads the whole log"
    try:
        status = path.stat()
    except FileNotFoundError:
        if directory.state is StoreState.STOPPED and directory.segments:
            directory.problems.add("checkpoint", "missing", "is missing", "the next start writes it again")
        return
    if status.st_size < 24:
        directory.problems.add("checkpoint", "size", f"has {status.st_size} bytes, at least 24 are needed", remedy)
    checkpoint = directory.checkpoint
    latest = max(newest_timestamp, status.st_mtime_ns // 1_000_000) + _TIME_SLACK_MILLIS
    for name, value in (
        ("commit log", checkpoint.physic_msg_timestamp),
        ("consume queues", checkpoint.logics_msg_timestamp),
        ("index", checkpoint.index_msg_timestamp),
    ):
        if not 0 <= value <= latest:
            what = f"says that the {name} is safe up to {value}, later than the newest message"
            directory.problems.add("checkpoint", name, what, remedy)


def lenient_json(text: bytes) -> object:
    """What a file of Java's holds: JSON, but for keys that are numbers without quotes."""
    quoted = _BARE_KEY.sub(lambda found: found[1] or found[2] + b'"' + found[3] + b'"' + found[4], text)
    return json.loads(quoted)


def _check_config(directory: StoreDirectory) -> None:
    config = directory.root / "config"
    for path in sorted(config.glob("*.json*")) if config.is_dir() else ():
        if not path.name.endswith((".json", ".json.bak")):
            continue
        backup = path.with_name(path.name + ".bak")
        try:
            text = path.read_bytes()
            if text.strip():
                lenient_json(text)
        except FileNotFoundError:  # being replaced
            continue
        except ValueError as error:
            remedy = "repair it or remove it"
            if not path.name.endswith(".bak") and backup.is_file():
                remedy = f"the broker takes {backup.name} instead; {remedy}"
            directory.problems.add(directory.name_of(path), "json", f"cannot be read: {error}", remedy)


def _queues_of_topics(directory: StoreDirectory) -> dict[str, int] | None:
    """How many queues each topic has; None when nothing tells."""
    for name in ("topics.json", "topics.json.bak"):
        try:
            table = lenient_json((directory.root / "config" / name).read_bytes())
        except (FileNotFoundError, ValueError):
            continue
        topics = table.get("topicConfigTable") if isinstance(table, dict) else None
        if isinstance(topics, dict):
            return {
                topic: max(int(one.get("readQueueNums", 0)), int(one.get("writeQueueNums", 0)))
                for topic, one in topics.items()
                if isinstance(one, dict)
            }
    return None


def _check_state(directory: StoreDirectory, lagging_entries: int, lagging_keys: int) -> None:
    lag = []
    if lagging_entries:
        lag.append(f"{lagging_entries} messages without a queue entry")
    if lagging_keys:
        lag.append(f"{lagging_keys} messages not in the index")
    cut = [path for path in directory.config.commit_log_paths if path.with_name(path.name + ".cut").is_dir()]
    directory.notes.extend(
        f"{directory.name_of(path.with_name(path.name + '.cut'))} holds what a recovery cut off" for path in cut
    )
    if directory.state is StoreState.LIVE:
        directory.notes.append(f"process {directory.owner} has it open" + (f"; {', '.join(lag)} yet" if lag else ""))
    elif directory.state is StoreState.CRASHED:
        what = "the last run was not stopped in order" + (f"; {', '.join(lag)}" if lag else "")
        start = directory.recovery_start()
        remedy = f"the next start reads the log from {start} on and makes queues and index complete"
        if not directory.abort.is_of_this_boot:
            remedy += "; index files that were not safe yet are dropped and built again"
        directory.problems.add("abort", "abort", what, remedy)
