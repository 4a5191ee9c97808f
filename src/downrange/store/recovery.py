"""Recovers a store: finds the end of the log, cuts a torn record, and replays what queues and index lack.

After an orderly stop the queues say where the log ends, and only records behind it are read. After a crash reading
starts with the file that is safe according to the checkpoint, as in RocketMQ.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from downrange.model.message import PhysicalOffset, QueueOffset
from downrange.model.record import MAGIC_BLANK, MAGIC_V1, MAGIC_V2, PHYSICAL_OFFSET_AT, SIZE_AND_MAGIC
from downrange.store.bulk_replay import BulkReplay
from downrange.store.checkpoint import Checkpoint
from downrange.store.config import BLANK_SIZE, BrokerRole, StoreConfig
from downrange.store.dispatcher import Dispatcher
from downrange.store.files import Files
from downrange.store.index.key_index import IndexQuery, KeyIndex
from downrange.store.log.commit_log import CommitLog
from downrange.store.log.segment import Segment
from downrange.store.log.walk import Walk, WalkedRecord
from downrange.store.queue.consume_queue import ENTRY
from downrange.store.queue.queues import QueueState

log = logging.getLogger(__name__)

# RocketMQ reads this many files at the end of the log after an orderly stop if the queues do not say where it ends, and
# after a crash without checkpoint.
_FILES_TO_SCAN: Final = 3
_PART_OF_SECTOR: Final = 64  # bytes that a disk writes together or not at all, at the least
_NOT_IN_A_QUEUE: Final = 4  # the bit that prepared and rolled-back messages have in sysFlag
_MAGICS: Final = (MAGIC_V1.to_bytes(4, "big"), MAGIC_V2.to_bytes(4, "big"))


@dataclass(slots=True)
class RecoveryReport:
    """The findings and repairs of a recovery; warnings are for the operator."""

    clean: bool
    is_intact: bool = True
    """Whether all that was written is there: the machine has not stopped since."""
    start_offset: PhysicalOffset = PhysicalOffset(0)
    end_offset: PhysicalOffset = PhysicalOffset(0)
    records: int = 0
    replayed: int = 0
    cut_bytes: int = 0
    rebuilt_queues: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


class Recovery:
    """One recovery of one store; call `run` once, before anything is appended.

    Afterwards the log ends with its last valid record and zeros follow; every record has its queue entry; no entry
    points behind the end.
    """

    def __init__(
        self,
        commit_log: CommitLog,
        dispatcher: Dispatcher,
        checkpoint: Checkpoint,
        files: Files,
        config: StoreConfig,
        *,
        machine_stopped: bool,
    ) -> None:
        self._log = commit_log
        self._segments = commit_log.segments
        self._queues = dispatcher.queues
        self._index = dispatcher.index
        self._dispatcher = dispatcher
        self._checkpoint = checkpoint
        self._files = files
        self._config = config
        # If the machine stopped, bytes that were not synced may be missing, also in the log. And a master sends its log
        # cut anywhere: the log of a slave may end within a record, even after an orderly stop.
        self._may_end_anywhere = machine_stopped or config.broker_role is BrokerRole.SLAVE
        # Then the last message in the index may lack some of its keys, and is indexed again.
        self._index_was_cut = machine_stopped
        self._writable = self._segments.writable

    def run(self, report: RecoveryReport) -> None:
        if not len(self._segments):
            self._forget_everything(report)
            return
        headless = self._destroy_headless_queues(report)
        start = self._segments.min_offset if headless else self._start(report.clean)
        report.start_offset = start
        dispatched = PhysicalOffset(0) if headless or not report.clean else self._queues.max_physical_offset
        self._index_up_to(max(start, dispatched))

        bulk = BulkReplay(self._dispatcher, begin=dispatched) if self._writable else None
        walk = self._log.walk(start, check_crc=self._config.check_crc_on_recover, bulk=bulk)
        from_the_beginning = start <= self._log.min_offset
        incomplete: dict[tuple[bytes, int], QueueState] = {}
        for record in walk:
            if self._writable and record.physical_offset >= dispatched:
                report.replayed += 1
                if from_the_beginning or not self._lacks_earlier_entries(record, incomplete):
                    self._dispatcher.replay(record)
                else:
                    walk.bulk = None  # the records that follow are for the index only
                    self._dispatcher.index_only(record)
        if bulk is not None:
            report.replayed += bulk.records
        if walk.records and self._may_end_anywhere:
            self._leave_out_torn(walk, start, incomplete)
        report.records = walk.records
        report.end_offset = walk.end
        self._cut(walk.end, walk.damage, report)
        if self._writable:
            for segment, at in walk.torn_blanks:
                segment.mapping[at : at + BLANK_SIZE] = SIZE_AND_MAGIC.pack(segment.size - at, MAGIC_BLANK)

        last_timestamp = walk.last_timestamp
        self._log.last_store_timestamp = last_timestamp or self._last_known_timestamp()
        if self._writable:
            self._queues.truncate(walk.end)
            self._cut_index(walk.end, last_timestamp)
            self._rebuild(incomplete, report)
        self._queues.correct_min_offsets(self._log.min_offset)

    def _leave_out_torn(
        self, walk: Walk, start: PhysicalOffset, incomplete: dict[tuple[bytes, int], QueueState]
    ) -> None:
        """Let the walk end before the first record that may not have been synced, and has a torn topic or properties.

        If the machine stopped, pages may be missing in the middle of what was not synced; queues with a torn entry are
        added to `incomplete`. Otherwise only the last record may be incomplete.
        """
        first = start if self._index_was_cut else walk.last_offset
        synced_up_to = self._checkpoint.physic_msg_timestamp
        last_timestamp = 0
        for record in self._log.walk(first):
            if record.physical_offset > walk.last_offset:
                return
            is_last = record.physical_offset == walk.last_offset
            is_torn = has_torn_text(record) if is_last else record.store_timestamp >= synced_up_to and has_hole(record)
            if is_torn:
                walk.end = record.physical_offset
                walk.last_timestamp = last_timestamp or walk.last_timestamp
                walk.damage = f"record at {walk.end}: a part of its topic or properties is missing"
                return
            last_timestamp = record.store_timestamp
            if self._index_was_cut and self._has_torn_entry(record):
                state = self._queues.of_record(record.topic, record.queue_id)
                assert state is not None
                incomplete[record.topic, record.queue_id] = state

    def _has_torn_entry(self, record: WalkedRecord) -> bool:
        """Whether the queue entry of a record names another place, or another size, than the record has.

        An entry may lie in two sectors, of which one was synced when the machine stopped. A replay leaves entries that
        are there as they are.
        """
        if record.store_timestamp < self._checkpoint.logics_msg_timestamp or record.sys_flag & _NOT_IN_A_QUEUE:
            return False
        state = self._queues.of_record(record.topic, record.queue_id)
        entry = b"" if state is None else state.queue.read(record.queue_offset, 1)
        return bool(entry) and ENTRY.unpack(entry)[:2] != (record.physical_offset, record.size)

    def _forget_everything(self, report: RecoveryReport) -> None:
        """Remove queues and index of an empty log, whose entries would point at nothing."""
        if not self._writable:
            return
        if len(self._queues):
            report.warnings.append("the commit log is empty: all consume queues were removed")
            self._queues.remove_where(lambda *_: True)
        if self._index is not None:
            self._index.destroy()

    def _start(self, clean: bool) -> PhysicalOffset:
        """The offset of the first record that is read."""
        segments = list(self._segments)
        if clean or not self._writable:
            end = self._end_of_queues()
            if end is not None:
                return end
            if not len(self._queues):
                return segments[0].start
            return segments[max(0, len(segments) - _FILES_TO_SCAN)].start
        with_index = self._index is not None and self._config.message_index_safe
        limit = self._checkpoint.safe_timestamp(with_index=with_index)
        for segment in reversed(segments):
            timestamp = self._log.store_timestamp_at(segment.start)
            if self._log.record_at(segment.start) is not None and 0 < timestamp <= limit:
                return segment.start
        return segments[0].start

    def _end_of_queues(self) -> PhysicalOffset | None:
        """The end of the last record that has a queue entry; None when this entry and the log do not agree."""
        newest = self._newest_entry()
        if newest is None:
            return None
        physical_offset, size = newest
        record = self._log.record_at(physical_offset)
        if record is None or len(record) != size:
            return None
        return PhysicalOffset(physical_offset + size)

    def _destroy_headless_queues(self, report: RecoveryReport) -> bool:
        """Remove queues without their first entry, if the log has all its files: they lost files of their own."""
        if self._log.min_offset > 0 or not self._writable:
            return False
        headless = [state for state in self._queues if state.queue.min_offset > 0]
        for state in headless:
            self._queues.destroy(state)
            self._note_rebuilt(state, report)
        return bool(headless)

    def _note_rebuilt(self, state: QueueState, report: RecoveryReport) -> None:
        name = f"{state.topic}/{state.queue_id}"
        report.rebuilt_queues.append(name)
        report.warnings.append(f"entries of queue {name} were missing: built again from the commit log")

    def _lacks_earlier_entries(self, record: WalkedRecord, incomplete: dict[tuple[bytes, int], QueueState]) -> bool:
        """Whether the queue of this record lacks entries of earlier records, perhaps of records not read here."""
        if record.sys_flag & _NOT_IN_A_QUEUE or not record.queue_offset:
            return False
        key = record.topic, record.queue_id
        if key in incomplete:
            return True
        state = self._queues.of_record(*key)
        if state is None or record.queue_offset <= state.queue.max_offset:
            return False
        incomplete[key] = state
        return True

    def _rebuild(self, incomplete: dict[tuple[bytes, int], QueueState], report: RecoveryReport) -> None:
        """Fill queues whose files were lost by reading the whole log."""
        if not incomplete:
            return
        for state in incomplete.values():
            self._queues.destroy(state)
            self._note_rebuilt(state, report)
        for record in self._log.walk(self._log.min_offset):
            if (record.topic, record.queue_id) in incomplete:
                self._dispatcher.replay(record)

    def _index_up_to(self, offset: PhysicalOffset) -> None:
        """Index again the records between the end of the index and `offset`, where replaying begins.

        RocketMQ does not: it drops the newest index file after a crash and indexes only what it replays.
        """
        if self._index is None or not self._writable:
            return
        found = index_reach(self._index)
        last = found.last_update_physical_offset
        bulk = BulkReplay(self._dispatcher, only_index=True, begin=PhysicalOffset(last + 1), end=offset)
        for record in self._log.walk(max(last, self._log.min_offset), bulk=bulk):
            if record.physical_offset >= offset:
                return
            is_new = record.physical_offset > last or not found.last_update_timestamp
            if is_new or self._index_was_cut:
                self._dispatcher.index_only(record)

    def _cut_index(self, end: PhysicalOffset, last_timestamp: int) -> None:
        """Remove index files with records behind the end: they would keep later records there from being indexed."""
        if self._index is not None and index_reach(self._index).last_update_physical_offset >= end:
            self._index.load(drop_newer_than=last_timestamp - 1)
            self._index_was_cut = True
            self._index_up_to(end)

    def _last_known_timestamp(self) -> int:
        """The store time of the last record that has a queue entry; 0 when it cannot be read."""
        newest = self._newest_entry()
        return 0 if newest is None else max(0, self._log.store_timestamp_at(newest[0]))

    def _newest_entry(self) -> tuple[PhysicalOffset, int] | None:
        """Physical offset and size of the last record that has a queue entry."""
        newest = self._queues.newest()
        raw = newest.queue.read(QueueOffset(newest.queue.max_offset - 1), 1) if newest is not None else b""
        return ENTRY.unpack(raw)[:2] if raw else None

    def _cut(self, end: PhysicalOffset, damage: str | None, report: RecoveryReport) -> None:
        """Cut the log at `end`. Bytes behind it become zeros; if there are whole records, a copy is kept first."""
        torn = self._segments.find(end)
        later = [segment for segment in self._segments if segment.start > end]
        dirty = torn is not None and torn.has_data_from(end - torn.start)
        survivors = [segment for segment in later if segment.has_data_from(0)]
        if dirty or survivors:
            if damage is None:
                # The head of a record is written last: a process that dies in between leaves such bytes.
                damage = "files behind the end have data" if survivors else "the last record was not finished"
            report.warnings.append(f"{damage}; the log was cut at {end}")
            log.warning("log cut offset=%d reason=%s", end, damage)
        if self._writable:
            if torn is not None and dirty:
                report.cut_bytes += self._clear_tail(torn, end - torn.start, report)
            for segment in later:
                if segment in survivors:
                    report.cut_bytes += segment.size
                self._discard(segment, segment in survivors, report)
        self._segments.cut(end)
        if not report.clean and self._segments.find(report.start_offset) is not None:
            # Bytes that a dead process left in the page cache may not be synced yet.
            self._mark_unflushed(report.start_offset)

    def _mark_unflushed(self, offset: PhysicalOffset) -> None:
        for segment in self._segments:
            if segment.start + segment.size > offset:
                segment.flushed = max(0, min(segment.wrote, offset - segment.start))
        self._segments.flushed_offset = min(self._segments.flushed_offset, offset)

    def _clear_tail(self, segment: Segment, position: int, report: RecoveryReport) -> int:
        survivor = find_record(segment, position, self._log)
        if survivor is not None:
            aside = _aside(segment.path, f".from-{segment.start + position}")
            _copy_tail(segment, position, aside)
            report.warnings.append(
                f"whole records follow the damage, the first at {survivor}: the bytes that were cut are kept in {aside}"
            )
        segment.release()
        self._files.clear_from(segment.path, position)
        return segment.size - position

    def _discard(self, segment: Segment, has_data: bool, report: RecoveryReport) -> None:
        if has_data and find_record(segment, 0, self._log) is not None:
            aside = _aside(segment.path, "")
            self._files.replace(segment.path, aside)
            report.warnings.append(f"{segment.path} lies behind the damage and has whole records: kept as {aside}")
        else:
            self._files.remove(segment.path)


def has_torn_text(record: WalkedRecord) -> bool:
    """Whether topic or properties of this record end with zeros, have a hole or are no text.

    For the last record after the machine stopped: a page that never reached the disk reads as zeros, and the checksum
    covers only the body.
    """
    text = record.topic + record.properties
    try:
        text.decode()
    except UnicodeDecodeError:
        return True
    return text.endswith(b"\0") or has_hole(record)


def has_hole(record: WalkedRecord) -> bool:
    """Whether a part of a sector is missing in topic or properties. Zeros that a sender put there lie otherwise."""
    if b"\0" not in record.topic + record.properties:
        return False
    properties_at = record.physical_offset + record.size - len(record.properties)
    topic_at = properties_at - 2 - len(record.topic)
    return _has_hole(record.properties, properties_at) or _has_hole(record.topic, topic_at)


def _has_hole(text: bytes, at: int) -> bool:
    """Whether text that begins at this offset of the log has zeros that begin and end where parts of sectors do."""
    return any(
        (zeros.start() == 0 or (at + zeros.start()) % _PART_OF_SECTOR == 0)
        and (zeros.end() == len(text) or (at + zeros.end()) % _PART_OF_SECTOR == 0)
        for zeros in re.finditer(b"\0+", text)
    )


def index_reach(index: KeyIndex) -> IndexQuery:
    """The physical offset and store time of the last message in the index; zeros when it is empty."""
    return index.query("", "", 0, 0, 0)


def find_record(segment: Segment, position: int, commit_log: CommitLog) -> PhysicalOffset | None:
    """The offset of the first whole record at or behind `position`, found by magic number, offset and checksum."""
    mapping = segment.mapping
    for start, end in segment.chunks_with_data(position):
        for magic in _MAGICS:
            at = mapping.find(magic, max(start, position), min(end + 3, segment.size))
            while at >= 0:
                begin = at - 4
                offset = PhysicalOffset(segment.start + begin)
                stored = mapping[begin + PHYSICAL_OFFSET_AT : begin + PHYSICAL_OFFSET_AT + 8]
                if begin >= position and int.from_bytes(stored, "big") == offset:
                    walk = commit_log.walk(offset, check_crc=True)
                    if next(iter(walk), None) is not None:
                        return offset
                at = mapping.find(magic, at + 1, min(end + 3, segment.size))
    return None


def _aside(path: Path, suffix: str) -> Path:
    """A free name beside the commit-log directory; the directory itself may have only log files."""
    directory = path.parent.with_name(path.parent.name + ".cut")
    directory.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        candidate = directory / (path.name + suffix + (f".{number}" if number else ""))
        if not candidate.exists():
            return candidate
        number += 1


def _copy_tail(segment: Segment, position: int, target: Path) -> None:
    with target.open("wb") as stream:
        for start, end in segment.chunks_with_data(position):
            begin = max(start, position)
            stream.seek(begin - position)
            stream.write(segment.mapping[begin:end])
