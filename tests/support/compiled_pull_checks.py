"""What must hold between `encode_pull` and its twins in Python, for one random input each."""

from __future__ import annotations

from random import Random
from typing import Any

from downrange import compiled
from downrange.protocol.bodies.plain_pull import PullReplyHead
from downrange.store.queue.backlog import Backlog, records_of
from downrange.store.queue.consume_queue import ENTRY

_HEAD = PullReplyHead()
_NONSENSE: tuple[Any, ...] = (None, "x", b"x", bytes(20), bytes(21), 2**63, -(2**63), -1, 2**31, 1.5, [], (), object())
_ODD = (-1, 0, 1, 2**31 - 1, -(2**31), 2**62, -(2**63), 2**63 - 1)


def backlog(random: Random, *, spoilt: bool) -> Backlog:
    """Records of one file, next to each other or not; spoilt: with something wrong in an entry or a limit."""
    start = random.choice((0, 1 << 30, 5 << 40))
    at = random.choice((0, 7, 500))
    gaps = random.choice(((0,), (0, 0, 0, 1, 300)))
    entries: list[list[int]] = []
    for _ in range(random.choice((1, 2, 32, 40))):
        at += random.choice(gaps)
        size = random.choice((1, 91, 250, 250, 3000))
        entries.append([start + at, size, random.choice((0, -1, 2**63 - 1))])
        at += size
    readable = at + random.choice((0, 0, 1, 4096))
    log = memoryview(random.randbytes(readable + random.choice((0, 0, 50))))
    most_bytes = 256 * 1024
    if spoilt:
        entry = random.choice(entries)
        match random.randrange(7):
            case 0:
                entry[0] = random.choice((*_ODD, start - 1, start, start + readable, entry[0] - 1, entry[0] + 5))
            case 1:
                entry[1] = random.choice((*_ODD[:5], readable, readable + 1, entry[1] + 1))
            case 2:
                middle = entries[1:-1]
                random.shuffle(middle)
                entries[1:-1] = middle
            case 3:
                readable = random.randrange(readable + 1)
            case 4:
                random.shuffle(entries)
            case 5:
                most_bytes = random.choice((0, 1, 91, 250, 3000, 60_000))
            case _:
                log = log[: random.randrange(len(log) + 1)]
    return b"".join(ENTRY.pack(*entry) for entry in entries), log, start, readable, most_bytes


def same_pull_reply(random: Random) -> None:
    spoilt = random.random() < 0.6
    found = backlog(random, spoilt=spoilt)
    kind = random.randrange(2)
    opaque = random.choice((0, 7, -1, 2**31 - 1, -(2**31)))
    first, second, third, fourth = (random.choice((0, 9, 10, random.getrandbits(62), -1, -(2**63))) for _ in range(4))
    numbers = first, second, third, fourth
    framed = compiled.steps.encode_pull(_HEAD.pieces[kind], kind, opaque, numbers, found)
    expected = records_of(found)
    if framed is None:
        assert spoilt or expected is None or expected[2] > 64 * 1024, "what is usual is for the twin"
        return
    assert expected is not None
    pieces, count, byte_count = expected
    assert count * ENTRY.size == len(found[0])
    assert framed == (b"".join((_HEAD.encode(kind, opaque, numbers, byte_count), *pieces)), byte_count)


def refuses_nonsense_about_a_pull(random: Random) -> None:
    """Spoil one argument: the twin says no, or it made no difference."""
    kind = random.randrange(2)
    found = backlog(random, spoilt=False)
    arguments: list[Any] = [_HEAD.pieces[kind], kind, 7, (0, 1, 2, 3), found]
    spoilt = random.choice(_NONSENSE)
    which = random.randrange(len(arguments))
    if isinstance(arguments[which], tuple) and random.random() < 0.8:
        parts: list[Any] = list(arguments[which])
        match random.randrange(3):
            case 0:
                parts[random.randrange(len(parts))] = spoilt
            case 1:
                del parts[random.randrange(len(parts))]
            case _:
                parts.append(spoilt)
        arguments[which] = tuple(parts)
    elif random.random() < 0.1:
        del arguments[which]
    else:
        arguments[which] = spoilt
    steps: Any = compiled.steps
    made = steps.encode_pull(*arguments)
    assert made is None or (type(made[0]) is bytes and type(made[1]) is int)
    large = tuple(b"x" * random.choice((1, 300, 1000)) for _ in range(7 if kind else 6))
    made = steps.encode_pull(large, kind, 7, (0, 1, 2, 3), found)
    assert made is None or sum(map(len, large)) < 1024
