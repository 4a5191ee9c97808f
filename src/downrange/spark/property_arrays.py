"""Reads the properties of many records at once: single properties as columns, all of them as a map.

Works on positions of the separators (`name \\x01 value \\x02 …`); model/properties.py defines what a property is.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from downrange.compiled import accelerated
from downrange.spark.arrow_arrays import as_numpy, numbers, spans
from downrange.spark.record_arrays import Bytes, Positions, RecordArrays

_NAME_VALUE: Final = 1
_PROPERTY: Final = 2
_MOST_BITS: Final = 60

_Texts = tuple[bytes | None, bytes, bytes]
"""The buffers of an Arrow array of strings: validity, offsets and data."""
_Map = tuple[bytes, bytes, bytes, bytes, bytes]
"""The buffers of an Arrow map: offsets of rows, offsets and data of names, offsets and data of values."""


class PropertyArrays:
    """The properties of `records`, scanned once; a column is made when it is needed."""

    def __init__(self, records: RecordArrays, data: pa.Buffer) -> None:
        self._rows = len(records)
        text = spans(data, records.properties_start, records.properties_stop, pa.binary())
        _, edges, values = text.buffers()
        self._edges = np.frombuffer(edges, np.int32, self._rows + 1) if self._rows else np.zeros(1, np.int32)
        self._data = values if values is not None else pa.py_buffer(b"")
        self._raw: Bytes = np.frombuffer(self._data, np.uint8, int(self._edges[-1]))
        self._is_ascii = not len(self._raw) or int(self._raw.max()) < 0x80
        self._row, self._start, self._equals, self._stop = self._pieces()

    def _pieces(self) -> tuple[Positions, Positions, Positions, Positions]:
        """For every name-value pair its row, its start, the end of its name and the end of its value."""
        raw, edges = self._raw, self._edges.astype(np.int64)
        ends = np.flatnonzero(raw == _PROPERTY)
        rows = np.searchsorted(edges[1:], ends, side="right")
        # The last property of a row need not end with a separator: then it ends with the row.
        filled = np.flatnonzero(edges[1:] > edges[:-1])
        unended = filled[raw[edges[filled + 1] - 1] != _PROPERTY]
        if len(unended):
            # Such an end has the position of the first byte of the next row; it comes before a separator there.
            order = np.argsort(np.concatenate((2 * ends + 1, 2 * edges[unended + 1])), kind="stable")
            ends = np.concatenate((ends, edges[unended + 1]))[order]
            rows = np.concatenate((rows, unended))[order]
        starts = np.empty_like(ends)
        if len(ends):
            starts[0] = edges[rows[0]]
            starts[1:] = np.where(rows[1:] == rows[:-1], ends[:-1] + 1, edges[rows[1:]])
        equals = np.flatnonzero(raw == _NAME_VALUE)
        if len(equals) != len(ends) or not ((equals > starts) & (equals < ends)).all():
            # A value may contain \x01, a piece may contain none: take the first \x01 of each piece.
            equals = np.append(equals, len(raw))[np.searchsorted(equals, starts)]
        good = (equals > starts) & (equals + 1 < ends)
        if good.all():
            return rows, starts, equals, ends
        return rows[good], starts[good], equals[good], ends[good]

    def column(self, name: str) -> pa.Array:
        """One property as strings, null where a record does not have it."""
        wanted = name.encode()
        found = np.flatnonzero(self._equals - self._start == len(wanted))
        if len(found):
            window = np.ndarray((len(self._raw) - len(wanted) + 1,), f"S{len(wanted)}", self._raw.data, strides=(1,))
            found = found[window[self._start[found]] == wanted]
        row = self._row[found]
        # Rows without the property get an empty span at their own place, so that spans ascend. The last value counts.
        start = self._edges[:-1].copy()
        stop = start.copy()
        start[row] = self._equals[found] + 1
        stop[row] = self._stop[found]
        valid = np.zeros(self._rows, np.bool_)
        valid[row] = True
        return self._text(start, stop, None if valid.all() else valid)

    def all(self, kind: pa.DataType) -> pa.Array:
        """All properties as a map."""
        keep = self._without_duplicates()
        row, start, equals, stop = self._row, self._start, self._equals, self._stop
        if keep is not None:
            row, start, equals, stop = row[keep], start[keep], equals[keep], stop[keep]
        edges = np.zeros(self._rows + 1, np.int32)
        np.cumsum(np.bincount(row, minlength=self._rows), out=edges[1:])
        return pa.MapArray.from_arrays(
            numbers(edges, pa.int32()), self._text(start, equals), self._text(equals + 1, stop), type=kind
        )

    def _without_duplicates(self) -> npt.NDArray[np.bool_] | None:
        """Which pairs to keep so that no row has a name twice; None for all. Of equal names the last counts."""
        if not len(self._row):
            return None
        names = self._text(self._start, self._equals).dictionary_encode()
        codes = as_numpy(names.indices).astype(np.int64)
        if len(names.dictionary) <= _MOST_BITS:
            # If a row has a name twice, the sum of bits has it twice and the union once.
            bits = np.int64(1) << codes
            first = np.flatnonzero(np.append(True, self._row[1:] != self._row[:-1]))
            if (np.add.reduceat(bits, first) == np.bitwise_or.reduceat(bits, first)).all():
                return None
        key = self._row * len(names.dictionary) + codes
        _, last = np.unique(key[::-1], return_index=True)
        keep = np.zeros(len(key), np.bool_)
        keep[len(key) - 1 - last] = True
        return keep

    def _text(self, start: npt.NDArray[Any], stop: npt.NDArray[Any], valid: Any = None) -> pa.Array:
        if self._is_ascii:
            return spans(self._data, start, stop, pa.string(), valid)
        return _as_text(spans(self._data, start, stop, pa.binary(), valid))


@dataclass(frozen=True, slots=True)
class SplitProperties:
    """The properties of records as the compiled function made them: the same columns as those of PropertyArrays."""

    _rows: int
    _is_ascii: bool
    _columns: Mapping[str, _Texts]
    _map: _Map | None

    def column(self, name: str) -> pa.Array:
        return self._text(self._rows, self._columns[name])

    def all(self, kind: pa.DataType) -> pa.Array:
        assert self._map is not None, "asked for a map that was not made"
        edges, name_edges, names, value_edges, values = self._map
        pairs = len(name_edges) // 4 - 1
        return pa.MapArray.from_arrays(
            pa.Array.from_buffers(pa.int32(), self._rows + 1, [None, pa.py_buffer(edges)]),
            self._text(pairs, (None, name_edges, names)),
            self._text(pairs, (None, value_edges, values)),
            type=kind,
        )

    def _text(self, count: int, texts: _Texts) -> pa.Array:
        buffers = [None if one is None else pa.py_buffer(one) for one in texts]
        if self._is_ascii:
            return pa.Array.from_buffers(pa.string(), count, buffers)
        return _as_text(pa.Array.from_buffers(pa.binary(), count, buffers))


def read_properties(
    records: RecordArrays, data: pa.Buffer, names: Sequence[str], *, wants_map: bool
) -> PropertyArrays | SplitProperties:
    """The properties of `records`, with the columns `names` and, if `wants_map`, the map of all."""
    wanted = tuple(name.encode() for name in names)
    found = split_properties(data, records.properties_start, records.properties_stop, wanted, wants_map)
    if found is None:
        return PropertyArrays(records, data)
    is_ascii, columns, in_map = found
    return SplitProperties(len(records), is_ascii, dict(zip(names, columns, strict=True)), in_map)


@accelerated
def split_properties(
    buffer: Any, starts: Any, stops: Any, names: tuple[bytes, ...], wants_map: bool
) -> tuple[bool, tuple[_Texts, ...], _Map | None] | None:
    """Whether all text is ASCII, a column for each name, and the map; None: that is left to `PropertyArrays`."""
    return None


def _as_text(found: pa.Array) -> pa.Array:
    try:
        return found.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([_replaced(value) for value in found.to_pylist()], pa.string())


@functools.lru_cache(maxsize=1024)
def _replaced(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")
