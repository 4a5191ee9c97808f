"""Decodes records in a buffer into Arrow batches with the wanted columns. See the notes in record_arrays.py."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from downrange.client.compression import MAX_BODY_BYTES, decompress
from downrange.model import properties as names
from downrange.model.message import MessageQueue, SysFlag
from downrange.model.message_id import offset_message_id, unpack_host
from downrange.model.record import CorruptRecord, crc32
from downrange.spark.arrow_arrays import as_numpy, constant, numbers, spans, strings
from downrange.spark.property_arrays import PropertyArrays, SplitProperties, read_properties
from downrange.spark.record_arrays import Positions, RecordArrays

MAX_ROWS: Final = 10_000
"""Larger batches are not faster, and Spark holds each batch in memory as a whole."""
MAX_BYTES: Final = 32 << 20

_HEX: Final = np.frombuffer(b"".join(b"%02X" % value for value in range(256)), np.uint16)
_MAX_MILLIS: Final = (2**63 - 1) // 1000

_BY_PROPERTY: Final = {"unique_key": names.UNIQ_KEY, "keys": names.KEYS, "tags": names.TAGS}


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of records: a queue, which of its messages (for errors), and what to add to their queue offsets."""

    queue: MessageQueue
    start: int
    stop: int
    offset_delta: int = 0


class Fetched(NamedTuple):
    """Records that were read but not decoded: a buffer, the positions of records in it, and their origin."""

    buffer: bytes | bytearray | mmap.mmap
    starts: Positions
    origin: Origin


@dataclass(frozen=True, slots=True)
class Decoder:
    """Turns records into batches of one schema. Has no state between calls; one per task.

    `tags` keeps records with one of these tags, all if it is empty; `store_time` keeps records stored in this range.
    """

    schema: pa.Schema
    tags: frozenset[str] = frozenset()
    store_time: range | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    check_crc: bool = False

    def batches(self, fetched: Fetched) -> Iterator[pa.RecordBatch]:
        """The wanted records in batches of bounded size."""
        data = pa.py_buffer(fetched.buffer)
        origin = fetched.origin
        raw = np.frombuffer(data, np.uint8)
        try:
            for records in _parts(raw, fetched.starts):
                batch = self._batch(records, data, origin)
                if batch.num_rows:
                    yield batch
        except CorruptRecord as error:
            queue = origin.queue
            raise CorruptRecord(
                f"{queue.topic} on {queue.broker_name} queue {queue.queue_id}, "
                f"messages {origin.start} to {origin.stop - 1}: {error}"
            ) from None

    def _batch(self, records: RecordArrays, data: pa.Buffer, origin: Origin) -> pa.RecordBatch:
        if self.store_time is not None:
            stored = records.store_time
            records = records.select((stored >= self.store_time.start) & (stored < self.store_time.stop))
        if self.tags:
            # The broker compares only hashes of tags.
            tags = read_properties(records, data, [names.TAGS], wants_map=False).column(names.TAGS)
            has_tag = as_numpy(pc.is_in(tags, value_set=strings(sorted(self.tags))).cast(pa.uint8())) != 0
            if not has_tag.all():
                records = records.select(has_tag)
        if self.check_crc:
            _check_crc(records, data)
        return _Columns(records, data, origin, self.max_body_bytes, self.schema).batch()


def _parts(raw: npt.NDArray[np.uint8], starts: Positions) -> Iterator[RecordArrays]:
    """The records that begin at `starts`, in pieces of at most MAX_ROWS records and about MAX_BYTES."""
    for at in range(0, len(starts), MAX_ROWS):
        part = starts[at : at + MAX_ROWS]
        records = RecordArrays(raw, part)
        piece_of = np.cumsum(records.sizes) // MAX_BYTES
        if int(piece_of[-1]) == 0:
            yield records
        else:
            for piece in np.split(part, np.flatnonzero(np.diff(piece_of)) + 1):
                yield RecordArrays(raw, piece)


def _check_crc(records: RecordArrays, data: pa.Buffer) -> None:
    whole = memoryview(data)
    stored = records.number("body_crc")
    for number, (start, stop) in enumerate(zip(records.body_start.tolist(), records.body_stop.tolist(), strict=True)):
        if crc32(whole[start:stop]) != stored[number]:
            raise CorruptRecord(f"record at byte {int(records.starts[number])}: the checksum of its body is wrong")


@dataclass(frozen=True)
class _Columns:
    """The columns of one batch, each made when it is needed by the method of its name."""

    _records: RecordArrays
    _data: pa.Buffer
    _origin: Origin
    _max_body_bytes: int
    _schema: pa.Schema

    def batch(self) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([self._column(one) for one in self._schema], schema=self._schema)

    def _column(self, one: pa.Field) -> pa.Array:
        if one.name == "properties":
            return self.properties.all(one.type)
        if one.name in _BY_PROPERTY:
            return self.properties.column(_BY_PROPERTY[one.name])
        return getattr(self, one.name)()

    @cached_property
    def properties(self) -> PropertyArrays | SplitProperties:
        wanted = [_BY_PROPERTY[name] for name in self._schema.names if name in _BY_PROPERTY]
        return read_properties(self._records, self._data, wanted, wants_map="properties" in self._schema.names)

    def topic(self) -> pa.Array:
        return constant(self._origin.queue.topic, len(self._records))

    def broker(self) -> pa.Array:
        return constant(self._origin.queue.broker_name, len(self._records))

    def queue_id(self) -> pa.Array:
        return numbers(self._records.number("queue_id"), pa.int32())

    def queue_offset(self) -> pa.Array:
        return numbers(self._records.number("queue_offset") + self._origin.offset_delta, pa.int64())

    def physical_offset(self) -> pa.Array:
        return numbers(self._records.number("physical_offset"), pa.int64())

    def msg_id(self) -> pa.Array:
        records = self._records
        count = len(records)
        if records.has_v6:
            hosts = self._packed_hosts("store_host")
            return strings(list(map(offset_message_id, hosts, records.number("physical_offset").tolist())))
        parts = np.empty((count, 2), np.uint64)
        parts[:, 0] = records.packed_v4_hosts("store_host")
        parts[:, 1] = records.packed_physical_offset
        digits = _HEX[parts.view(np.uint8)]
        edges = np.arange(0, 32 * count + 1, 32, dtype=np.int32)
        return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(edges), pa.py_buffer(digits)])

    def body(self) -> pa.Array:
        records = self._records
        found = spans(self._data, records.body_start, records.body_stop, pa.binary())
        compressed = (records.sys_flag & int(SysFlag.COMPRESSED)) != 0
        if not compressed.any():
            return found
        plain = [
            decompress(found[row].as_py(), int(records.sys_flag[row]), self._name(row), self._max_body_bytes)
            for row in np.flatnonzero(compressed).tolist()
        ]
        return pc.replace_with_mask(found, pa.array(compressed), pa.array(plain, pa.binary()))

    def _name(self, row: int) -> str:
        """The description of a message in an error text."""
        queue = self._origin.queue
        offset = int(self._records.number("queue_offset")[row]) + self._origin.offset_delta
        return f"message {offset} of {queue.topic} on {queue.broker_name} queue {queue.queue_id}"

    def born_time(self) -> pa.Array:
        return _timestamps(self._records.number("born_time"))

    def store_time(self) -> pa.Array:
        return _timestamps(self._records.store_time)

    def born_host(self) -> pa.Array:
        return self._hosts("born_host")

    def store_host(self) -> pa.Array:
        return self._hosts("store_host")

    def reconsume_times(self) -> pa.Array:
        return numbers(self._records.reconsume_times, pa.int32())

    def sys_flag(self) -> pa.Array:
        return numbers(self._records.sys_flag, pa.int32())

    def _hosts(self, which: str) -> pa.Array:
        if self._records.has_v6:
            return strings([str(unpack_host(packed)) for packed in self._packed_hosts(which)])
        packed = self._records.packed_v4_hosts(which)
        if len(packed) and (packed == packed[0]).all():  # always so for the broker's, and often for the sender's
            return constant(_host_text(int(packed[0])), len(packed))
        # Most records name one of a few hosts: the text of each host is made once.
        encoded = numbers(packed, pa.uint64()).dictionary_encode()
        return strings([_host_text(value) for value in encoded.dictionary.to_pylist()]).take(encoded.indices)

    def _packed_hosts(self, which: str) -> list[bytes]:
        whole = memoryview(self._data)
        starts, sizes = self._records.hosts(which)
        return [bytes(whole[start : start + size]) for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)]


def _host_text(packed: int) -> str:
    return str(unpack_host(packed.to_bytes(8, sys.byteorder)))


def _timestamps(millis: npt.NDArray[np.int64]) -> pa.Array:
    # The born time comes from the sender: an absurd value must not overflow into another time.
    micros = np.clip(millis, -_MAX_MILLIS, _MAX_MILLIS) * 1000
    return numbers(micros, pa.timestamp("us", "UTC"))
