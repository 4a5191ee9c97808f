"""What must hold between `encode_pull` and its twins in Python, for one random input each."""

from __future__ import annotations

from random import Random
from typing import Any

from downrange import compiled
from downrange.broker.pull_reply import encode_parts
from downrange.protocol.bodies.pull_frames import PullReply
from downrange.store.queue.backlog import Backlog
from downrange.store.queue.consume_queue import ENTRY

REPLY = PullReply(0, "FOUND")
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
    if spoilt:
        entry = random.choice(entries)
        match random.randrange(5):
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
            case _:
                random.shuffle(entries)
    return b"".join(ENTRY.pack(*entry) for entry in entries), log, start, readable


def bytes_of(found: Backlog) -> int:
    return sum(size for _, size, _ in ENTRY.iter_unpack(found[0]))


def same_pull_reply(random: Random) -> None:
    spoilt = random.random() < 0.6
    found = backlog(random, spoilt=spoilt)
    kind = random.randrange(2)
    opaque = random.choice((0, 7, -1, 2**31 - 1, -(2**31)))
    first, second, third, fourth = (random.choice((0, 9, 10, random.getrandbits(62), -1, -(2**63))) for _ in range(4))
    byte_count = max(0, bytes_of(found)) + (random.choice((0, 0, 1)) if spoilt else 0)
    arguments = REPLY.pieces[kind], kind, opaque, (first, second, third, fourth), found, byte_count
    framed = compiled.steps.encode_pull(*arguments)
    if framed is None:
        assert spoilt or byte_count > 64 * 1024, "what is usual is for the compiled step"
        return
    assert framed == b"".join(encode_parts(*arguments))


def refuses_nonsense_about_a_pull(random: Random) -> None:
    """Spoil one argument: the compiled step raises TypeError, or it made no difference."""
    kind = random.randrange(2)
    found = backlog(random, spoilt=False)
    arguments: list[Any] = [REPLY.pieces[kind], kind, 7, (0, 1, 2, 3), found, bytes_of(found)]
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
    try:
        made = steps.encode_pull(*arguments)
    except TypeError:
        made = None
    assert made is None or type(made) is bytes
    large = tuple(b"x" * random.choice((1, 300, 1000)) for _ in range(7 if kind else 6))
    try:
        made = steps.encode_pull(large, kind, 7, (0, 1, 2, 3), found, bytes_of(found))
    except TypeError:
        made = None
        assert sum(map(len, large)) > 1024 - 160
    assert made is None or sum(map(len, large)) < 1024
