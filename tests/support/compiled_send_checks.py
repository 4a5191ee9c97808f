"""Cutting frames, plain runs and replies to sends: one input for both ways each, and an assertion that shows it."""

from __future__ import annotations

from random import Random
from typing import Any

from downrange import compiled
from downrange.broker.handlers.plain_sends import plain_run
from downrange.broker.message_writer import PlainRun
from downrange.protocol.bodies.plain_send import SendReply, Sent
from downrange.protocol.bodies.send import SendMessageRequest, decode_batch, decode_send_v1
from downrange.protocol.codes import RequestCode
from downrange.protocol.framing import Frame, FrameDecoder, decode_frame
from downrange.store.commit_log import join_properties
from tests.support import compiled_cases as cases

CLUSTER = "CLUSTER\x01DefaultCl\u00fcster"
FITS, BATCH_FITS = 700, 3000
BATCH, V1 = int(RequestCode.SEND_BATCH_MESSAGE), int(RequestCode.SEND_MESSAGE)


class _Queue:
    """A queue is taken as it is: nobody wants to know anything of it."""


# As `Topics.plain` and `ConsumeQueues.plain`: neither retry topics nor those of several tags, and no special queues.
_TOPICS = {"TopicA": 16, "a": 1, "T\u00f6pic": 2, 'quo"te': 4, "NoQueues": 4}
_STATES: dict[str, Any] = {
    topic: tuple(_Queue() if queue_id in (0, 1, 10) else None for queue_id in range(11))
    for topic in _TOPICS
    if topic != "NoQueues"
}


def in_python(frame: Frame) -> PlainRun | None:
    """What must come of one frame: by the twin for single messages with V2 names, by what the handlers do otherwise."""
    command = decode_frame(frame)
    header = decode_send_v1(command.ext_fields) if command.code == V1 else command.header(SendMessageRequest)
    if command.code != BATCH and not header.batch:
        if command.code == V1:
            (frame,) = FrameDecoder().frames(cases.sent_as(command, header, RequestCode.SEND_MESSAGE_V2))
        run = plain_run([frame], 0, _TOPICS, _STATES, FITS, CLUSTER)
        return None if run is None else (command.code, *run[1:])
    state = _STATES[header.topic][header.queue_id]
    shared = "\x02".join(text for text in (CLUSTER, header.properties) if text).encode()
    messages = []
    for flag, body, own in decode_batch(command.body_bytes):
        properties = join_properties(own.encode(), shared)
        messages.append(
            (
                state, body, properties, properties.decode(), header.born_timestamp, flag, header.sys_flag,
                header.reconsume_times,
            )
        )  # fmt: skip
    sent = (command.serialize_type, command.opaque, command.flag, header.queue_id, len(messages))
    return command.code, header.topic, messages, [sent]


def know_topic(topic: str) -> None:
    """Take sends to this topic, too."""
    _TOPICS[topic] = 16
    _STATES[topic] = tuple(_Queue() for _ in range(16))


def same_run(frame: Frame) -> bool:
    """Whether the twin took it at all."""
    run = compiled.runs.plain_run([frame], 0, _TOPICS, _STATES, FITS, BATCH_FITS, CLUSTER.encode())
    if run is None:
        return False
    expected = in_python(frame)
    assert expected is not None
    assert run == expected, frame
    assert [type(value) for value in run[2][0][1:]] == [type(value) for value in expected[2][0][1:]]
    return True


def same_runs(random: Random) -> None:
    """Several frames: those up to the first that is not plain or has another request code make one run."""
    frames = [cases.send(random) for _ in range(random.randrange(1, 8))]
    at = random.randrange(len(frames))
    arguments = (_TOPICS, _STATES, FITS, BATCH_FITS, CLUSTER.encode())
    expected: list[PlainRun] = []
    for frame in frames[at:]:
        one = compiled.runs.plain_run([frame], 0, *arguments)
        if one is None or (expected and expected[0][0] != one[0]):
            break
        expected.append(one)
    run = compiled.runs.plain_run(frames, at, *arguments)
    if not expected:
        assert run is None
        return
    assert run is not None
    assert run[0] == expected[0][0]
    topics = {one[1] for one in expected}
    assert run[1] in (None, *topics)
    assert run[1] is None or len(topics) == 1
    assert run[2:] == ([m for one in expected for m in one[2]], [sent for one in expected for sent in one[3]])


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
    numbers = (0, 9, 10, random.getrandbits(62), 2**63 - 1)
    places = [(random.choice(numbers), 200, random.choice(numbers)) for _ in range(sum(sent[4] for sent in sends))]
    encoded = compiled.runs.encode_answers(reply._json_pieces, reply._binary_pieces, reply._id_size, sends, places)
    assert encoded is not None
    assert encoded == reply.encode_in_python(sends, places)


_NONSENSE: tuple[Any, ...] = (None, "x", b"x", 2**63, -(2**63), -1, 2**31, 1.5, [], (), {}, object())


def refuses_nonsense_about_sends(random: Random) -> None:
    """Arguments and elements of the wrong kind are refused, or made no difference."""
    runs: Any = compiled.runs
    spoilt = random.choice(_NONSENSE)
    frames = [
        cases.send(random),
        random.choice((spoilt, (0, b""), (spoilt, b"", b""), (0, spoilt, b""), (0, b"", spoilt))),
    ]
    states = {key: random.choice((queue, spoilt)) for key, queue in _STATES.items()}
    topics = {name: random.choice((topic, spoilt)) for name, topic in _TOPICS.items()}
    runs.plain_run(frames, 0, topics, states, FITS, BATCH_FITS, CLUSTER.encode())
    arguments: list[Any] = [frames, 0, _TOPICS, _STATES, FITS, BATCH_FITS, CLUSTER.encode()]
    arguments[random.randrange(len(arguments))] = spoilt
    runs.plain_run(*arguments)
    pieces = (b"x" * 20,) * random.choice((4, 5, 6)), random.choice(((b"x" * 24,) * 6, (b"x",) * 6, spoilt))
    sends = [(0, 1, 0, 1, random.choice((0, 1, 2, 3, 2**16 + 1))), random.choice((spoilt, (1, spoilt, 0, 1, 1)))]
    places = [(1, 2, 3), random.choice((spoilt, (1, 2, spoilt), (spoilt, 2, 3), (1, 2, 3)))]
    runs.encode_answers(*pieces, random.choice((16, 40, 64, spoilt)), sends[: random.randrange(3)], places)
    runs.encode_answers(*pieces, 16, random.choice((sends, spoilt)), random.choice((places, spoilt)))
    runs.cut_frames(random.choice((b"\0" * 30, spoilt)), random.choice((2**24, spoilt)), random.choice((2**16, spoilt)))
