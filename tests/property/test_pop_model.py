"""Random pops, acknowledgements, changes, waits and crashes against a model that is a dictionary."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from downrange.broker.app import RunningBroker, broker
from downrange.broker.config import BrokerConfig
from downrange.broker.pop.leases import LeaseKey
from downrange.broker.pop.popped import PopRequest, messages_of
from downrange.clock import ManualClock
from downrange.model.message_id import pack_host
from downrange.model.topics import TopicConfig
from downrange.protocol.bodies.pop import ReceiptHandle
from downrange.store.new_message import NewMessage
from tests.support.broker_client import store_config
from tests.support.store_files import copied_at_once

HOST = pack_host("127.0.0.1", 10911)
QUEUES = 2
INVISIBLE = 10_000


@dataclass
class Known:
    """What the model knows about a message."""

    handle: ReceiptHandle | None = None
    visible_at: int = 0
    is_acked: bool = False
    deliveries: int = 0


@dataclass
class Model:
    """Message -> state. Every message is free, held until a time, or acknowledged."""

    now: int
    messages: dict[bytes, Known] = field(default_factory=dict)

    def free(self) -> set[bytes]:
        return {body for body, known in self.messages.items() if not known.is_acked and known.visible_at <= self.now}

    def popped(self, body: bytes, handle: ReceiptHandle, invisible: int) -> None:
        known = self.messages[body]
        assert not known.is_acked, f"{body!r} comes after its acknowledgement"
        assert known.visible_at <= self.now, f"{body!r} is held by another consumer"
        known.handle, known.visible_at = handle, handle.pop_time + invisible
        known.deliveries += 1

    def holds(self, body: bytes, handle: ReceiptHandle) -> bool:
        known = self.messages[body]
        return is_one_lease(known.handle, handle) and known.visible_at > self.now and not known.is_acked


def is_one_lease(one: ReceiptHandle | None, other: ReceiptHandle) -> bool:
    """A broker knows a lease by its place and its time: handles of one millisecond may stand for one lease."""
    return one is not None and one._replace(invisible_time=other.invisible_time) == other


class Subject:
    """Our broker, called as a gRPC front end would; and all handles that it ever gave."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lives = 0
        self.clock = ManualClock(1_700_000_000_000)
        self.model = Model(self.clock.now())
        self.handles: list[tuple[bytes, ReceiptHandle]] = []
        self._stack = AsyncExitStack()
        self.running: RunningBroker

    async def start(self) -> None:
        config = BrokerConfig(
            broker_name="broker-a", broker_ip1="127.0.0.1", listen_port=0, metrics_port=-1, busy_poll_micros=0
        )
        store = store_config(self._root / f"life-{self._lives}", ha_listen_port=0)
        self.running = await self._stack.enter_async_context(broker(config, store, self.clock))
        known = self.running.topics.get("T")
        if known is None or known.read_queue_nums < QUEUES:  # after a crash it has the queues that have messages
            self.running.topics.put(TopicConfig("T", QUEUES, QUEUES))

    async def close(self) -> None:
        await self._stack.aclose()
        self._stack = AsyncExitStack()

    async def restart(self) -> None:
        await self.close()
        await self.start()

    async def crash(self) -> None:
        """Go on with a copy of the files, as a killed process leaves them."""
        old = self._root / f"life-{self._lives}"
        self._lives += 1
        copied_at_once(old, self._root / f"life-{self._lives}")
        await self.restart()

    def send(self, queue_id: int) -> None:
        body = b"%d" % len(self.model.messages)
        self.running.pop.state.writer.append_one(NewMessage("T", queue_id, body, b"", self.clock.now(), HOST, HOST))
        self.model.messages[body] = Known()

    def pop(self, most: int, *, queue_id: int = -1) -> None:
        """Pop, and compare with the model."""
        raise NotImplementedError

    def request(self, most: int, **options: object) -> PopRequest:
        return PopRequest(topic="T", group="G", invisible_millis=INVISIBLE, max_messages=most, **options)  # type: ignore[arg-type]

    def take(self, request: PopRequest) -> set[bytes]:
        receiving = self.running.pop.receiving
        (popped,) = receiving.take(request, receiving.check(request, "peer"), self.clock.now())
        receiving.lease([popped])
        assert popped.error is None
        found = set()
        for queue in popped.queues:
            for number, message in enumerate(messages_of(queue)):
                before = message.reconsume_times if queue.counts is None else queue.counts[number]
                assert before == self.model.messages[message.body].deliveries, "every delivery is counted"
                handle = popped.handle(queue, message.queue_offset)
                self.model.popped(message.body, handle, INVISIBLE)
                self.handles.append((message.body, handle))
                found.add(message.body)
        return found

    def holds(self, body: bytes, handle: ReceiptHandle) -> bool:
        """Whether this handle is the one that counts."""
        return self.model.holds(body, handle)

    def source(self, handle: ReceiptHandle) -> str:
        return "%RETRY%G_T" if handle.retry_flag else "T"

    def ack(self, number: int) -> None:
        if self.handles:
            body, handle = self.handles[number % len(self.handles)]
            if self.holds(body, handle):
                self.model.messages[body].is_acked = True
            key = LeaseKey(self.source(handle), "G", handle.queue_id, handle.start_offset, handle.pop_time)
            acknowledging = self.running.pop.acknowledging
            if handle.is_orderly:
                acknowledging.acknowledge_in_order(key, [handle.offset], handle.invisible_time)
            else:
                lease = self.running.pop.state.leases.get(key)
                acknowledging.acknowledge({} if lease is None else {lease: 1 << (handle.offset - handle.start_offset)})

    def change(self, number: int, millis: int) -> None:
        if self.handles:
            body, handle = self.handles[number % len(self.handles)]
            held = self.holds(body, handle)
            new, _ = self.running.pop.changing.change(self.source(handle), "G", handle, millis)
            if held:
                known = self.model.messages[body]
                known.handle, known.visible_at = new, new.pop_time + new.invisible_time
                self.handles.append((body, new))

    async def wait(self, seconds: float) -> None:
        await self.clock.advance(seconds)
        pop = self.running.pop.state
        while pop.leases.next_due is not None and pop.leases.next_due <= self.clock.now():
            await self.clock.advance(0.001)
        self.model.now = self.clock.now()
        pop.check_invariants()


class Unordered(Subject):
    def pop(self, most: int, *, queue_id: int = -1) -> None:
        free = self.model.free()
        found = self.take(self.request(most, queue_id=queue_id))
        assert found <= free
        if queue_id == -1:
            assert len(found) == min(most, len(free)), f"{free - found} are free"


class Ordered(Subject):
    """Of each queue, the free messages come in order, and none while an older one is held."""

    def holds(self, body: bytes, handle: ReceiptHandle) -> bool:
        """A message may be acknowledged until it is popped again; the queue's other messages are popped with it."""
        state = self.running.pop.state.orders.get(("T", "G", handle.queue_id))
        known = self.model.messages[body]
        is_its_handle = is_one_lease(known.handle, handle)
        return is_its_handle and not known.is_acked and state is not None and state.pop_time == handle.pop_time

    def pop(self, most: int, *, queue_id: int = -1) -> None:
        orders = self.running.pop.state.orders
        blocked = {queue for queue in range(QUEUES) if orders.is_blocked(("T", "G", queue), None, self.clock.now())}
        found = self.take(self.request(most, queue_id=queue_id, is_orderly=True))
        by_queue: dict[int, list[int]] = {}
        for body, handle in self.handles[len(self.handles) - len(found) :]:
            assert body in found
            by_queue.setdefault(handle.queue_id, []).append(handle.offset)
        assert not blocked & by_queue.keys()
        for offsets in by_queue.values():
            assert offsets == sorted(offsets)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, QUEUES - 1)),
        st.tuples(st.just("send"), st.integers(0, QUEUES - 1)),
        st.tuples(st.just("pop"), st.integers(1, 5)),
        st.tuples(st.just("pop"), st.integers(1, 5)),
        st.tuples(st.just("pop of queue 0"), st.integers(1, 5)),
        st.tuples(st.just("ack"), st.integers(0, 50)),
        st.tuples(st.just("ack"), st.integers(0, 50)),
        st.tuples(st.just("change"), st.integers(0, 50)),
        st.tuples(st.just("nack"), st.integers(0, 50)),
        st.tuples(st.just("wait"), st.integers(1, 12)),
        st.tuples(st.sampled_from(["save", "save orders", "crash", "restart"]), st.just(0)),
    ),
    min_size=5,
    max_size=60,
)


async def play(subject: Subject, script: list[tuple[str, int]]) -> None:
    await subject.start()
    try:
        for step, number in script:
            await _step(subject, step, number)
        for _ in range(40):  # everything that was not acknowledged comes again, sooner or later
            subject.pop(32)
            for each in range(len(subject.handles)):
                subject.ack(each)
            await subject.wait(INVISIBLE / 1000)
            if all(known.is_acked for known in subject.model.messages.values()):
                break
        lost = [body for body, known in subject.model.messages.items() if not known.is_acked]
        assert lost == []
    finally:
        await subject.close()


async def _step(subject: Subject, step: str, number: int) -> None:
    match step:
        case "send":
            subject.send(number)
        case "pop":
            subject.pop(number)
        case "pop of queue 0":
            subject.pop(number, queue_id=0)
        case "ack":
            subject.ack(number)
        case "change":
            subject.change(number, 15_000)
        case "nack":
            subject.change(number, 0)
            await subject.wait(0.01)
        case "wait":
            await subject.wait(number)
        case "save":
            subject.running.pop.state.tables.offsets.save()
        case "save orders":
            subject.running.pop.state.orders.save()
        case "crash":
            await subject.crash()
        case _:
            await subject.restart()


@settings(max_examples=40, deadline=None)
@given(script=steps)
def test_pops_and_the_model_agree(script: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(play(Unordered(Path(directory)), script))


@settings(max_examples=40, deadline=None)
@given(script=steps.map(lambda script: [step for step in script if step[0] not in ("change", "nack")]))
def test_ordered_pops_and_the_model_agree(script: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(play(Ordered(Path(directory)), script))
