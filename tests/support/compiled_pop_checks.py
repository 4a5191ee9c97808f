"""What must hold between the compiled steps of POP and their twins in Python, for one random input each."""

from __future__ import annotations

import re
from array import array
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec

from downrange import compiled
from downrange.broker.pop import leases
from downrange.broker.pop.leases import Lease, LeaseKey
from downrange.broker.pop.pop_reply import offset_infos
from downrange.broker.pop.popped import Popped, PoppedQueue, PopRequest
from downrange.broker.pop.records import ReviveRecords
from downrange.model.errors import MQError
from downrange.model.message_id import pack_host
from downrange.protocol.bodies import pop, pop_frames
from downrange.protocol.bodies.body import decode_body, encode_body
from downrange.protocol.bodies.pop import (
    AckMessageRequest,
    BatchAck,
    BatchAckMessageBody,
    PopMessageRequest,
    ReceiptHandle,
    decode_bits,
    encode_bits,
    offsets_of,
)
from downrange.protocol.bodies.pop_frames import DONE_PIECES, FOUND_PIECES, found_head
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request
from downrange.protocol.framing import Frame, FrameDecoder, decode_frame, encode
from downrange.store.log.commit_log import topic_field
from downrange.store.queue import unread
from downrange.store.queue.queue_entry import ENTRY
from downrange.store.queue.queue_tails import BLOCK, END, ROW, START, QueueTails
from tests.support.compiled_pull_checks import backlog, bytes_of
from tests.support.twins import pure_twin

in_python_frames: Any = pure_twin(pop_frames.__name__)
in_python_bodies: Any = pure_twin(pop.__name__)
in_python_leases: Any = pure_twin(leases.__name__)
in_python_unread: Any = pure_twin(unread.__name__)
_NONSENSE: tuple[Any, ...] = (
    None, "x", b"x", -1, 2**63, 1.5, [], (), {}, object(), [b"x"], (1, b"", b""), [(0, b"", b"")],
)  # fmt: skip
_BITS = ("AQ==", "/////w==", "BQI=", "AAAAAAAAAEA=", "AAAAAAAAAIA=", "", "AR==", "AQEBAQEBAQEB", "*")
_NAMES = ("orders", "%RETRY%billing_orders", "T", "", "ö", 'quo"te', "back\\slash")


def _frame(command: Any) -> Frame:
    (frame,) = FrameDecoder().frames(encode(command))
    return frame


def _spoilt(random: Random, header: bytes) -> bytes:
    """A header with a change that may or may not matter."""
    at = random.randrange(len(header))
    match random.randrange(6):
        case 0:
            return header[:at] + bytes([random.randrange(256)]) + header[at + 1 :]
        case 1:
            return header[:at] + header[at + random.randrange(1, 4) :]
        case 2:
            return header[:at] + random.choice((b'"', b"\\", b"0", b"-", b" ", b",", b"}", b"\0", b"7")) + header[at:]
        case 3:
            return header.replace(b'"opaque":', b'"opaque":3,"opaque":')
        case 4:
            return header.replace(b'"flag":0', b'"flag":%d' % random.choice((1, 2, 3)))
        case _:
            return header[:-1] + b',"remark":"x"}'


def ack_frame(random: Random) -> Frame:
    start = random.choice((0, 7, 10**12))
    offset = start + random.choice((0, 1, 2, 31, 62, 63, 64, 1000, -1))
    handle = ReceiptHandle(
        start, random.choice((1_700_000_000_000, 5)), 60_000, random.choice((0, 7, 999)), random.choice((0, 1, 2, 3)),
        random.choice(("broker-a", "", "a b", "ö")), 1, offset,
    )  # fmt: skip
    text = str(handle) + random.choice(("", "", " 4711", " ", "x"))
    if random.random() < 0.1:
        text = random.choice(("", "nonsense", "1 2 3", text.replace(" ", "  ", 1), "0" + text, "+" + text))
    header = AckMessageRequest(
        consumer_group=random.choice(_NAMES),
        topic=random.choice(_NAMES[: random.choice((1, 7))]),
        queue_id=random.choice((0, 1, -1, 2**31 - 1)),
        extra_info=text,
        offset=offset,
    )
    more = random.choice((None, None, {"bname": "broker-a", "ns": "ö", "lo": "true"}))
    fields = request(RequestCode.ACK_MESSAGE, header, ext_fields=more).ext_fields
    frame = _frame(request(RequestCode.ACK_MESSAGE, ext_fields=fields))
    opaque = random.choice((b"0", b"17", b"-1", b"2147483647"))
    kind, text_of, body = frame
    start_of = text_of.index(b'"opaque":') + 9
    text_of = text_of[:start_of] + opaque + text_of[text_of.index(b",", start_of) :]
    if random.random() < 0.1:
        text_of = _spoilt(random, text_of)
    return random.choice((kind, kind, kind, kind, 1)), text_of, body


def same_acks(random: Random) -> None:
    make = random.choice((ack_frame, batch_frame))
    frames = [make(random)] * random.choice((0, 1, 3)) + [make(random) for _ in range(random.randrange(9))]
    if random.random() < 0.2:
        frames += [ack_frame(random), batch_frame(random)]
    at = random.randrange(len(frames) + 1)
    found = compiled.steps.read_acks(frames, at, len(frames), DONE_PIECES)
    reached, code, _, _ = found
    assert found == in_python_frames.read_acks(frames, at, reached, DONE_PIECES)
    if reached < len(frames):  # what the compiled step leaves to Python is unusual
        kind, header, _ = frames[reached]
        assert kind or (code and b"%d" % code not in header) or not _is_plain(frames[reached]), header


def _is_plain(frame: Frame) -> bool:
    """Whether an acknowledgement is one that clients write: the compiled step must take it."""
    _, header, body = frame
    try:
        command = decode_frame(frame)
        usual = encode(msgspec.structs.replace(command, raw_ext=command.ext_fields or None, body=b""))
        if not header.isascii() or b"\\" in header or not usual.endswith(header) or command.flag:
            return False
        if command.code == RequestCode.BATCH_ACK_MESSAGE:
            batch = decode_body(BatchAckMessageBody, body)
            is_text = body.isascii() and b"\\" not in body and body == encode_body(batch)
            is_plain = batch.broker_name is not None and all(map(_is_plain_entry, batch.acks))
            return is_text and is_plain and 1 <= len(batch.acks) <= 32
        asked = command.header(AckMessageRequest)
        handle = ReceiptHandle.parse(asked.extra_info)
    except Exception:
        return False
    is_usual = command.code == RequestCode.ACK_MESSAGE and 0 <= asked.offset - handle.start_offset < 63
    return is_usual and str(handle) == asked.extra_info


def _is_plain_entry(ack: BatchAck) -> bool:
    bits = decode_bits(ack.bits)
    return 0 < bits < 1 << 63 and encode_bits(offsets_of(0, bits), 0) == ack.bits and ack.retry == "0"


def batch_frame(random: Random) -> Frame:
    acks = tuple(
        BatchAck(
            consumer_group=random.choice(_NAMES),
            topic=random.choice(_NAMES[: random.choice((1, 7))]),
            retry=random.choice(("0", "0", "0", "0", "1", "x")),
            start_offset=random.choice((0, 7, 10**17, -1)),
            queue_id=random.choice((0, 1, -1)),
            revive_queue_id=random.choice((0, 7, 999)),
            pop_time=random.choice((1_700_000_000_000, 5)),
            invisible_time=60_000,
            bits=random.choice(
                ("AQ==", "/////w==", "BQI=", "AAAAAAAAAEA=", "AAAAAAAAAIA=", "", "AR==", "AQEBAQEBAQEB", "*")
            ),
        )
        for _ in range(random.choice((1, 1, 1, 3, 0, 40)))
    )
    body = encode_body(BatchAckMessageBody(broker_name=random.choice(("broker-a", None, 'b"')), acks=acks))
    if random.random() < 0.2:
        body = _spoilt(random, body)
    command = request(RequestCode.BATCH_ACK_MESSAGE, ext_fields=random.choice((None, None, {"a": "b"})), body=body)
    return _frame(command)


def pop_frame(random: Random) -> Frame:
    header = PopMessageRequest(
        consumer_group=random.choice(_NAMES),
        topic=random.choice(_NAMES),
        queue_id=random.choice((-1, 0, 3)),
        max_msg_nums=random.choice((1, 32)),
        invisible_time=60_000,
        born_time=random.choice((0, 1_700_000_000_000, 10**17, -5)),
        exp=random.choice((None, "*", 'a = "bornTime":"7"', '"opaque":5,')),
        attempt_id=random.choice((None, "x")),
    )
    fields = dict(request(RequestCode.POP_MESSAGE, header).ext_fields)
    if random.random() < 0.3:
        del fields["bornTime"]
    command = request(RequestCode.POP_MESSAGE, ext_fields=fields)
    kind, text, body = _frame(msgspec.structs.replace(command, opaque=random.choice((0, 5, 10**8, 2**31 - 1, -1))))
    if random.random() < 0.3:
        text = _spoilt(random, text)
    return random.choice((kind, kind, kind, kind, kind, 1)), text, body


def _with_numbers(random: Random, frame: Frame) -> Frame:
    """The same pop, asked at another time."""
    kind, text, body = frame
    text = re.sub(rb'"opaque":\d+', b'"opaque":%d' % random.choice((0, 7, 10**8)), text)
    return kind, re.sub(rb'"bornTime":"\d+"', b'"bornTime":"%d"' % random.choice((0, 7, 10**12)), text), body


def same_cuts_of_pops(random: Random) -> None:
    frame = pop_frame(random)
    frames = [frame] + [_with_numbers(random, frame) for _ in range(random.choice((0, 0, 1, 5)))]
    if random.random() < 0.5:
        frames.append(pop_frame(random))
    at = random.randrange(len(frames) + 1)
    found = compiled.steps.cut_pops(frames, at, len(frames))
    assert found == in_python_frames.cut_pops(frames, at, len(frames))
    reached, shared, opaques, borns = found
    header = pop_frames.read_pop(shared) if reached > at else None
    if header is None:
        return
    for frame, opaque, born in zip(frames[at:reached], opaques, borns, strict=True):
        try:
            read = decode_frame(frame)
            asked = read.header(PopMessageRequest)
        except MQError:
            continue  # what is wrong lies in members that nobody looks at
        assert (read.opaque, asked.born_time, read.flag, read.code) == (opaque, born, 0, 200050)
        assert msgspec.structs.replace(header, born_time=born) == asked


def same_offset_list(random: Random) -> None:
    start = random.choice((0, 9, 99, 10**15, 2**63 - 64, 2**63, -1))
    bits = random.choice((0, 1, 0xFFFFFFFF, random.getrandbits(63), random.getrandbits(70)))
    assert pop.offset_list(start, bits) == in_python_bodies.offset_list(start, bits)


class _Queue:
    """What `take_unread` asks of a queue: entries, in a file or in memory."""

    def __init__(self, entries: bytes, file_bytes: int) -> None:
        self._entries = entries
        self._file_bytes = file_bytes

    def read(self, offset: int, count: int) -> bytes:
        """As `ConsumeQueue.read`: never beyond the end of the file."""
        begin, end = offset * ENTRY.size, (offset + count) * ENTRY.size
        return self._entries[begin : min(end, self._file_bytes) if begin < self._file_bytes else end]


def tails_of(random: Random, queues: int) -> tuple[QueueTails, dict[Any, Any]]:
    """Queues with entries, of which most are in memory."""
    tails, states, place = QueueTails(), {}, 0
    for queue_id in range(queues):
        row = tails.add_row()
        in_file, entries = random.choice((0, 0, 7)), b""
        for number in range(in_file + random.choice((0, 1, 11, 12, 13, 50))):
            size = random.choice((100, 300, 5000))
            entries += ENTRY.pack(place, size, 0)
            place += size
            if number >= in_file:
                tails.extend(row, entries[-ENTRY.size :])
            else:
                tails.rows[row + END] = tails.rows[row + START] = len(entries)
        if random.random() < 0.95:
            states["T", queue_id] = SimpleNamespace(row=row, queue=_Queue(entries, in_file * ENTRY.size))
    return tails, states


def same_taking_of_unread(random: Random) -> None:
    queues = random.randrange(1, 9)
    tails, states = tails_of(random, queues)
    offsets: dict[int, int] = {}
    for queue_id in range(queues):
        if random.random() < 0.95:
            offsets[queue_id] = random.choice((0, 0, random.randrange(60), random.randrange(60), -1, 10**9))
    readable = random.choice((0, 0, 5000)), random.choice((10**9, 10**5)), random.choice((10**6, 10**4))
    turns, most = (random.randrange(100), random.choice((0, 1, 1, 8))), random.choice((0, 1, 32, 1000))
    before = states, tails.rows, tails.memory, "T", queues
    moved, moved_in_python = offsets.copy(), offsets.copy()
    found = compiled.steps.take_unread(*before, moved, turns, most, readable)
    assert found == in_python_unread.take_unread(*before, moved_in_python, turns, most, readable)
    assert moved == moved_in_python
    taken = [(queue_id, len(entries) // ENTRY.size) for _, of_one in found for queue_id, _, entries, _ in of_one]
    for queue_id, offset in offsets.items():
        assert moved[queue_id] == offset + sum(count for other, count in taken if other == queue_id)


HOST = pack_host("127.0.0.1", 10911)


def leases_of(random: Random, *, spoilt: bool) -> list[Lease]:
    made = []
    for _ in range(random.choice((1, 1, 2, 9))):
        name, group = random.choice(_NAMES[: random.choice((1, 7))]), random.choice(_NAMES)
        start = random.choice((0, 7, 10**12, 2**63 - 70 if spoilt else 1))
        key = LeaseKey(name, group, random.choice((0, 3)), start, random.choice((1_700_000_000_000, 5)))
        held = random.choice((1, 0xFFFFFFFF, random.getrandbits(62) | 1, random.getrandbits(90) | 1 if spoilt else 4))
        made.append(Lease(key, held, random.choice((0, 60_000)), random.randrange(9 if spoilt else 8)))
    return made


def same_revive_records(random: Random) -> None:
    spoilt = random.random() < 0.4
    held = leases_of(random, spoilt=spoilt)
    ended = [(lease, random.choice((lease.held, lease.held & -lease.held))) for lease in held]
    records = ReviveRecords("DefaultCluster", random.choice(("broker-a", 'b"%d')), HOST)
    places, fits, now = revive_places(records.topic), random.choice((32_767, 32_767, 300)), 1_700_000_000_123
    steps: Any = compiled.steps
    checkpoints = [records.checkpoint(lease, now) for lease in held]
    acknowledgements = [records.acknowledgement(lease, bits, now) for lease, bits in ended]
    calls = (steps.add_checkpoints, held, checkpoints), (steps.add_acknowledgements, ended, acknowledgements)
    for step, items, made in calls:
        compiled_batch = steps.NewMessages()
        assert not step(compiled_batch, items, {}, places, fits, now), "there are no texts yet"
        is_added = step(compiled_batch, items, records.texts, places, fits, now)
        largest = max(len(one.body) + len(one.properties) for one in made)
        if not is_added:
            assert spoilt or largest > fits, "what is usual is for the compiled step"
            assert len(compiled_batch) == 0
            continue
        assert largest <= fits
        batch = steps.NewMessages()
        for one in made:
            batch.add(places[0][one.topic, one.queue_id], one, True)
        assert _written(compiled_batch) == _written(batch)


def revive_places(topic: str) -> tuple[dict[tuple[str, int], Any], str, bytes]:
    """The eight revive queues, where their records go, and the address of the broker."""
    field = topic_field(topic)
    return (
        {
            (topic, number): SimpleNamespace(
                row=number * ROW, queue_id=number, topic=topic, topic_field=field, is_special=False
            )
            for number in range(8)
        },
        topic,
        HOST,
    )


def _written(batch: Any) -> bytes:
    """The records of a batch, as they go into the log."""
    memory = bytearray(1 << 20)
    count, end = compiled.steps.write_records(batch, 0, memory, 0, len(memory), 0, 7, array("q", [0] * 8 * ROW))
    assert count == len(batch)
    return bytes(memory[:end])


def popped_queues(random: Random, *, spoilt: bool) -> list[PoppedQueue]:
    queues = []
    for queue_id in range(random.choice((1, 1, 2, 5))):
        found = backlog(random, spoilt=spoilt)
        flag = random.choice((0, 0, 0, 1)) if spoilt else 0
        bits = random.choice((1, 0xFFFFFFFF, random.getrandbits(62) | 1, random.getrandbits(70) | 1 if spoilt else 1))
        start = random.choice((0, 7, 10**12))
        queues.append(PoppedQueue("T", flag, (queue_id, start), bits, found, max(0, bytes_of(found))))
    return queues


def found_pop(random: Random, *, spoilt: bool) -> Popped:
    wanted = PopRequest(topic="T", group="G", invisible_millis=random.choice((0, 60_000, 2**62)))
    popped = Popped(wanted, 1_700_000_000_000, random.choice((0, 7, 999)), "broker-a")
    popped.queues = popped_queues(random, spoilt=spoilt)
    popped.rest = random.getrandbits(40)
    if spoilt and random.random() < 0.3:
        popped.queues[0].byte_count += 1
    return popped


def same_pop_replies(random: Random) -> None:
    spoilt = random.random() < 0.5
    pops = [found_pop(random, spoilt=spoilt) for _ in range(random.choice((0, 1, 1, 3)))]
    opaques = [random.choice((0, 7, -1, 2**31 - 1)) for _ in pops]
    sizes = [sum(queue.byte_count for queue in popped.queues) for popped in pops]
    framed = compiled.steps.encode_pops(FOUND_PIECES, pops, opaques)
    if framed is None:
        assert spoilt or max(sizes) > 64 * 1024, "what is usual is for the compiled step"
        return
    expected: list[bytes | memoryview] = []
    for popped, opaque, size in zip(pops, opaques, sizes, strict=True):
        numbers = popped.pop_time, popped.request.invisible_millis, popped.revive_queue, popped.rest
        expected.append(found_head(numbers, *offset_infos(popped.queues), opaque, size))
        expected += popped.records()
    assert framed == b"".join(expected)


def same_table_of_leases(random: Random) -> None:
    """Hold and end leases in two tables, and compare them after every step."""
    tables: list[tuple[Any, list[Lease]]] = []
    seed = random.getrandbits(64)
    for module in (leases, in_python_leases):
        dice, made = Random(seed), module.Leases()
        held: list[Any] = []
        log: list[Any] = []
        for _ in range(dice.randrange(30)):
            new = [
                module.Lease(
                    module.LeaseKey(dice.choice("TU"), "G", dice.randrange(3), dice.randrange(40), dice.randrange(3)),
                    dice.choice((1, 0xFFFFFFFF, dice.getrandbits(90) | 1)), dice.choice((0, 5, 2**65)), 0, 1,
                )
                for _ in range(dice.choice((0, 1, 4)))
            ]  # fmt: skip
            new = list({one.key: one for one in new}.values())
            made.add(new)
            held += new
            if held:
                some = [dice.choice(held) for _ in range(dice.choice((0, 1, 3)))]
                made.end([(one, dice.choice((-1, 1, 0, one.held, dice.getrandbits(80)))) for one in some])
            due = made.due(dice.choice((0, 3, 9)), 2)
            log.append((made.messages, made.ended, len(made), made.next_due, [(one.key, one.held) for one in due]))
            log.append(sorted((one.key, one.held) for one in made))
            log.append(sorted((key, made.in_flight(*key)) for key in {one.key[:3] for one in held}))
        tables.append((log, held))
    assert tables[0][0] == tables[1][0]


def refuses_nonsense_about_pops(random: Random) -> None:
    """Spoil one argument: the compiled step raises TypeError or AttributeError, or it made no difference."""
    steps: Any = compiled.steps
    held, records = leases_of(random, spoilt=False), ReviveRecords("DefaultCluster", "broker-a", HOST)
    places = revive_places(records.topic)
    for lease in held:
        records.checkpoint(lease, 5)  # which makes the texts
    calls: list[tuple[Any, list[Any]]] = [
        (steps.cut_pops, [[pop_frame(random)], 0, 1]),
        (steps.read_acks, [[ack_frame(random)], 0, 1, DONE_PIECES]),
        (steps.offset_list, [5, 5]),
        (
            steps.take_unread,
            [
                {("T", 0): SimpleNamespace(row=0, queue=_Queue(b"", 0))},
                array("q", [0, 0, 0, 0, 0, 0, 0, 0]),
                bytearray(BLOCK),
                "T",
                1,
                {0: 0},
                (0, 2),
                5,
                (0, 9, 9),
            ],
        ),
        (steps.add_checkpoints, [steps.NewMessages(), held, records.texts, places, 9999, 5]),
        (steps.add_acknowledgements, [steps.NewMessages(), [(held[0], 1)], records.texts, places, 9999, 5]),
        (steps.encode_pops, [FOUND_PIECES, [found_pop(random, spoilt=False)], [7]]),
        (steps.hold_leases, [{}, {}, [], 0, held]),
        (steps.end_leases, [{}, {}, [(held[0], 1)]]),
    ]
    step, arguments = random.choice(calls)
    which = random.randrange(len(arguments))
    if isinstance(arguments[which], list | tuple) and arguments[which] and random.random() < 0.5:
        parts = list(arguments[which])
        parts[random.randrange(len(parts))] = random.choice(_NONSENSE)
        arguments[which] = type(arguments[which])(parts)
    else:
        arguments[which] = random.choice(_NONSENSE)
    try:
        made = step(*arguments)
    except (TypeError, AttributeError):
        return
    assert made is None or isinstance(made, bytes | bool | int | tuple | list)
