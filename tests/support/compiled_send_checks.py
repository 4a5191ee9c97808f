"""Frames, sends and their replies: one input for the compiled steps and for Python each, and what must come of it."""

from __future__ import annotations

import random as chance
from array import array
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from downrange import compiled
from downrange.broker.config import BrokerConfig
from downrange.broker.groups import Groups
from downrange.broker.handlers.send_reader import SendReader
from downrange.broker.handlers.sends import Sends
from downrange.broker.handlers.usual_sends import usual_sends
from downrange.broker.json_file import JsonFile
from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import MessageWriter
from downrange.broker.replication.waiting import Tell
from downrange.broker.statistics import Statistics
from downrange.broker.topics import Topics
from downrange.clock import ManualClock
from downrange.model.message import PhysicalOffset
from downrange.model.message_id import pack_host
from downrange.model.topics import TopicConfig
from downrange.protocol.bodies.send_replies import ALL, AT_ONCE, WHEN_SAFE, SendReplies, SendReply
from downrange.protocol.errors import RemoteProtocolError
from downrange.protocol.framing import Frame, FrameDecoder, code_of, next_run
from downrange.store.log.record_writer import write_records
from downrange.store.new_message import PutMessageStatus
from downrange.store.new_messages import NewMessages
from tests.support import compiled_cases as cases
from tests.support.compiled_checks import NONSENSE, raises
from tests.support.store_files import files_of
from tests.support.twins import pure_twin
from tests.unit.store.small_store import NOW, open_store

SENDS = frozenset((10, 310, 320))
_TOPICS = (
    TopicConfig("TopicA", 16, 16, 6),
    TopicConfig("a", 2, 1, 6),
    TopicConfig("T\u00f6pic", 2, 2, 6),
    TopicConfig("Many", 4, 4, 6, "MULTI_TAG"),
    TopicConfig("ReadOnly", 4, 4, 4),
)
_PEERS = ("10.1.2.3:50000", "10.9.8.7:10911", "fe80::1:40000", "192.168.0.1:1")


class _Origin:
    """A connection without a socket: keeps what it is sent."""

    socket = None
    is_full = False

    def __init__(self, peer: str) -> None:
        host, _, port = peer.rpartition(":")
        self.peer, self.peer_host = peer, pack_host(host, int(port))
        self.said: list[object] = []
        self.answering = 0

    def write(self, frames: bytes) -> None:
        self.said.append(bytes(frames))

    def break_off(self, error: Exception) -> None:
        self.said.append(str(error))

    def begin_answering(self, requests: int) -> None:
        self.answering += requests

    def end_answering(self, requests: int) -> None:
        self.answering -= requests


class _Nobody:
    """As pulls: none waits. As a flusher: senders wait."""

    is_sync = True

    def __init__(self) -> None:
        self.queues: dict[Any, Any] = {}


class _Writer(MessageWriter):
    """Lets senders wait until the test tells them."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.waiting: list[Tell] = []

    def tell_when_safe(self, end_offset: int, tell: Tell) -> None:
        self.waiting.append(tell)


class SendingBroker:
    """The family of sends of a broker on a small store, without sockets."""

    def __init__(self, root: Path, **settings: Any) -> None:
        clock = ManualClock(NOW)
        self.store = open_store(root, clock=clock, **({"mapped_file_size_commit_log": 65536} | settings))
        broker = BrokerConfig(
            broker_cluster_name="DefaultCl\u00fcster", broker_name="b", broker_ip1="10.0.0.1", listen_port=40911
        )
        config = LiveConfig(broker, self.store.config)
        self.topics = Topics(JsonFile(root / "topics.json"), broker, clock)
        for topic in _TOPICS:
            self.topics._set(topic)
        groups = Groups(JsonFile(root / "groups.json"), clock)
        nobody: Any = _Nobody()
        self._writer = _Writer(self.store, nobody, nobody, Statistics(clock.now()), clock)
        reader = SendReader(config, self.topics, groups, self._writer)
        usual = usual_sends(self.topics, self.store.queues, reader.cluster_property.encode(), reader.store_host)
        self.sends = Sends(self._writer, reader, usual, {})
        self._origins: list[Any] = [_Origin(peer) for peer in _PEERS]

    def know_topic(self, topic: str) -> None:
        self.topics._set(TopicConfig(topic, 16, 16, 6))

    def take(self, frames: list[Frame], origins: Sequence[int], status: str = "PUT_OK") -> list[Any]:
        """What was said to each origin at once, and when the messages were safe or not."""
        chance.seed(len(frames))  # a send to any queue goes to this one
        self.sends.take(frames, [self._origins[number] for number in origins], 0, len(frames))
        seen = self._said()
        for tell in self._writer.waiting:
            tell(PutMessageStatus(status))
        self._writer.waiting.clear()
        counts = sorted(self.store.queues.take_counts())
        return [seen, self._said(), counts, self.store.max_offset, self._writer.statistics.new_puts]

    def _said(self) -> list[Any]:
        said = [(_joined(origin.said), origin.answering) for origin in self._origins]
        for origin in self._origins:
            origin.said.clear()
        return said


def _joined(said: list[object]) -> list[object]:
    """Bytes that were written in one piece or in several are the same bytes."""
    joined: list[object] = []
    for one in said:
        if isinstance(one, bytes) and joined and isinstance(joined[-1], bytes):
            joined[-1] += one
        else:
            joined.append(one)
    return joined


def is_send(frame: Frame) -> bool:
    """Does the request path hand this frame to the family of sends?"""
    try:
        return code_of(frame) in SENDS
    except RemoteProtocolError:
        return False


class BothBrokers:
    """Two brokers that are sent the same, one of them in Python: they store and answer the same."""

    def __init__(self, root: str, **settings: Any) -> None:
        self._root = Path(root)
        self._compiled = SendingBroker(self._root / "compiled", **settings)
        self._pure = pure_twin(__name__).SendingBroker(self._root / "pure", **settings)

    def know_topic(self, topic: str) -> None:
        self._compiled.know_topic(topic)
        self._pure.know_topic(topic)

    def set_max_message_size(self, size: int) -> None:
        self._compiled.store.set_max_message_size(size)
        self._pure.store.set_max_message_size(size)

    def take(self, frames: list[Frame], origins: Sequence[int] | None = None, status: str = "PUT_OK") -> int:
        """How many sends the compiled step has read."""
        before = self._compiled.sends.accelerated
        chosen = [(frame, (origins or [0] * len(frames))[n]) for n, frame in enumerate(frames) if is_send(frame)]
        sent = [frame for frame, _ in chosen], [origin for _, origin in chosen], status
        if chosen:
            for seen, expected in zip(self._compiled.take(*sent), self._pure.take(*sent), strict=True):
                assert seen == expected, sent
        return self._compiled.sends.accelerated - before

    def close(self) -> None:
        self._compiled.store.close()
        self._pure.store.close()
        assert files_of(self._root / "compiled") == files_of(self._root / "pure")


def same_sends(random: Random, root: str) -> None:
    """Runs of sends of many kinds from several origins, some of them broken."""
    both = BothBrokers(root, mapped_file_size_commit_log=random.choice((1500, 4096, 65536, 1 << 20)))
    if random.random() < 0.3:
        both.set_max_message_size(random.choice((300, 1000, 4000)))
    for _ in range(random.randrange(1, 6)):
        frames = [cases.send(random, random.choice((0, 0.1))) for _ in range(random.choice((1, 2, 40)))]
        for _ in range(random.choice((0, 0, 2))):
            at = random.randrange(len(frames))
            frames[at] = random.choice((cases.broken, cases.broken_body))(random, frames[at])
        origins = random.choices(range(len(_PEERS)), k=len(frames)) if random.random() < 0.7 else None
        both.take(frames, origins, random.choice(("PUT_OK", "PUT_OK", "FLUSH_DISK_TIMEOUT", "SLAVE_NOT_AVAILABLE")))
    both.close()


def same_frames(random: Random) -> None:
    """A chunk, whole or damaged or cut off, gives the same frames, and the same rest is kept."""
    chunk = bytearray(b"".join(cases.wire(random) for _ in range(random.randrange(4))))
    if chunk and random.random() < 0.5:
        chunk[random.randrange(min(12, len(chunk)))] = random.choice((0, 1, 2, 127, 128, 255))
    data = bytes(chunk[: random.randrange(len(chunk) + 1)]) if random.random() < 0.5 else bytes(chunk)
    compiled_way = FrameDecoder(20_000, 5000)
    python = pure_twin("downrange.protocol.framing").FrameDecoder(20_000, 5000)
    assert compiled_way.frames(data) == python.frames(data)
    for name in ("_buffer", "_needed", "buffered"):
        assert getattr(compiled_way, name) == getattr(python, name)
    assert str(compiled_way.error) == str(python.error)


def same_cuts_into_runs(random: Random) -> None:
    """Frames are cut into runs of one family alike; before an unusual header the compiled function stops."""
    frames = [cases.send(random, 0.1) for _ in range(random.randrange(1, 10))]
    frames = [cases.broken(random, frame) if random.random() < 0.1 else frame for frame in frames]
    families = {10: "sends", 310: "sends", 320: "batches", 11: "pulls"}
    if random.random() < 0.3:
        del families[random.choice(list(families))]
    python = pure_twin("downrange.protocol.framing")
    for at in range(len(frames)):
        family, stop = next_run(frames, at, families)
        if stop == at:
            assert family is None
            continue
        expected, expected_stop = python.next_run(frames, at, families)
        assert (family, at < stop <= expected_stop) == (expected, True)
        if stop < expected_stop:
            assert next_run(frames, stop, families) == (None, stop)


class _State:
    """All that a batch and its records want to know of a queue."""

    row, queue_id, topic, topic_field, is_special = 0, 1, "TopicA", b"\6TopicA", False


def replies_and_messages(random: Random) -> tuple[list[Any], list[Any]]:
    """What `SendReplies.encode` says of random requests for each `which`, and what else it says of itself."""
    template = SendReply(
        random.choice((0, 10, 14)),
        random.choice(cases.HOSTS),
        random.choice(("DefaultRegion", "100%", "", 'quo"te')),
        random.random() < 0.5,
    )
    messages, replies = NewMessages(), SendReplies()
    state: Any = _State()
    for _ in range(random.randrange(5)):
        count = random.choice((1, 1, 2, 40))
        if random.random() < 0.2:
            reply = random.choice((b"", b"ready", b"x" * 3000))
            replies.add_ready(random.choice((36, 37)), reply, len(messages), count, random.random() < 0.5)
        else:
            replies.add(
                random.randrange(2), random.choice((10, 310, 320)), random.choice((0, 5, -1, 2**31 - 1, -(2**31))),
                random.choice((0, 0, 2)), random.choice((0, 9, 10, 2**31 - 1)), len(messages), count,
                random.random() < 0.5,
            )  # fmt: skip
        for number in range(count):
            messages.add(state, cases.message(random, "TopicA", 1), not number)
    _write_records(random, messages)
    if len(replies) and random.random() < 0.2:
        replies.set_ready(random.randrange(len(replies)), b"after all")
    told = [replies.codes(), replies.batches(), [replies.request(number) for number in range(len(replies))]]
    return [replies.encode(template, messages, which) for which in (ALL, AT_ONCE, WHEN_SAFE)], told


def _write_records(random: Random, messages: NewMessages) -> None:
    """Give the messages their places, in a log and a queue that begin anywhere."""
    if len(messages):
        rows = array("q", (random.choice((0, 9, 2**40)), *bytes(7)))
        memory = bytearray(200_000)
        stop, _ = write_records(
            messages, 0, memory, 0, len(memory), PhysicalOffset(random.choice((0, 2**61))), NOW, rows
        )
        assert stop == len(messages)


def same_replies(random: Random) -> None:
    seed = random.getrandbits(64)
    assert replies_and_messages(Random(seed)) == pure_twin(__name__).replies_and_messages(Random(seed))


def refuses_nonsense_about_sends(random: Random) -> None:
    """Arguments of the wrong kind raise; frames, origins and destinations of the wrong kind are left alone."""
    steps: Any = compiled.steps
    spoilt = random.choice(NONSENSE)
    odd_frame = random.choice((spoilt, (0, b""), (spoilt, b"", b""), (0, spoilt, b""), (0, b"", spoilt)))
    frames = [cases.send(random, 0) for _ in range(3)] + [odd_frame] * random.randrange(2)
    origins: list[Any] = [_Origin(_PEERS[0])] * len(frames)
    if random.random() < 0.2:
        origins[random.randrange(3)] = spoilt
    packed = cases.packed("TopicA", random.choice(((0, 8), (0, -1), (-5, 2**31 - 1), ())))
    packed = random.choice((packed, packed, packed[: random.randrange(12)], spoilt))
    made: list[Any] = [steps.TopicTable(), lambda topic: packed, [_State(), None], b"CLUSTER\x01c", cases.HOSTS[1]]
    if random.random() < 0.2:
        made[random.randrange(5)] = spoilt
    if raises(steps.UsualSends, *made):
        return
    usual = steps.UsualSends(*made)
    replies, messages = steps.SendReplies(), steps.NewMessages()
    arguments: list[Any] = [frames, origins, 0, len(frames), replies, messages, random.choice((0, 700)), 3000]
    if random.random() < 0.3:
        arguments[random.randrange(8)] = spoilt
    if raises(usual.read, *arguments):
        assert len(replies) <= len(messages)
    for which in (ALL, AT_ONCE, WHEN_SAFE, spoilt):  # nothing is stored, so that nothing can be answered
        if len(replies) and which is not ALL:
            raises(replies.encode, SendReply(0, cases.HOSTS[1], "r", trace_on=True), messages, which)
        elif len(replies) and any(not replies.request(n)[3] & 2 for n in range(len(replies))):
            assert raises(replies.encode, SendReply(0, cases.HOSTS[1], "r", trace_on=True), messages, which)
    assert raises(replies.encode, spoilt, messages, ALL)
    assert raises(replies.request, random.choice((spoilt, len(replies))))
    assert raises(replies.set_ready, random.choice((spoilt, len(replies))), b"")
    assert raises(replies.add_ready, 10, random.choice((None, "x", 5)), 0, 1, True)
    good: list[Any] = [0, 310, 5, 0, 1, 0, 1, True]
    good[random.randrange(8)] = random.choice((None, "x", 2**31, 1.5))
    assert raises(replies.add, *good)
    assert raises(steps.next_run, frames, random.choice((None, "x", -1, 99)), {})
    assert raises(steps.next_run, random.choice((None, "x", [], ())), 0, {})
    raises(steps.next_run, frames, 0, {310: "sends"})
    raises(
        steps.cut_frames,
        random.choice((b"\0" * 30, spoilt)), random.choice((2**24, spoilt)), random.choice((2**16, spoilt)),
    )  # fmt: skip
