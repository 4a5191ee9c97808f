"""Reads a store directory without a broker: the driver plans with `Stores`, tasks read with `StoreReader`."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from downrange.model.hashing import java_hash
from downrange.model.message import MessageQueue
from downrange.model.subscription import parse_tags
from downrange.model.topics import SCHEDULE_TOPIC
from downrange.settings import read_properties
from downrange.spark.decoder import Fetched, Origin
from downrange.spark.errors import DataLost, OptionError
from downrange.spark.offsets import Offsets
from downrange.spark.options import SourceOptions
from downrange.spark.planner import QueueRange, Reach
from downrange.spark.store_queues import Entries, LogFiles, QueueFiles
from downrange.store.check.directory import QueuePlace, StoreDirectory
from downrange.store.queue.consume_queue_ext import LAST_ADDRESS
from downrange.store.queue.queue_entry import ENTRY_SIZE

log = logging.getLogger(__name__)

_ENTRIES_AT_ONCE: Final = 50_000


class _Store:
    """The log and the queue files of one directory, as they were when this object was made."""

    def __init__(self, options: SourceOptions) -> None:
        root = Path(options.store_path or "")
        self._directory = StoreDirectory(root)
        self._broker_name = options.broker_name or _broker_name(root)
        self.log = LogFiles(self._directory.commit_log_files.size or 1, self._directory.commit_log_files.files)

    @cached_property
    def queues(self) -> dict[MessageQueue, QueueFiles]:
        """All queues. To list them takes long when there are thousands: only the planner does so."""
        return {
            MessageQueue(place.topic, self._broker_name, place.queue_id): _files_at(place)
            for place in self._directory.queues
            if place.sizes
        }

    def files_of(self, queue: MessageQueue) -> QueueFiles:
        """The files that one queue has now."""
        return _files_at(self._directory.queue(queue.topic, queue.queue_id))


def _files_at(place: QueuePlace) -> QueueFiles:
    return QueueFiles(place.path, place.sizes, place.file_size or ENTRY_SIZE)


def _broker_name(root: Path) -> str:
    """The name of the broker that wrote the store, else the name of the directory."""
    kept = root / "config" / "broker.properties"
    known = read_properties(kept).get("brokerName") if kept.is_file() else None
    return known.value if known is not None else root.resolve().name


class Stores:
    """A store directory, for the planner."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._store = _Store(options)

    def queues(self) -> list[MessageQueue]:
        self._store = _Store(self._options)
        return [queue for queue in sorted(self._store.queues) if self._is_chosen(queue)]

    def _is_chosen(self, queue: MessageQueue) -> bool:
        options = self._options
        if options.subscribe_pattern is not None:
            return options.matches(queue.topic)
        if options.assign is not None:
            return queue.queue_id in options.assigned.get(queue.topic, {}).get(queue.broker_name, ())
        return queue.topic in options.topics

    def reach(self, queues: Collection[MessageQueue], *, must_answer: bool) -> dict[MessageQueue, Reach]:
        return {queue: self._store.queues[queue].reach(self._store.log) for queue in queues}

    def at_time(self, times: Mapping[MessageQueue, int], reach: Mapping[MessageQueue, Reach]) -> Offsets:
        return {
            queue: self._store.queues[queue].at_time(millis, reach[queue], self._store.log)
            for queue, millis in times.items()
        }

    def committed(self, queues: Collection[MessageQueue]) -> Offsets:
        raise OptionError("offsets of a group need a broker: they do not go with storePath")

    def commit(self, offsets: Offsets) -> None:
        raise OptionError("offsets of a group need a broker: they do not go with storePath")


class StoreReader:
    """Gives the records of ranges, not decoded, as positions in mapped commit-log files."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._store = _Store(options)
        self._codes = np.array([java_hash(tag) for tag in parse_tags(options.tags)], np.int64)

    def read(self, ranges: Sequence[QueueRange]) -> Iterator[Fetched]:
        for wanted in ranges:
            at = wanted.start
            files = self._store.files_of(wanted.queue)
            while at < wanted.stop:
                entries = files.entries(at, min(wanted.stop - at, _ENTRIES_AT_ONCE))
                if len(entries):
                    yield from self._records(wanted, at, entries)
                    at += len(entries)
                    continue
                self._lost(wanted, at)
                files = self._store.files_of(wanted.queue)
                there = files.reach(self._store.log)
                at = there.minimum if there.minimum > at else wanted.stop

    def _records(self, wanted: QueueRange, at: int, entries: Entries) -> Iterator[Fetched]:
        log_files = self._store.log
        offsets = entries["physical_offset"].astype(np.int64)
        files = offsets - offsets % log_files.file_size
        chosen = self._with_tags(wanted.queue.topic, entries["tags_code"].astype(np.int64))
        # Entries of a queue ascend in the log, so those of one log file follow each other.
        edges = [0, *(np.flatnonzero(np.diff(files)) + 1).tolist(), len(files)]
        for first, last in pairwise(edges):
            start = int(files[first])
            buffer = log_files.map(start)
            if buffer is None:
                self._lost(wanted, at + first)
                continue
            starts = (offsets[first:last] - start)[chosen[first:last]]
            if len(starts):
                yield Fetched(buffer, starts, Origin(wanted.queue, at + first, at + last))

    def _with_tags(self, topic: str, codes: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which entries may have one of the tags, by hash; the decoder compares the texts."""
        if not len(self._codes) or topic == SCHEDULE_TOPIC:  # there the code is the time when a message is due
            return np.ones(len(codes), np.bool_)
        return np.isin(codes, self._codes) | (codes <= LAST_ADDRESS)

    def _lost(self, wanted: QueueRange, at: int) -> None:
        queue = wanted.queue
        what = f"{queue.topic} on {queue.broker_name} queue {queue.queue_id}: the files of message {at} were deleted"
        if self._options.fail_on_data_loss and not wanted.is_new:
            raise DataLost(f"{what} before it was read (failOnDataLoss=false would go on without)")
        log.warning("messages lost %s", what)
