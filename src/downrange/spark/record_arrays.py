"""Reads many records of one buffer at once: the positions of their parts, and their fixed fields, as NumPy arrays.

The layout is that of model/record.py. A view with a stride of one byte lets NumPy take a field of every record with a
single indexing; nothing is done per record in Python. Buffers, like commit-log files, are smaller than 2 GiB.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from downrange.compiled import accelerated, accelerated_if_usual
from downrange.model.message import SysFlag
from downrange.model.record import (
    FIXED_SIZE,
    HEAD_V4,
    IPV6_EXTRA,
    MAGIC_V1,
    MAGIC_V2,
    PHYSICAL_OFFSET_AT,
    STORE_TIMESTAMP_AT,
    SYS_FLAG_AT,
    V6_FLAGS,
    CorruptRecord,
)

Positions = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_SIZE: Final = struct.Struct(">i")
BORN_HOST_AT: Final = 48

HEAD: Final = np.dtype(
    [
        ("size", ">i4"), ("magic", ">u4"), ("body_crc", ">u4"), ("queue_id", ">i4"), ("flag", ">i4"),
        ("queue_offset", ">i8"), ("physical_offset", ">i8"), ("sys_flag", ">i4"), ("born_time", ">i8"),
        # The fields from here on have these positions only if both hosts are IPv4.
        ("born_host", "=u8"), ("store_time", ">i8"), ("store_host", "=u8"), ("reconsume_times", ">i4"),
        ("prepared_transaction_offset", ">i8"), ("body_length", ">i4"),
    ]
)  # fmt: skip
"""HEAD_V4 for NumPy: the first bytes of a record; they end where the body begins if both hosts are IPv4."""
assert HEAD.itemsize == HEAD_V4.size
assert [HEAD.fields[name][1] for name in ("physical_offset", "sys_flag", "store_time")] == [  # type: ignore[index]
    PHYSICAL_OFFSET_AT,
    SYS_FLAG_AT,
    STORE_TIMESTAMP_AT,
]

_COLUMNS: Final = {
    **dict.fromkeys(("queue_offset", "physical_offset", "born_time", "store_time"), np.int64),
    **dict.fromkeys(("born_host", "store_host"), np.uint64),
    **dict.fromkeys(("body_start", "body_stop", "properties_start", "properties_stop"), np.int64),
    **dict.fromkeys(("queue_id", "sys_flag", "reconsume_times"), np.int32),
    "body_crc": np.uint32,
}
"""The columns that `read_heads` makes, in order."""


def _native(stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A field of the heads as an array of its own, in the machine's byte order."""
    return stored.astype(stored.dtype.newbyteorder("="))


def field(raw: Bytes, kind: str, at: Positions) -> npt.NDArray[Any]:
    """The big-endian number of type `kind` at each position, in the machine's own byte order."""
    stored = np.dtype(kind)
    view = np.ndarray((len(raw) - stored.itemsize + 1,), stored, raw.data, strides=(1,))
    return view[at].astype(stored.newbyteorder("="), copy=False)


def walk(buffer: bytes | bytearray | memoryview) -> Positions:
    """The positions of the records of a pull reply, which follow each other to the end of the buffer."""
    return np.frombuffer(walk_records(buffer), np.int64)


@accelerated_if_usual
def walk_records(buffer: bytes | bytearray | memoryview) -> bytes:
    """The positions of `walk` as the bytes of 64-bit numbers."""
    starts = []
    at, end = 0, len(buffer)
    size_at = _SIZE.unpack_from
    while at < end:
        starts.append(at)
        size = size_at(buffer, at)[0] if end - at >= 4 else 0
        if size < FIXED_SIZE or at + size > end:
            raise CorruptRecord(f"record at byte {at} says {size} bytes, {end - at} are there")
        at += size
    return np.array(starts, np.int64).tobytes()


@accelerated
def read_heads(buffer: Any, starts: Any) -> bytes | None:
    """The columns of records, one behind the other, without the help of NumPy; None: that is left to `RecordArrays`.

    Positions are those in `buffer`, and hosts are as they lie there. Damaged records, and those with an IPv6 host, are
    also left to `RecordArrays`.
    """
    return None


class RecordArrays:
    """Records that begin at the ascending positions `starts` of `raw`.

    Raises CorruptRecord for the first record whose parts do not add up to its size.
    """

    body_start: Positions
    body_stop: Positions
    properties_start: Positions
    properties_stop: Positions
    sys_flag: npt.NDArray[np.int32]

    def __init__(self, raw: Bytes, starts: Positions) -> None:
        self.raw = raw
        self.starts = starts
        self.has_v6 = False
        self._columns: dict[str, npt.NDArray[Any]] = {}
        block = read_heads(raw, starts)
        if block is None:
            self._read_with_numpy()
        else:
            self._take(block)

    def _take(self, block: bytes) -> None:
        rows, at = len(self.starts), 0
        for name, kind in _COLUMNS.items():
            self._columns[name] = np.frombuffer(block, kind, rows, at)
            at += self._columns[name].nbytes
        for name in ("body_start", "body_stop", "properties_start", "properties_stop", "sys_flag"):
            setattr(self, name, self._columns[name])

    def _read_with_numpy(self) -> None:
        raw, starts = self.raw, self.starts
        self._check(starts >= 0, "begins before the buffer")
        self._check(starts + FIXED_SIZE <= len(raw), "is cut off")
        # The heads are copied together once: fields are picked quicker out of them than out of the whole buffer.
        every_byte = np.ndarray((len(raw) - HEAD.itemsize + 1,), f"V{HEAD.itemsize}", raw.data, strides=(1,))
        self._head = head = every_byte[starts].view(HEAD) if len(starts) else np.empty(0, HEAD)
        size = head["size"].astype(np.int64)
        ends = starts + size
        self._check((size >= FIXED_SIZE) & (ends <= len(raw)), "has a size that cannot be")
        is_v2 = head["magic"] == MAGIC_V2
        has_v2 = bool(is_v2.any())
        self._check((head["magic"] == MAGIC_V1) | is_v2, "has no magic number of a record")
        self.sys_flag = _native(head["sys_flag"])
        self.has_v6 = bool((self.sys_flag & V6_FLAGS).any())
        self.store_time_at = starts + STORE_TIMESTAMP_AT
        if self.has_v6:
            self.store_time_at = self.store_time_at + self._is(SysFlag.BORN_HOST_V6) * IPV6_EXTRA
        self.store_host_at = self.store_time_at + 8
        self.reconsume_at = self.store_host_at + 8
        if self.has_v6:
            self.reconsume_at = self.reconsume_at + self._is(SysFlag.STORE_HOST_V6) * IPV6_EXTRA
            self._check(self.reconsume_at + 19 <= ends, "is too short for its hosts")
            body_length = field(raw, ">i4", self.reconsume_at + 12)
        else:
            body_length = head["body_length"]
        self.body_start = self.reconsume_at + 16
        self.body_stop = self.body_start + body_length
        self._check(
            (body_length >= 0) & (self.body_stop + (4 if has_v2 else 3) <= ends), "has a body that does not fit"
        )
        topic_length = field(raw, ">i1", self.body_stop).astype(np.int64)
        topic_start = self.body_stop + 1
        if has_v2:
            topic_length = np.where(is_v2, field(raw, ">i2", self.body_stop), topic_length)
            topic_start = topic_start + is_v2
        topic_stop = topic_start + topic_length
        self._check((topic_length >= 0) & (topic_stop + 2 <= ends), "has a topic that does not fit")
        self.properties_start = topic_stop + 2
        properties_length = field(raw, ">i2", topic_stop)
        self.properties_stop = self.properties_start + properties_length
        self._check(
            (properties_length >= 0) & (self.properties_stop == ends), "has parts that do not add up to its size"
        )

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def sizes(self) -> Positions:
        return self.properties_stop - self.starts

    def select(self, mask: npt.NDArray[np.bool_]) -> RecordArrays:
        return RecordArrays(self.raw, self.starts[mask])

    def _is(self, flag: SysFlag) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = (self.sys_flag & int(flag)) != 0
        return found

    def _check(self, good: npt.NDArray[np.bool_], problem: str) -> None:
        if not good.all():
            first = int(self.starts[int(np.argmin(good))])
            raise CorruptRecord(f"record at byte {first} {problem}")

    def number(self, name: str) -> npt.NDArray[Any]:
        """A field of `HEAD` that precedes the hosts, of every record."""
        return self._columns[name] if self._columns else _native(self._head[name])

    @property
    def store_time(self) -> npt.NDArray[np.int64]:
        if self.has_v6:
            return field(self.raw, ">i8", self.store_time_at)
        return self.number("store_time")

    @property
    def reconsume_times(self) -> npt.NDArray[np.int32]:
        if self.has_v6:
            return field(self.raw, ">i4", self.reconsume_at)
        return self.number("reconsume_times")

    def packed_v4_hosts(self, which: str) -> npt.NDArray[np.uint64]:
        """`born_host` or `store_host` as eight bytes, in the byte order of the log. Only if no host is IPv6."""
        found: npt.NDArray[np.uint64] = self.number(which)
        return found

    @property
    def packed_physical_offset(self) -> npt.NDArray[np.uint64]:
        """The physical offsets as eight bytes, in the byte order of the log."""
        return self.number("physical_offset").byteswap().view(np.uint64)

    def hosts(self, which: str) -> tuple[Positions, Positions]:
        """Where `born_host` or `store_host` begins, and its size. Only if some host is IPv6."""
        is_born = which == "born_host"
        sizes = np.where(self._is(SysFlag.BORN_HOST_V6 if is_born else SysFlag.STORE_HOST_V6), 8 + IPV6_EXTRA, 8)
        return self.starts + BORN_HOST_AT if is_born else self.store_host_at, sizes
