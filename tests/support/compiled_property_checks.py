"""The compiled twins that Spark's workers use, against a few lines of Python; see compiled_fuzz.py."""

from __future__ import annotations

from array import array
from itertools import pairwise
from random import Random
from sys import byteorder

from downrange import _steps
from downrange.model.record import CorruptRecord, decode_record
from tests.support.compiled_client_checks import record

_PIECES = (b"TAGS", b"KEYS", b"a", b"b", b"\x01", b"\x01", b"\x02", b"\x02", "größe".encode(), b"\xff", b"value")
_NAMES = (b"TAGS", b"KEYS", b"")
_MOST_PAIRS = 64


def property_text(random: Random) -> bytes:
    if random.random() < 0.1:
        return b"".join(b"n%d\x01%d\x02" % (random.randrange(90), n) for n in range(random.randrange(120)))
    return b"".join(random.choice(_PIECES) for _ in range(random.randrange(16)))


def plain_pairs(text: bytes) -> dict[bytes, bytes] | None:
    """What counts as a property, in order; None when there are more than the twin takes."""
    pairs: dict[bytes, bytes] = {}
    for piece in text.split(b"\x02"):
        name, _, value = piece.partition(b"\x01")
        if name and value:
            pairs.pop(name, None)
            pairs[name] = value
            if len(pairs) > _MOST_PAIRS:
                return None
    return pairs


def same_properties(random: Random) -> None:
    """Texts with gaps between them, split into columns and a map."""
    texts = [property_text(random) for _ in range(random.randrange(20))]
    buffer, starts, stops = bytearray(), array("q"), array("q")
    for text in texts:
        buffer += bytes(random.randrange(3))
        starts.append(len(buffer))
        buffer += text
        stops.append(len(buffer))
    wants_map = random.random() < 0.5
    found = _steps.split_properties(bytes(buffer), starts, stops, _NAMES, wants_map)
    expected = [plain_pairs(text) for text in texts]
    if found is None:
        assert None in expected
        return
    is_ascii, columns, in_map = found
    assert is_ascii == all(text.isascii() for text in texts)
    rows = [pairs for pairs in expected if pairs is not None]
    assert len(rows) == len(texts)
    for name, (valid, edges, data) in zip(_NAMES, columns, strict=True):
        values = _texts(edges, data)
        has = [valid is None or bool(valid[row // 8] >> row % 8 & 1) for row in range(len(rows))]
        assert [value if there else None for value, there in zip(values, has, strict=True)] == [
            pairs.get(name) for pairs in rows
        ]
    assert (in_map is not None) == wants_map
    if in_map is not None:
        edges, name_edges, names, value_edges, values_data = in_map
        pairs_of_all = list(zip(_texts(name_edges, names), _texts(value_edges, values_data), strict=True))
        assert [pairs_of_all[first:last] for first, last in pairwise(array("i", edges))] == [
            list(pairs.items()) for pairs in rows
        ]


def _texts(edges: bytes, data: bytes) -> list[bytes]:
    return [data[first:last] for first, last in pairwise(array("i", edges))]


def same_walk(random: Random) -> None:
    """Sizes one behind the other; sometimes one of them is wrong, or the end is missing."""
    buffer, starts = bytearray(), array("q")
    for _ in range(random.randrange(6)):
        starts.append(len(buffer))
        size = random.randrange(91, 200)
        buffer += size.to_bytes(4, "big") + random.randbytes(size - 4)
    assert _steps.walk_records(bytes(buffer)) == starts.tobytes()
    if buffer:
        cut = bytes(buffer[: -random.randrange(1, 90)])
        assert _steps.walk_records(cut) is None
        at = random.choice(starts)
        buffer[at : at + 4] = random.choice([0, 90, len(buffer) + 1, 2**31, 2**32 - 1]).to_bytes(4, "big")
        assert _steps.walk_records(bytes(buffer)) is None
    _steps.walk_records(random.randbytes(random.randrange(300)))


def refuses_nonsense_about_properties(random: Random) -> None:
    """Places outside the buffer, arrays that do not fit together, other types: None, and nothing is read."""
    good: list[object] = [b"a\x01b\x02", array("q", [0]), array("q", [4]), (b"a",), True]
    wrong: list[list[object]] = [
        [None, 5, "text", array("q")],
        [array("q", [-1]), array("q", [5]), array("q", [2**63 - 1]), array("q", [0, 0]), b"1234567", None, ()],
        [array("q", [-1]), array("q", [5]), array("q", [2**63 - 1]), array("q", [-(2**63)]), b"", 7],
        [[b"a"], ("a",), None, (b"a",) * 9],
        [1, None, "yes"],
    ]
    which = random.randrange(len(good))
    bad = [*good]
    bad[which] = random.choice(wrong[which])
    assert _steps.split_properties(*bad) is None  # type: ignore[arg-type]
    assert _steps.split_properties(*good) is not None  # type: ignore[arg-type]
    assert _steps.walk_records(random.choice([None, 1, "text"])) is None  # type: ignore[arg-type]
    assert _steps.read_heads(random.choice([None, 1, "text"]), array("q")) is None  # type: ignore[arg-type]
    assert _steps.read_heads(b"", random.choice([None, 1, b"1234567"])) is None  # type: ignore[arg-type]


def same_heads(random: Random) -> None:
    """Records with gaps between them have the numbers that `decode_record` finds; damaged ones are left to Python."""
    buffer, starts, records = bytearray(), array("q"), []
    for _ in range(random.randrange(20)):
        buffer += random.randbytes(random.randrange(40))
        starts.append(len(buffer))
        records.append(record(random))
        buffer += records[-1]
    block = _steps.read_heads(bytes(buffer), starts)
    expected = [_numbers(raw, start) for raw, start in zip(records, starts, strict=True)]
    if None in expected:
        assert block is None
    else:
        assert block is not None
        longs, ints = array("q", block[: 80 * len(records)]), array("i", block[80 * len(records) :])
        for row, numbers in enumerate(expected):
            assert [*longs[row :: len(records)], *ints[row :: len(records)]] == numbers
    if records:
        buffer[random.randrange(len(buffer))] ^= 1 << random.randrange(8)
        _steps.read_heads(bytes(buffer), starts)
        cut = bytes(buffer[: starts[-1] + random.randrange(len(records[-1]))])
        assert _steps.read_heads(cut, starts) is None
        for wrong in (-1, len(buffer), len(buffer) + 1, 2**63 - 1, -(2**63)):
            assert _steps.read_heads(bytes(buffer), array("q", [*starts, wrong])) is None


def _numbers(raw: bytes, start: int) -> list[int] | None:
    """What `read_heads` makes of a record; None for one that it leaves to Python."""
    try:
        found = decode_record(raw)
    except CorruptRecord:
        return None
    if ":" in found.born_host[0] or ":" in found.store_host[0]:
        return None
    hosts = [int.from_bytes(raw[at : at + 8], byteorder, signed=True) for at in (48, 64)]
    properties = start + len(raw) - len(found.properties_text.encode())
    return [
        *(found.queue_offset, found.physical_offset, found.born_timestamp, found.store_timestamp, *hosts),
        *(start + 88, start + 88 + len(found.body), properties, start + len(raw)),
        *(found.queue_id, found.sys_flag, found.reconsume_times, int.from_bytes(raw[8:12], "big", signed=True)),
    ]
