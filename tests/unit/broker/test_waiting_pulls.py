from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial

import pytest

from downrange.broker.filtering import tag_filter
from downrange.broker.waiting_pulls import WaitingPull, WaitingPulls
from downrange.model.message import TopicQueue
from downrange.model.subscription import subscribe
from downrange.protocol.command import Buffer
from downrange.transport.connection import Connection
from tests.unit.broker.wired import FakeConnection

QUEUE = TopicQueue("orders", 0)
LONG = 60.0


class Peer(FakeConnection):
    """Keeps the replies, and counts how many are still to come."""

    def __init__(self, peer: str = "10.0.0.9:50000") -> None:
        super().__init__(peer)
        self.owed = 0
        self.frames: list[Buffer] = []

    def begin_answering(self, requests: int) -> None:
        self.owed += requests

    def end_answering(self, requests: int, *replies: Buffer) -> None:
        self.owed -= requests
        self.frames += replies


class Checked(WaitingPulls):
    """Its invariants are checked after every step."""

    def __getattribute__(self, name: str) -> object:
        found = object.__getattribute__(self, name)
        if name not in ("add", "notify", "notify_all", "drop", "_wake", "_answer"):
            return found

        def step(*arguments: object) -> object:
            done = found(*arguments)
            self.check()
            return done

        return step


class Asked:
    """A pull that waits, and how often it has read again."""

    def __init__(
        self,
        waiting: WaitingPulls,
        *,
        queue: TopicQueue = QUEUE,
        offset: int = 0,
        tags: str = "*",
        connection: Connection | None = None,
        seconds: float = LONG,
    ) -> None:
        self.times = 0
        wanted = tag_filter(subscribe(queue.topic, tags))
        self.peer = connection or Peer()
        self.pull = WaitingPull(queue, offset, wanted, self.peer, self._read)
        waiting.add(self.pull, seconds)

    def _read(self) -> list[bytes]:
        self.times += 1
        return [b"reply", b"%d" % self.times]


async def turn() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_a_message_wakes_the_pulls_of_its_queue_once_per_turn() -> None:
    waiting, peer = Checked(), Peer()
    asked = Asked(waiting, connection=peer)
    elsewhere = Asked(waiting, queue=TopicQueue("orders", 1))
    assert QUEUE in waiting.queues
    assert peer.owed == 1
    for offset in range(3):
        waiting.notify("orders", 0, offset, lambda: [b""])
    assert asked.times == 0
    await turn()
    assert asked.times == 1
    assert (peer.owed, peer.frames) == (0, [b"reply", b"1"])
    assert asked.pull.timer is not None
    assert asked.pull.timer.cancelled()
    assert elsewhere.times == 0
    assert QUEUE not in waiting.queues
    assert len(waiting) == 1
    assert repr(waiting) == "<WaitingPulls pulls=1 queues=1>"
    waiting.notify_all()


async def test_a_message_nobody_waits_for_is_forgotten() -> None:
    waiting = Checked()
    waiting.notify("orders", 0, 0, lambda: [b""])
    waiting.notify("orders", 0, 7, lambda: [b""])
    asked = Asked(waiting)
    await turn()
    assert asked.times == 0
    waiting.notify_all()


async def test_only_messages_a_pull_wants_wake_it() -> None:
    waiting = Checked()
    asked = Asked(waiting, tags="a || b")
    waiting.notify("orders", 0, 0, lambda: [b"TAGS\x01c"])
    await turn()
    assert asked.times == 0
    waiting.notify("orders", 0, 1, lambda: [b"TAGS\x01c"])
    waiting.notify("orders", 0, 2, lambda: [b"TAGS\x01b"])
    await turn()
    assert asked.times == 1


@pytest.mark.parametrize("stored", [b"TAGS\x01a\x02TAGS\x01", b"TAGS\x01\x02TAGS\x01a", b"TAGS\x01c\x02TAGS\x01a\x02"])
async def test_the_last_tag_that_is_not_empty_counts(stored: bytes) -> None:
    waiting = Checked()
    wants_a, wants_c = Asked(waiting, tags="a"), Asked(waiting, tags="c")
    waiting.notify("orders", 0, 0, lambda: [stored])
    await turn()
    assert (wants_a.times, wants_c.times) == (1, 0)
    waiting.notify_all()


async def test_each_pull_is_woken_by_what_it_wants_whichever_came_first() -> None:
    waiting, peer = Checked(), Peer()
    asked = {tags: Asked(waiting, tags=tags, connection=peer) for tags in ("c", "nothing", "*", "a || c", "b")}
    for offset, tag in enumerate((b"a", b"b", b"c", b"d")):
        waiting.notify("orders", 0, offset, partial(list, [b"TAGS\x01" + tag]))
    await turn()
    assert [tags for tags, one in asked.items() if one.times] == ["c", "*", "a || c", "b"]
    assert peer.owed == 1
    waiting.notify_all()


async def test_of_a_batch_each_pull_sees_the_messages_of_its_queue() -> None:
    waiting = Checked()
    asked = {
        (topic, tags, offset): Asked(waiting, queue=TopicQueue(topic, 0), tags=tags, offset=offset)
        for topic in ("orders", "bills")
        for tags in ("a", "b", "*")
        for offset in (0, 1, 2)
    }
    waiting.notify("orders", 0, 1, lambda: [b"TAGS\x01a", b"TAGS\x01c"])
    waiting.notify("bills", 0, 0, lambda: [b"TAGS\x01b"])
    await turn()
    woken = {which for which, one in asked.items() if one.times}
    everything = {("orders", "*", 0), ("orders", "*", 1), ("bills", "*", 0)}
    assert woken == everything | {("orders", "a", 0), ("orders", "a", 1), ("bills", "b", 0)}
    waiting.notify_all()


async def test_a_batch_is_looked_at_once_and_only_for_a_filter() -> None:
    waiting, looks = Checked(), []

    def properties() -> Iterator[bytes]:
        looks.append("look")
        yield b"TAGS\x01b"

    Asked(waiting)
    waiting.notify("orders", 0, 0, properties)
    await turn()
    assert not looks
    by_tag = [Asked(waiting, tags=tags, offset=1) for tags in ("a", "b", "b || c")]
    waiting.notify("orders", 0, 1, properties)
    await turn()
    assert (looks, [one.times for one in by_tag]) == (["look"], [0, 1, 1])
    waiting.notify_all()


async def test_a_pull_beyond_the_end_waits_for_its_offset() -> None:
    waiting = Checked()
    asked = Asked(waiting, offset=2)
    waiting.notify("orders", 0, 1, lambda: [b""])
    await turn()
    assert asked.times == 0
    waiting.notify("orders", 0, 2, lambda: [b""])
    await turn()
    assert asked.times == 1


async def test_a_pull_is_answered_when_its_time_is_over() -> None:
    waiting = Checked()
    asked = Asked(waiting, seconds=0.001)
    while not asked.times:
        await asyncio.sleep(0.001)
    assert len(waiting) == 0


async def test_all_pulls_can_be_answered_at_once() -> None:
    waiting, peer = Checked(), Peer()
    for number in range(3):
        Asked(waiting, queue=TopicQueue("orders", number), connection=peer)
    waiting.notify_all()
    assert (peer.owed, len(peer.frames), len(waiting)) == (0, 6, 0)


async def test_a_closed_connection_waits_for_nothing() -> None:
    waiting, gone = Checked(), Peer("10.0.0.9:1")
    dropped = [Asked(waiting, queue=TopicQueue("orders", number), connection=gone) for number in range(2)]
    kept = Asked(waiting, connection=Peer("10.0.0.9:2"))
    waiting.notify("orders", 0, 0, lambda: [b""])
    waiting.drop(gone)
    assert (gone.owed, gone.frames) == (0, [])
    await turn()
    assert (kept.times, [one.times for one in dropped]) == (1, [0, 0])
    assert len(waiting) == 0
    waiting.drop(gone)


async def test_a_broken_invariant_is_noticed() -> None:
    waiting = WaitingPulls()
    asked = Asked(waiting)
    waiting.check()
    del waiting._by_connection[asked.peer][asked.pull]
    with pytest.raises(AssertionError):
        waiting.check()
    waiting._by_connection[asked.peer][asked.pull] = None
    waiting.check()
    assert asked.pull.timer is not None
    asked.pull.timer.cancel()
    with pytest.raises(AssertionError, match="for a time"):
        waiting.check()
