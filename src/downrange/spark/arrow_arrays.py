"""Converts between Arrow arrays and NumPy arrays or parts of buffers.

This is done without `pa.array` and `to_numpy`: their first call in a process imports pandas, which takes longer than
reading a hundred thousand messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def numbers(values: npt.NDArray[Any], kind: pa.DataType, valid: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """An Arrow array of numbers, null where not `valid`; `values` are copied only if necessary."""
    bits = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(kind, len(values), [bits, pa.py_buffer(np.ascontiguousarray(values))])


def as_numpy(array: pa.Array) -> npt.NDArray[Any]:
    """The numbers of an array without nulls; not copied."""
    kind = np.dtype(array.type.to_pandas_dtype())
    return np.frombuffer(array.buffers()[1], kind, len(array), array.offset * kind.itemsize)


def spans(
    data: pa.Buffer,
    start: npt.NDArray[Any],
    stop: npt.NDArray[Any],
    kind: pa.DataType,
    valid: npt.NDArray[np.bool_] | None = None,
) -> pa.Array:
    """The pieces `start` to `stop` of `data` as one Arrow array, null where not `valid`.

    Arrow copies them: pieces and the gaps between them make one array over `data`, of which every second item is taken.
    """
    count = len(start)
    if not count:
        return pa.nulls(0, kind)
    edges = np.empty(2 * count, np.int32)
    edges[0::2] = start
    edges[1::2] = stop
    everything = pa.Array.from_buffers(kind, 2 * count - 1, [None, pa.py_buffer(edges), data])
    return everything.take(numbers(np.arange(0, 2 * count, 2), pa.int64(), valid))


def constant(text: str, count: int) -> pa.Array:
    """An array with one string in all rows."""
    value = text.encode()
    edges = (
        np.arange(0, (count + 1) * len(value), len(value), dtype=np.int32) if value else np.zeros(count + 1, np.int32)
    )
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(edges), pa.py_buffer(value * count)])


def strings(texts: Sequence[str]) -> pa.Array:
    values = [text.encode() for text in texts]
    edges = np.cumsum([0, *map(len, values)], dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), len(values), [None, pa.py_buffer(edges), pa.py_buffer(b"".join(values))])
