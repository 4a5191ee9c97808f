"""A ring buffer of send requests of one length, of which any number can be sent with one slice and one write.

A frame is encoded once, by the ordinary codec, with marks where frames differ; it is repeated, and the marks are
filled in column by column: a column (one byte of every frame) is one strided assignment. When a part of the ring is
used again, its frames get the next generation number and the time, so that no two messages of a run have the same
unique key, key or body.

Signed frames are made once and not renewed, since each has a signature of its own: their messages come again in every
round of the ring.

With several topics each frame goes to a random one, and to a random queue of it; no queue is left out.
"""

from __future__ import annotations

import itertools
import random
import re
import time
from typing import Final

from downrange.load.outstanding import FIRST_OPAQUE
from downrange.load.plans import TOPIC_DIGITS, SendPlan
from downrange.protocol.bodies.fields import encode_fields
from downrange.protocol.bodies.send import BatchEntry, SendMessageRequest, encode_batch
from downrange.protocol.codes import RequestCode, SerializeType
from downrange.protocol.command import Command
from downrange.protocol.framing import MAX_FRAME, FrameDecoder, encode
from downrange.protocol.signing import Signer

_GENERATION: Final = b"@@@@"
_NUMBER: Final = b"######"
_NUMBER_FORMAT: Final = b"%06X"
NUMBER_WIDTH: Final = len(_GENERATION + _NUMBER)
_TOPIC: Final = b"^" * TOPIC_DIGITS
_TIME: Final = 1_111_111_111_111  # as many digits as the milliseconds of this century have
_LEAST_FRAMES: Final = 1024
_MOST_FRAMES: Final = 16_384
_WANTED_BYTES: Final = 4 << 20  # a ring that fits the processor's cache is sent faster
_PARTS: Final = 4


class SendFrames:
    """The ring of frames.

    Holds always: the last three quarters of the ring that were taken are not changed. So with at most
    `most_outstanding` frames under way, bytes that a socket still has to write do not change.
    """

    def __init__(
        self,
        plan: SendPlan,
        topic: str,
        queues: int,
        broker_name: str = "",
        topics: int = 1,
        signer: Signer | None = None,
    ) -> None:
        template = _template(plan, topic if topics == 1 else f"{topic}-{_TOPIC.decode()}", broker_name)
        self.frame_size = len(template)
        wanted = max(_LEAST_FRAMES, min(_MOST_FRAMES, _WANTED_BYTES // self.frame_size), plan.ring)
        if topics > 1:
            wanted = max(wanted, 2 * topics * queues)
        self._part = -(-max(wanted, plan.connections * plan.outstanding * _PARTS) // _PARTS)
        self.count = self._part * _PARTS
        self.most_outstanding = self._part
        self._buffer = bytearray(template * self.count)
        self._view = memoryview(self._buffer)
        self._next = 0
        self._renew_at = 0
        self._generations = itertools.count(1)
        self._generation_at = [found.start() for found in re.finditer(re.escape(_GENERATION), template)]
        self._time_at = template.index(b"%d" % _TIME)
        self._stamps = [(_GENERATION, b"%d" % _TIME)] * _PARTS  # generation and time of each part
        self._numbers = [_NUMBER_FORMAT % number for number in range(self.count)]
        for found in re.finditer(re.escape(_NUMBER), template):
            self._fill(found.start(), self._numbers)
        places = _places(self.count, topics, queues)
        self._fill(_queue_at(template, plan.header), [b"%d" % queue_id for _, queue_id in places])
        if topics > 1:
            self._fill(template.index(_TOPIC), [b"%0*d" % (TOPIC_DIGITS, number) for number, _ in places])
        opaques = range(FIRST_OPAQUE, FIRST_OPAQUE + self.count)
        if plan.header is SerializeType.JSON:
            at = template.index(b'"opaque":%d' % FIRST_OPAQUE) + len(b'"opaque":')
            self._fill(at, [b"%d" % opaque for opaque in opaques])
        else:
            self._fill(8 + 5, [opaque.to_bytes(4, "big") for opaque in opaques])
        self._is_signed = signer is not None
        if signer is not None:
            self._sign(signer)

    def take(self, wanted: int) -> tuple[int, int]:
        """Take the next frames, at least one and at most `wanted`: `first` and `end` for `slice`."""
        first = self._next
        end = self._next = min(first + wanted, self.count)
        while self._renew_at < end:
            self._renew(self._renew_at // self._part)
            self._renew_at += self._part
        if end == self.count:
            self._next = self._renew_at = 0
        return first, end

    def slice(self, first: int, end: int) -> memoryview:
        return self._view[first * self.frame_size : end * self.frame_size]

    def body_numbers(self, first: int, end: int) -> list[bytes]:
        """The numbers at the beginning of the bodies of frames just taken, which are unique in this run."""
        numbers: list[bytes] = []
        while first < end:
            part = first // self._part
            stop = min(end, (part + 1) * self._part)
            generation, _ = self._stamps[part]
            numbers += [generation + number for number in self._numbers[first:stop]]
            first = stop
        return numbers

    def _renew(self, part: int) -> None:
        """Give one part of the ring the next generation number."""
        if self._is_signed:
            return
        old_generation, old_time = self._stamps[part]
        generation = b"%04X" % (next(self._generations) & 0xFFFF)
        now = b"%d" % (time.time_ns() // 1_000_000)
        for at in self._generation_at:
            self._put(part, at, old_generation, generation)
        self._put(part, self._time_at, old_time, now)
        self._stamps[part] = generation, now

    def _sign(self, signer: Signer) -> None:
        commands = FrameDecoder(max_header=MAX_FRAME).feed(bytes(self._buffer))
        frames = [encode(signer.sign(command)) for command in commands]
        self.frame_size = len(frames[0])
        assert all(len(frame) == self.frame_size for frame in frames)
        self._buffer = bytearray().join(frames)
        self._view = memoryview(self._buffer)

    def _put(self, part: int, at: int, old: bytes, new: bytes) -> None:
        first = part * self._part * self.frame_size
        end = first + self._part * self.frame_size
        for place, (before, after) in enumerate(zip(old, new, strict=True), at):
            if before != after:
                self._buffer[first + place : end : self.frame_size] = bytes([after]) * self._part

    def _fill(self, at: int, texts: list[bytes]) -> None:
        """Put a text into each frame; all texts have one length."""
        width = len(texts[0])
        joined = b"".join(texts)
        for place in range(width):
            self._buffer[at + place :: self.frame_size] = joined[place::width]


def _template(plan: SendPlan, topic: str, broker_name: str) -> bytes:
    random_bytes = random.Random(plan.size)  # noqa: S311  a body, not a secret
    run = f"{random.getrandbits(64):016X}"
    number = (_GENERATION + _NUMBER).decode()
    # The messages of a batch have one number; their place in the batch makes them unique.
    entries = []
    for place in range(plan.batch):
        unique = f"{run}{place:06X}{number}"
        properties = f"UNIQ_KEY\x01{unique}\x02" + (f"KEYS\x01{unique[8:]}\x02" if plan.has_keys else "")
        filling = random_bytes.randbytes(plan.size - NUMBER_WIDTH).replace(b"@", b"a").replace(b"#", b"b")
        tag = plan.tags[place % len(plan.tags)]
        entries.append(BatchEntry(0, number.encode() + filling, f"{properties}WAIT\x01true\x02TAGS\x01{tag}\x02"))
    is_batch = plan.batch > 1
    header = SendMessageRequest(
        producer_group="downrange-bench",
        topic=topic,
        queue_id=0,
        born_timestamp=_TIME,
        properties="" if is_batch else entries[0].properties,
        batch=is_batch,
        bname=broker_name or None,
    )
    return encode(
        Command(
            code=RequestCode.SEND_BATCH_MESSAGE if is_batch else RequestCode.SEND_MESSAGE_V2,
            opaque=FIRST_OPAQUE,
            raw_ext=encode_fields(header),
            body=encode_batch(entries) if is_batch else entries[0].body,
            serialize_type=int(plan.header),
        )
    )


def _places(count: int, topics: int, queues: int) -> list[tuple[int, int]]:
    """Topic and queue numbers for all frames: the queues of a single topic in turn; of many topics, random ones."""
    every = [(number, queue_id) for number in range(1, topics + 1) for queue_id in range(queues)]
    if topics == 1:
        return [every[number % queues] for number in range(count)]
    chance = random.Random(count)  # noqa: S311  the same each time, so that runs can be compared
    places = every + [chance.choice(every) for _ in range(count - len(every))]
    chance.shuffle(places)
    return places


def _queue_at(template: bytes, header: SerializeType) -> int:
    mark = b'"e":"0"' if header is SerializeType.JSON else b"\0\1e\0\0\0\x010"
    return template.index(mark) + mark.index(b"0")
