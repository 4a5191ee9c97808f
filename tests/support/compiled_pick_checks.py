"""What must hold between the compiled ways to pick entries and their twins in Python, for one random input each."""

from __future__ import annotations

import struct
from random import Random
from typing import Any

from downrange import compiled
from downrange.model.properties import find_property
from downrange.model.record import MAGIC_V1, MAGIC_V2, properties_of
from downrange.model.sql.expression import SqlExpression, compile_sql
from downrange.store.queue import backlog as backlog_module
from downrange.store.queue import tag_codes
from downrange.store.queue.backlog import Backlog, Picked
from downrange.store.queue.consume_queue import BLANK, ENTRY
from downrange.store.queue.property_filter import PropertyFilter
from downrange.store.queue.tag_codes import TagCodes
from tests.support.compiled_pull_checks import backlog
from tests.support.in_python import in_python

_BACKLOG, _TAG_CODES = in_python(backlog_module), in_python(tag_codes)

_CODES = (0, 1, -1, 7, 2112, 2**31 - 1, -(2**31), 65, 66, 67)
_LONG_CODES = (*_CODES, 2**32 + 7, 2**63 - 1, -(2**63), 1_794_727_122_803)
_NAMES = ("a", "b", "color", "KEYS", "TAGS", "a_name_that_nothing_has")
_VALUES = ("1", "12", "", "x", "3.5", "red", "\u00e4", "\x01", "a\x01b", "NaN", "true", "9" * 30)
_EXPRESSIONS = tuple(
    map(
        compile_sql,
        (
            "a > 5",
            "a = 12 OR color = 'red'",
            "a IS NULL AND b IS NOT NULL",
            "color IN ('red', 'x') AND NOT (b > 3.0)",
            "TAGS CONTAINS 'x' OR KEYS = '\u00e4'",
            "a BETWEEN 1 AND 20 AND b <> 'x' AND (color = 'red' OR KEYS IS NULL)",
            "a = b",
        ),
    )
)
_NONSENSE: tuple[Any, ...] = (None, "x", b"x", bytes(20), bytes(21), 2**63, -(2**63), -1, 0, 1.5, [], (), object())


def coded(random: Random, *, spoilt: bool) -> Backlog:
    """A backlog whose entries have tags codes; spoilt: also blanks, entries out of order, and sizes that are none."""
    raw, *rest = backlog(random, spoilt=spoilt)
    entries = [
        ENTRY.pack(offset, size, random.choice(_LONG_CODES)) for offset, size, _ in ENTRY.iter_unpack(raw)
    ] * random.choice((1, 1, 3) if spoilt else (1,))
    if spoilt and random.random() < 0.3:
        entries.insert(random.randrange(len(entries) + 1), BLANK)
    return (b"".join(entries), *rest)  # type: ignore[return-value]


def same_pick_by_tags(random: Random) -> None:
    found = coded(random, spoilt=random.random() < 0.5)
    codes = frozenset(random.choices(_LONG_CODES, k=random.choice((1, 1, 2, 3, 8))))
    most, most_bytes = _limits(random)
    tags = TagCodes(codes)
    picked = compiled.steps.pick_by_tags(found, most, most_bytes, tags._sorted)
    assert picked == _TAG_CODES.pick_by_tags(found, most, most_bytes, tags._sorted)
    assert picked == _one_by_one(found, most, most_bytes, lambda record, code: tags(code, None))


def same_pick_of_all(random: Random) -> None:
    spoilt = random.random() < 0.5
    found = coded(random, spoilt=spoilt)
    most, most_bytes = _limits(random)
    picked = compiled.steps.pick_all(found, most, most_bytes)
    expected = _one_by_one(found, most, most_bytes, lambda record, code: True)
    assert picked == expected
    assert spoilt or picked is not None, "what is usual is for the compiled step"
    again = _BACKLOG.pick_all(found, most, most_bytes)
    # Python does not look whether entries in the middle are in order: those of a queue are.
    assert again is None or spoilt or again == expected


def _limits(random: Random) -> tuple[int, int]:
    return random.choice((1, 2, 31, 32, 1000)), random.choice((0, 1, 500, 3000, 60_000, 1 << 20))


def _one_by_one(found: Backlog, most: int, most_bytes: int, wants: Any) -> Picked | None:
    """The rule itself, as `MessageReader.read` has it.

    None where an entry does not point behind the one before, or a wanted record does not lie in the file.
    """
    raw, view, start, readable = found
    picked, scanned, byte_count, before = b"", 0, 0, start
    for number, (offset, size, code) in enumerate(ENTRY.iter_unpack(raw)):
        if offset < before:
            return None
        before = offset
        if picked and (len(picked) >= most * ENTRY.size or byte_count + size > most_bytes):
            break
        scanned += 1
        if wants(view[offset - start : offset - start + size], code):
            if size <= 0 or offset + size > start + readable:
                return None
            picked += raw[number * ENTRY.size :][: ENTRY.size]
            byte_count += size
    return picked, scanned, byte_count


def _text(random: Random) -> bytes:
    pieces = []
    for _ in range(random.choice((0, 1, 5, 9))):
        piece = random.choice(_NAMES) + random.choice(("\x01", "\x01", "\x01", "\x01", "", "\x01\x01"))
        pieces.append((piece + random.choice(_VALUES)).encode())
        if random.random() < 0.05:
            pieces.append(random.randbytes(6))
    return b"\x02".join(pieces) + random.choice((b"", b"\x02", b"\x02\x02"))


def _record(random: Random, properties: bytes) -> bytes:
    magic = random.choice((MAGIC_V1, MAGIC_V1, MAGIC_V2))
    hosts = random.choice((0, 0, 0x10, 0x20, 0x30))
    body = random.randbytes(random.choice((0, 5, 300)))
    head = struct.pack(">4xI28xI", magic, hosts | random.choice((0, 0, 1, 1 << 8)))
    middle = bytes(44 + 12 * hosts.bit_count()) + struct.pack(">I", len(body)) + body
    topic = b"\x03top" if magic == MAGIC_V1 else b"\0\x03top"
    record = bytearray(head + middle + topic + struct.pack(">H", len(properties)) + properties)
    record[:4] = len(record).to_bytes(4, "big")
    return bytes(record)


def recorded(random: Random, *, spoilt: bool) -> Backlog:
    """A backlog of records with properties; spoilt: with a byte changed, or an entry that leads elsewhere."""
    start = random.choice((0, 1 << 30))
    log = bytearray(random.choice((0, 50)))
    entries = []
    for _ in range(random.choice((1, 5, 40))):
        record = _record(random, _text(random))
        entries.append([start + len(log), len(record), 0])
        log += record + bytes(random.choice((0, 0, 30)))
    readable = len(log)
    if spoilt:
        entry = random.choice(entries)
        match random.randrange(5):
            case 0:
                log[random.randrange(len(log))] ^= 1 << random.randrange(8)
            case 1:
                entry[0] = random.choice((0, -1, start, entry[0] + 1, entry[0] - 1, start + readable, 2**62, -(2**63)))
            case 2:
                entry[1] = random.choice((0, -1, 1, 87, 90, entry[1] - 1, entry[1] + 1, readable, 2**31 - 1))
            case 3:
                readable = random.randrange(readable)
            case _:
                random.shuffle(entries)
    view = memoryview(bytes(log))
    return b"".join(ENTRY.pack(*entry) for entry in entries), view, start, readable


def same_pick_by_properties(random: Random) -> None:
    spoilt = random.random() < 0.4
    found = recorded(random, spoilt=spoilt)
    expression: SqlExpression = random.choice(_EXPRESSIONS)
    most, most_bytes = _limits(random)
    passes = PropertyFilter(expression.condition, expression.names)
    picked = passes.pick(found, most, most_bytes)
    if picked is None:
        assert spoilt, "what is usual is for the twin"
        return
    assert picked == _one_by_one(found, most, most_bytes, lambda record, code: passes(record))
    for offset, size, _ in ENTRY.iter_unpack(picked[0]):
        text = properties_of(found[1][offset - found[2] : offset - found[2] + size])
        assert expression.matches(lambda name, text=text: find_property(text, name))  # type: ignore[misc]


def refuses_nonsense_about_a_pick(random: Random) -> None:
    """Spoil one argument: the compiled one raises TypeError, or it made no difference."""
    steps: Any = compiled.steps
    found = recorded(random, spoilt=False)
    expression = random.choice(_EXPRESSIONS)
    names = tuple((name, name.encode()) for name in expression.names)
    calls: tuple[tuple[Any, list[Any]], ...] = (
        (steps.pick_all, [found, 5, 1000]),
        (steps.pick_by_tags, [found, 5, 1000, b"\0\0\0\0"]),
        (steps.pick_by_properties, [found, 5, 1000, names, expression.condition]),
    )
    for call, arguments in calls:
        which = random.randrange(len(arguments))
        spoilt = random.choice(_NONSENSE)
        if isinstance(arguments[which], tuple) and random.random() < 0.7:
            parts: list[Any] = list(arguments[which])
            parts[random.randrange(len(parts))] = random.choice((spoilt, (spoilt, b"x"), ("x", spoilt), ("x",)))
            arguments[which] = tuple(parts) * random.choice((1, 1, 20))
        elif random.random() < 0.1:
            del arguments[which]
        else:
            arguments[which] = spoilt
        try:
            made = call(*arguments)
        except TypeError:
            continue
        assert made is None or (type(made[0]) is bytes and type(made[1]) is type(made[2]) is int)
