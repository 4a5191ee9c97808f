"""What must hold between the client's compiled functions and their twins in Python, for one random input each."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any, cast

from msgspec import structs

from downrange import compiled
from downrange.client.config import ProducerConfig
from downrange.client.consumer.messages import ReceivedMessage, read_in_python
from downrange.client.producer.outgoing import Outgoing, OutgoingRules, Target, make_batch, make_outgoing, make_send
from downrange.client.producer.request_reply import ReplyMessage
from downrange.client.producer.send_result import Expected, SendResult, SendStatus
from downrange.client.producer.stored_reply import ResultTypes, read_stored, result_of
from downrange.client.unique_id import IdMonth
from downrange.model.errors import MQError
from downrange.model.message import Message, MessageQueue, PhysicalOffset, QueueOffset, StoredMessage
from downrange.model.message_id import HostPort, pack_host
from downrange.model.record import CorruptRecord, encode_record
from downrange.protocol.bodies.send import SendMessageResponse
from downrange.protocol.bodies.send_template import LONGEST_FRAME, SendTemplate, encode_send
from downrange.protocol.codes import ResponseCode, SerializeType
from downrange.protocol.command import Command
from downrange.protocol.framing import MAX_FRAME, Frame, FrameDecoder, encode
from tests.support.golden import scenarios

TOPIC = "orders"
STEM = "7F00000110CD18B4AAC200000001"
TYPES: ResultTypes = (SendResult, SendStatus.SEND_OK, MessageQueue)
TEMPLATE = SendTemplate(310, "group", "a%b", "broker-a", default_topic="TBW102", default_topic_queue_nums=4)
_NONSENSE: tuple[Any, ...] = (None, "x", b"x", "é", 2**63, -1, 2**31, 1.5, [], {}, (), (1,), object(), Message)
_TEXTS = (None, "", "a", "TagA", "key one two", 'quote " and \\', "\t\n\x00\x1f\x7f", "x" * 500)
_ODD_TEXTS: tuple[Any, ...] = (
    "\x01",
    "a\x02b",
    "é",
    "\u4e2d\U0001f600",
    "\ud800",
    "x" * 8192,
    "x" * 33_000,
    7,
    b"x",
    True,
)
_MOST = 4096


class TextLike(str):
    """Text, but of a kind of its own."""


def is_odd(random: Random) -> bool:
    return random.random() < 0.05


def text(random: Random) -> Any:
    return random.choice(_ODD_TEXTS) if is_odd(random) else random.choice(_TEXTS)


def properties(random: Random) -> Any:
    if is_odd(random):
        return random.choice(
            (None, [], "x", {"KEYS": "x"}, {"": "x"}, {"x": ""}, {"x": 1}, {1: "x"}, {"UNIQ_KEY": "x"})
        )
    names = random.sample(("a", "Name", "with space", "_b", 'c"'), random.choice((0, 0, 0, 1, 2, 5)))
    return {name: text(random) or "v" for name in names}


def message(random: Random, topic: str = TOPIC) -> Message:
    made = Message(
        random.choice(("other", TextLike(topic))) if is_odd(random) else topic,
        random.randbytes(random.choice((1, 7, 128, 2000))),
        text(random),
        text(random),
        random.choice((0, 0, 1, -1, 2**31 - 1)),
        properties(random),
        sharding_key=random.choice((None, None, None, text(random))),
        wait_store_msg_ok=random.random() < 0.9,
    )
    if is_odd(random):
        made.body = cast(bytes, random.choice((b"", bytes(_MOST), bytes(_MOST + 1), bytearray(b"x"), "text", None)))
    if is_odd(random):
        made.delay_level = random.choice((1, 18, -1, 2**31, cast(int, None), True))
    if is_odd(random):
        made.deliver_at = random.choice((0, 5, -1, cast(int, "soon")))
    if is_odd(random):
        made.deliver_after = random.choice((0, 1.5, -1, cast(int, "soon")))
    if is_odd(random):
        made.flag = random.choice((2**31, -(2**63), 2**64, True, cast(int, None)))
    if is_odd(random):
        made.wait_store_msg_ok = random.choice((cast(bool, 1), cast(bool, None), False))
    if is_odd(random):
        return ReplyMessage(made.topic, made.body)
    if is_odd(random):
        del made.keys
    return made


def config(random: Random) -> ProducerConfig:
    return ProducerConfig(
        max_message_size=random.choice((_MOST, _MOST, 130, 100_000)),
        compress_over_bytes=random.choice((_MOST, _MOST, 129, 100_000)),
        namespace=random.choice(("", "", "tenant")),
    )


def is_usual(one: Message, rules: ProducerConfig) -> bool:
    """Whether the compiled function may not refuse it, although others may not either."""
    try:
        texts = [one.tags, one.keys, one.sharding_key, *one.properties, *one.properties.values()]
    except (AttributeError, TypeError):
        return False
    return (
        type(one) is Message
        and type(one.topic) is str
        and type(one.body) is bytes
        and 0 < len(one.body) <= min(rules.max_message_size, rules.compress_over_bytes - 1)
        and one.delay_level == 0
        and type(one.delay_level) is int
        and one.deliver_at is None
        and one.deliver_after is None
        and type(one.flag) is int
        and type(one.wait_store_msg_ok) is bool
        and all(each is None or (type(each) is str and each.isascii() and len(each) < 600) for each in texts)
    )


def in_python(step: Any) -> Any:
    """The Python function behind a step that is compiled as well."""
    return step.__wrapped__


def same_outgoing(random: Random) -> None:
    one, rules = message(random), config(random)
    number, now = random.getrandbits(40), random.getrandbits(41)
    arguments = one, "wire", STEM, number, now, OutgoingRules.of(rules)
    made = compiled.steps.make_outgoing(*arguments)
    try:
        expected = in_python(make_outgoing)(*arguments)
    except (MQError, AttributeError, TypeError, ValueError):
        assert made is None
        return
    if made is None:
        assert not is_usual(one, rules), one
    else:
        assert made == expected
        assert made.messages[0] is one


def same_send(random: Random) -> None:
    """A message and its frame are the same whether made in one step or in several."""
    one, rules = message(random), config(random)
    number, now, opaque = random.getrandbits(40), random.getrandbits(41), random.getrandbits(31)
    start = max(0, now - random.choice((0, 1, 2**31 - 1)))
    end = now + random.choice((0, 1, 1, 1))
    queue = MessageQueue("wire", "broker-a", random.getrandbits(31))
    longest = random.choice((LONGEST_FRAME, LONGEST_FRAME, 400))
    rest = (
        now * 1_000_000 + random.randrange(1_000_000),
        OutgoingRules.of(rules)._replace(longest_frame=longest),
        Target(queue, "host:1", TEMPLATE.pieces),
        opaque,
    )

    def month() -> IdMonth:
        return IdMonth(STEM[:20], start, end, count(number).__next__, lambda now: f"{STEM[:20]}{now - start:08X}")

    made = compiled.steps.make_send(one, "wire", month(), *rest)
    try:
        expected = in_python(make_send)(one, "wire", month(), *rest)
    except (MQError, AttributeError, TypeError, ValueError):
        assert made is None
        return
    if made is not None:
        assert made == expected
        assert len(made[1]) <= 4 + longest
        assert now < end
    elif is_usual(one, rules) and now < end and -(2**31) <= one.flag < 2**31:
        assert len(expected[1]) > 404, "only a frame longer than allowed may be refused"


def same_batch(random: Random) -> None:
    rules = replace(config(random), max_message_size=random.choice((_MOST, 100_000)))
    members = tuple(message(random) for _ in range(random.choice((0, 1, 1, 2, 3, 5))))
    if random.random() < 0.9:
        waits = random.random() < 0.5
        for one in members:
            one.wait_store_msg_ok = waits
    first, now = random.getrandbits(30), random.getrandbits(41)
    topic = members[0].topic if members else TOPIC

    def arguments() -> tuple[Any, ...]:
        return members, topic, "wire", STEM, count(first).__next__, now, OutgoingRules.of(rules)

    made = compiled.steps.make_batch(*arguments())
    try:
        expected = in_python(make_batch)(*arguments())
    except Exception:  # errors of the Python function
        assert made is None
        return
    if made is None:
        assert len(expected) > 1 or not all(is_usual(one, rules) for one in members)
    else:
        assert list(made) == expected


def same_frame(random: Random) -> None:
    numbers = [random.choice((0, 7, -1, 2**31 - 1, -(2**31), random.getrandbits(62))) for _ in range(4)]
    opaque = random.choice((0, 1, 2**31 - 1, 2**31, -1))
    said = "".join(
        random.choice(("UNIQ_KEY", "\x01", "\x02", '"', "\\", "\x1f", "\n", "é", "\U0001f600", "x" * 50))
        for _ in range(8)
    )
    if is_odd(random):
        said = random.choice(("", "\ud800", "x" * 3000, "\x01" * 3000, TextLike("x")))
    body = random.randbytes(random.choice((0, 1, 128, 5000)))
    most = random.choice((MAX_FRAME - 4, MAX_FRAME - 4, MAX_FRAME - 4, 400))
    arguments: Any = (TEMPLATE.pieces, opaque, *numbers, said, body, most)
    made = compiled.steps.encode_send(*arguments)
    if made is None:
        is_short = type(said) is str and "\ud800" not in said and len(said) < 2000
        assert most == 400 or opaque == 2**31 or not is_short
    else:
        assert made == in_python(encode_send)(*arguments)
        assert len(made) <= 4 + most


# --- replies ----------------------------------------------------------------------------------------------------------


class Waiting:
    """Who waits for a reply."""

    def __init__(self, is_done: bool) -> None:
        self._is_done = is_done
        self.told: list[object] = []

    def done(self) -> bool:
        return self._is_done

    def set_result(self, reply: object, /) -> None:
        self.told.append(reply)

    def set_exception(self, error: BaseException, /) -> None:
        raise AssertionError(error)


class Asking:
    """A connection, as far as `take_stored_replies` needs it."""

    def __init__(self, expected: list[Expected | None], done: int) -> None:
        self.waiting = [Waiting(number == done) for number in range(len(expected))]
        self.requests: dict[int, Any] = {
            number: (self.waiting[number], 0.0, 310, 3.0, each) for number, each in enumerate(expected)
        }


def reply(random: Random, opaque: int) -> Frame:
    stored = SendMessageResponse(
        msg_id=random.choice(("0A00000100002A9F00000000000003E8", "", "a,b")),
        queue_id=random.choice((0, 1, 7, 2**31 - 1)),
        queue_offset=random.choice((0, 9, 2**40, 2**63 - 1)),
        msg_region=random.choice((None, "DefaultRegion", "é")) if is_odd(random) else "DefaultRegion",
        trace_on=random.choice((None, True, False)),
        transaction_id=random.choice((None, None, "T")),
    )
    code = ResponseCode.FLUSH_DISK_TIMEOUT if is_odd(random) else ResponseCode.SUCCESS
    command = Command(310, opaque, serialize_type=int(SerializeType.ROCKETMQ if is_odd(random) else SerializeType.JSON))
    (frame,) = FrameDecoder().frames(encode(command.reply(code, "why" if is_odd(random) else None, header=stored)))
    return frame


def captured_replies() -> list[Frame]:
    """What genuine brokers answered to sends, as if the request had been number 4."""
    frames = (frame for rows in scenarios().values() for row in rows for frame in FrameDecoder().frames(row.frame))
    return [
        (kind, re.sub(rb'"opaque":[0-9]+', b'"opaque":4', header), body)
        for kind, header, body in frames
        if b'"queueOffset"' in header
    ]


def damaged(random: Random, frame: Frame) -> Frame:
    kind, header, body = frame
    spoilt = bytearray(header)
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(spoilt))
        match random.randrange(3):
            case 0:
                del spoilt[at]
            case 1:
                spoilt.insert(at, random.choice(b'{}[]":,0123456789-tfn\\\x00\xff '))
            case _:
                spoilt[at] = random.choice(b'{}[]":,0123456789-tfn\\\x00\xff ')
    return kind, bytes(spoilt), body


def take_one_by_one(frames: list[Frame], at: int, asking: Asking) -> int:
    """What `take_stored_replies` does in Python."""
    while at < len(frames):
        reply = read_stored(frames[at])
        asked = None if reply is None else asking.requests.get(reply.opaque)
        if reply is None or asked is None or asked[4] is None:
            break
        del asking.requests[reply.opaque]
        if not asked[0].done():
            asked[0].set_result(result_of(reply.stored, SendStatus.SEND_OK, asked[4]))
        at += 1
    return at


def same_replies_taken(random: Random, captured: list[Frame]) -> None:
    """All replies of a chunk go to the same waiters with the same results, up to the same frame."""
    queue = MessageQueue(random.choice((TOPIC, "tenant%orders")), "broker-a", 1)
    expected: list[Expected | None] = [("ID", TOPIC, queue) for _ in range(6)]
    if is_odd(random):
        expected[random.randrange(6)] = None
    frames = [reply(random, random.choice((number, number, number, 9))) for number in range(4)]
    if captured:
        frames.insert(random.randrange(4), random.choice(captured))
    if random.random() < 0.5:
        place = random.randrange(len(frames))
        frames[place] = damaged(random, frames[place])
    done = random.randrange(12)
    ours, theirs = Asking(expected, done), Asking(expected, done)
    at = random.choice((0, 0, 1))
    taken = compiled.steps.take_stored_replies(frames, at, ours.requests, TYPES)
    until = take_one_by_one(frames[:taken], at, theirs)
    assert until == taken, "what the compiled function takes, the other takes"
    assert ours.requests.keys() == theirs.requests.keys()
    assert [each.told for each in ours.waiting] == [each.told for each in theirs.waiting]


def usual_chunk(random: Random) -> tuple[list[Frame], Asking]:
    queue = MessageQueue(TOPIC, "broker-a", 1)
    stored = SendMessageResponse(
        msg_id="ID", queue_id=1, queue_offset=random.getrandbits(60), msg_region="R", trace_on=True
    )
    frames = [frame for n in range(3) for frame in FrameDecoder().frames(encode(Command(310, n).reply(header=stored)))]
    return frames, Asking([("ID", TOPIC, queue)] * 3, -1)


# --- what was pulled --------------------------------------------------------------------------------------------------


def record(random: Random) -> bytes:
    hosts = ("10.0.0.1", "192.168.1.7", "::1") if is_odd(random) else ("10.0.0.1", "192.168.1.7")
    said = random.choice(("", "KEYS\x01a", "é\x01\U0001f600\x02", "TAGS\x01t\x02" * 50))
    stored = StoredMessage(
        topic=random.choice(("orders", "é", "x" * 200)),
        queue_id=random.getrandbits(31),
        queue_offset=QueueOffset(random.getrandbits(62)),
        physical_offset=PhysicalOffset(random.getrandbits(62)),
        body=random.randbytes(random.choice((0, 1, 128, 3000))),
        properties_text=said,
        sys_flag=random.choice((0, 1, 12)),
        flag=random.choice((0, -1, 2**31 - 1)),
        born_timestamp=random.getrandbits(41),
        born_host=HostPort(random.choice(hosts), random.getrandbits(16)),
        store_timestamp=random.getrandbits(41),
        store_host=HostPort(random.choice(hosts), 10911),
        reconsume_times=random.choice((0, 16)),
        prepared_transaction_offset=random.getrandbits(40),
        body_crc=0,
        store_size=0,
    )
    return encode_record(stored, pack_host(*stored.born_host), pack_host(*stored.store_host))


def same_messages(random: Random) -> None:
    """Whatever was pulled is read alike, or left to the twin."""
    data = b"".join(record(random) for _ in range(random.choice((0, 1, 2, 5))))
    is_damaged = random.random() < 0.6
    if is_damaged and data:
        spoilt = bytearray(data)
        for _ in range(random.choice((1, 1, 3))):
            spoilt[random.randrange(len(spoilt))] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.getrandbits(8)))
        data = bytes(spoilt[: random.choice((len(spoilt), len(spoilt), random.randrange(len(spoilt) + 1)))])
    queue = MessageQueue(TOPIC, "broker-a", 1)
    read = compiled.steps.read_usual(data, queue, TOPIC, 10**9, 10**10, ReceivedMessage)
    try:
        expected = read_in_python(data, queue, 10**9, 10**10, 0, "")
    except CorruptRecord:
        assert read is None
        return
    if read is None:
        has_v6 = any(len(host) != 8 for each in expected for host in (each.packed_born_host, each.packed_store_host))
        assert has_v6 or is_damaged, "what is usual is for the compiled function"
    else:
        assert list(map(structs.astuple, read)) == list(map(structs.astuple, expected))


# --- nonsense ---------------------------------------------------------------------------------------------------------


def refuses_nonsense_about_the_client(random: Random) -> None:
    """Spoil one argument: the compiled function says no, or it made no difference."""
    steps: Any = compiled.steps
    rules = OutgoingRules.of(ProducerConfig(namespace="tenant"))
    one = Message(TOPIC, b"body", "tag", "key", properties={"a": "b"})
    frames, asking = usual_chunk(random)
    month = IdMonth(STEM[:20], 0, 2**50, count().__next__, str)
    target = Target(MessageQueue(TOPIC, "broker-a", 1), "host:1", TEMPLATE.pieces)
    calls: list[tuple[Any, list[Any]]] = [
        (steps.make_outgoing, [one, TOPIC, STEM, 7, 8, rules]),
        (steps.make_send, [one, TOPIC, month, 10**18, rules, target, 7]),
        (steps.make_batch, [(one, one), TOPIC, TOPIC, STEM, count().__next__, 8, rules]),
        (steps.encode_send, [TEMPLATE.pieces, 1, 2, 3, 4, 5, "text", b"body", 1000]),
        (steps.take_stored_replies, [frames, 0, asking.requests, TYPES]),
        (steps.read_usual, [record(random), TYPES, TOPIC, 1, 2, ReceivedMessage]),
    ]
    function, arguments = random.choice(calls)
    for _ in range(random.choice((1, 1, 2))):
        arguments[random.randrange(len(arguments))] = _spoilt(random, random.choice(arguments))
    if random.random() < 0.1:
        arguments.pop()
    try:
        made = function(*arguments)
    except (TypeError, AttributeError, ValueError):  # of what was to be made, or to be told, and is nonsense
        return
    # Message stands among the rules, and may be taken for what is to be made.
    assert made is None or isinstance(made, (bytes, int, Outgoing, list, tuple, Message))


def _spoilt(random: Random, argument: Any) -> Any:
    nonsense = random.choice(_NONSENSE)
    if isinstance(argument, (tuple, list)) and argument and random.random() < 0.8:
        parts = list(argument)
        parts[random.randrange(len(parts))] = (
            _spoilt(random, random.choice(parts)) if random.random() < 0.5 else nonsense
        )
        return type(argument)(parts) if type(argument) in (tuple, list) else tuple(parts)
    if isinstance(argument, dict) and argument and random.random() < 0.8:
        return {key: _spoilt(random, value) for key, value in argument.items()}
    return nonsense
