"""Cutting frames, plain runs and replies to sends: one input for both ways each, and an assertion that shows it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from random import Random
from typing import Any

from downrange.broker.handlers.plain_sends import plain_run
from downrange.protocol.bodies.plain_send import SendReply, Sent
from downrange.store.run import PlainMessage, Run

from downrange import compiled
from downrange.protocol.bodies.send import SendMessageRequest, decode_batch, decode_send_v1
from downrange.protocol.codes import RequestCode
from downrange.protocol.framing import Frame, FrameDecoder, decode_frame
from downrange.store.new_message import join_properties
from downrange.store.queue.queue_tails import ROW
from tests.support import compiled_cases as cases

CLUSTER = "CLUSTER\x01DefaultCl\u00fcster"
FITS, BATCH_FITS = 700, 3000
BATCH, V1 = int(RequestCode.SEND_BATCH_MESSAGE), int(RequestCode.SEND_MESSAGE)


class _Queue:
    """All that a plain send wants to know of a queue."""

    is_special = False


# As `Topics.plain`, `ConsumeQueues` and `Destinations`: neither retry topics nor those of several tags.
_TOPICS: dict[str, int] = {}
_STATES: dict[tuple[str, int], Any] = {}
_BY_ROW: list[Any] = []
_DESTINATIONS: dict[str, bytes] = {}


def know_topic(topic: str, queue_ids: Sequence[int] = range(16), write_queues: int = 16) -> None:
    """Take sends to this topic, too."""
    rows = [-1] * (max(queue_ids) + 1)
    for queue_id in queue_ids:
        _STATES[topic, queue_id] = _Queue()
        rows[queue_id] = len(_BY_ROW) * ROW
        _BY_ROW.append(_STATES[topic, queue_id])
    _TOPICS[topic] = write_queues
    _DESTINATIONS[topic] = cases.packed(topic, rows[:write_queues])


for _topic, _write_queues in (("TopicA", 16), ("a", 1), ("T\u00f6pic", 2), ('quo"te', 4)):
    know_topic(_topic, (0, 1, 10), _write_queues)
_TOPICS["NoQueues"] = 4
_COMPILED: tuple[Any, ...] = (
    compiled.steps and compiled.steps.TopicTable(),
    _DESTINATIONS.get,
    _BY_ROW,
    FITS,
    BATCH_FITS,
    CLUSTER.encode(),
)


def parts(run: Run) -> tuple[int, list[PlainMessage], list[Sent]]:
    """All that a run is made of."""
    return run.code, run.messages, run.sends


def in_python(frame: Frame) -> Run | None:
    """What must come of one frame: by the twin for single messages with V2 names, by what the handlers do otherwise."""
    command = decode_frame(frame)
    header = decode_send_v1(command.ext_fields) if command.code == V1 else command.header(SendMessageRequest)
    if command.code != BATCH and not header.batch:
        if command.code == V1:
            (frame,) = FrameDecoder().frames(cases.sent_as(command, header, RequestCode.SEND_MESSAGE_V2))
        run = plain_run([frame], 0, _TOPICS, _STATES, FITS, CLUSTER)
        return None if run is None else Run(run.messages, run.sends, command.code)
    state = _STATES[header.topic, header.queue_id]
    shared = "\x02".join(text for text in (CLUSTER, header.properties) if text).encode()
    messages: list[PlainMessage] = []
    for flag, body, own in decode_batch(command.body_bytes):
        properties = join_properties(own.encode(), shared)
        messages.append(
            (
                state, body, properties, properties.decode(), header.born_timestamp, flag, header.sys_flag,
                header.reconsume_times,
            )
        )  # fmt: skip
    sent = (command.serialize_type, command.opaque, command.flag, header.queue_id, len(messages))
    return Run(messages, [sent], command.code)


def same_run(frame: Frame) -> bool:
    """Whether the twin took it at all."""
    run = compiled.steps.plain_run([frame], 0, *_COMPILED)
    if run is None:
        return False
    expected = in_python(frame)
    assert expected is not None
    assert parts(run) == parts(expected), frame
    assert [type(value) for value in run[0][1:]] == [type(value) for value in expected[0][1:]]
    assert (len(run), run.requests, run.states) == (len(expected), expected.requests, expected.states)
    return True


def same_runs(random: Random) -> None:
    """Several frames: those up to the first that is not plain or has another request code make one run."""
    frames = [cases.send(random) for _ in range(random.randrange(1, 8))]
    at = random.randrange(len(frames))
    expected: list[Run] = []
    for frame in frames[at:]:
        one = compiled.steps.plain_run([frame], 0, *_COMPILED)
        if one is None or (expected and expected[0].code != one.code):
            break
        expected.append(one)
    run = compiled.steps.plain_run(frames, at, *_COMPILED)
    if not expected:
        assert run is None
        return
    assert run is not None
    assert run.code == expected[0].code
    assert run.messages == [message for one in expected for message in one.messages]
    assert run.sends == [sent for one in expected for sent in one.sends]


def same_frames(random: Random) -> None:
    """A chunk, whole or damaged or cut off, gives the same frames, and the same rest is kept."""
    chunk = bytearray(b"".join(cases.wire(random) for _ in range(random.randrange(4))))
    if chunk and random.random() < 0.5:
        chunk[random.randrange(min(12, len(chunk)))] = random.choice((0, 1, 2, 127, 128, 255))
    data = bytes(chunk[: random.randrange(len(chunk) + 1)]) if random.random() < 0.5 else bytes(chunk)
    compiled_way, python = FrameDecoder(20_000, 5000), FrameDecoder(20_000, 5000)
    assert compiled_way.frames(data) == python._frames_in_python(data)
    for name in ("_buffer", "_needed", "buffered"):
        assert getattr(compiled_way, name) == getattr(python, name)
    assert str(compiled_way.error) == str(python.error)


def same_replies(random: Random) -> None:
    reply = SendReply(
        random.choice((0, 10, 14)),
        random.choice(cases.HOSTS),
        random.choice(("DefaultRegion", "100%", "", 'quo"te')),
        random.random() < 0.5,
    )
    sends: list[Sent] = []
    for _ in range(random.randrange(5)):
        opaque, queue_id = random.choice((0, 5, -1, 2**31 - 1, -(2**31))), random.choice((0, 9, 10, 2**31 - 1))
        sends.append((random.randrange(2), opaque, random.choice((0, 0, 2)), queue_id, random.choice((1, 1, 2, 40))))
    numbers = (0, 9, 10, random.getrandbits(62), 2**63 - 2**31)
    count = sum(sent[4] for sent in sends) + random.randrange(2)
    run = compiled.steps.run_of([cases.message(random, _State()) for _ in range(count)], sends, 310)  # type: ignore[arg-type]
    assert run is not None
    if count == 0:
        assert compiled.steps.encode_answers(reply._json_pieces, reply._binary_pieces, reply._id_size, run) is None
        return
    run.places = [(random.choice(numbers), 200, random.choice(numbers)) for _ in range(count)]
    encoded = compiled.steps.encode_answers(reply._json_pieces, reply._binary_pieces, reply._id_size, run)
    assert encoded is not None
    assert encoded == reply.encode_in_python(run)


class _State:
    """All that a run wants to know of a queue."""

    row, queue_id, topic_field = 0, 1, b"\6TopicA"


_NONSENSE: tuple[Any, ...] = (None, "x", b"x", 2**63, -(2**63), -1, 2**31, 1.5, [], (), {}, object())


def refuses_nonsense_about_sends(random: Random) -> None:
    """Arguments and elements of the wrong kind are refused, or made no difference."""
    steps: Any = compiled.steps
    spoilt = random.choice(_NONSENSE)
    frames = [
        cases.send(random),
        random.choice((spoilt, (0, b""), (spoilt, b"", b""), (0, spoilt, b""), (0, b"", spoilt))),
    ]
    destinations = {
        topic: random.choice((packed, packed[: random.randrange(12)], spoilt))
        for topic, packed in _DESTINATIONS.items()
    }
    steps.plain_run(frames, 0, steps.TopicTable(), destinations.get, *_COMPILED[2:])
    arguments: list[Any] = [frames, 0, *_COMPILED]
    arguments[random.randrange(len(arguments))] = spoilt
    steps.plain_run(*arguments)
    pieces = (b"x" * 20,) * random.choice((4, 5, 6)), random.choice(((b"x" * 24,) * 6, (b"x",) * 6, spoilt))
    messages = [cases.message(random, _State()) for _ in range(3)]  # type: ignore[arg-type]
    sends = [(0, 1, 0, 1, random.choice((0, 1, 2, 3, 2**16 + 1))), random.choice((spoilt, (1, spoilt, 0, 1, 1)))]
    steps.run_of(messages, sends, 310)
    run = steps.run_of(messages, [(0, 1, 0, 1, 2)], 310)
    with suppress(TypeError):
        run.places = [(1, 2, 3), (3, 2, 4), random.choice((spoilt, (1, 2, spoilt), (spoilt, 2, 3), (5, 2, 3)))]
    steps.encode_answers(*pieces, random.choice((16, 40, 64, spoilt)), random.choice((run, spoilt)))
    steps.cut_frames(
        random.choice((b"\0" * 30, spoilt)), random.choice((2**24, spoilt)), random.choice((2**16, spoilt))
    )
