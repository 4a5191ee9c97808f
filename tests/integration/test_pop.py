"""POP over real sockets: leases, acknowledgements, redelivery, filters, waiting."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from downrange.broker.app import RunningBroker
from downrange.clock import ManualClock
from downrange.compiled import steps
from downrange.model import properties as names
from downrange.model.topics import TopicConfig
from downrange.protocol.bodies.pop import PopMessageResponse
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import request
from downrange.store.config import BrokerRole, FlushDiskType
from downrange.store.read_result import ReadResult
from tests.support.broker_client import client_of, standalone
from tests.support.popper import NOTHING, Held, Popper, held, popper_of


@asynccontextmanager
async def poppers(
    root: Path, *, queues: int = 1, clock: ManualClock | None = None, **options: object
) -> AsyncIterator[tuple[Popper, RunningBroker]]:
    async with standalone(root, clock=clock, **options) as running, popper_of(running) as popper:  # type: ignore[arg-type]
        running.topics.put(TopicConfig("orders", queues, queues))
        yield popper, running


async def send(popper: Popper, *bodies: bytes, queue_id: int = 0, **properties: str) -> None:
    for body in bodies:
        await popper.client.send("orders", body, queue_id=queue_id, properties=properties)


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.005)


async def advanced(clock: ManualClock, seconds: float, running: RunningBroker) -> None:
    """Move the clock, and wait until nothing is due any more."""
    await until(lambda: bool(clock.sleeping))
    await clock.advance(seconds)
    leases = running.pop.state.leases
    while leases.next_due is not None and leases.next_due <= clock.now():
        await clock.advance(0.001)  # the sleep of the service is not as exact as our clock


def bodies(found: list[Held]) -> list[bytes]:
    return [each.body for each in found]


async def test_messages_are_leased_acknowledged_and_gone(tmp_path: Path) -> None:
    async with poppers(tmp_path, queues=2) as (popper, running):
        await send(popper, b"a", b"b")
        await send(popper, b"c", queue_id=1)
        found = await popper.pop()
        assert sorted(bodies(found)) == [b"a", b"b", b"c"]
        assert await popper.pop() == []
        await popper.ack(*found)
        await popper.ack(*found)  # once more does no harm
        assert len(running.pop.state.leases) == 0
        running.pop.state.check_invariants()


async def test_an_unacknowledged_message_comes_again_at_its_time(tmp_path: Path) -> None:
    clock = ManualClock()
    async with poppers(tmp_path, clock=clock) as (popper, running):
        await send(popper, b"a", b"b", TAGS="T", mine="x")
        first, second = await popper.pop(invisible=5000)
        await popper.ack(second)
        await advanced(clock, 4.9, running)
        assert await popper.pop() == []
        await advanced(clock, 0.1, running)
        (again,) = await popper.pop(invisible=5000)
        assert (again.body, again.message.topic, again.message.reconsume_times) == (b"a", "orders", 1)
        assert again.handle.retry_flag == 1
        properties = again.message.properties
        assert properties[names.POP_CK] == str(again.handle)
        assert properties[names.FIRST_POP_TIME] == str(first.handle.pop_time)
        assert (properties["TAGS"], properties["mine"]) == ("T", "x")
        await advanced(clock, 5, running)
        (third,) = await popper.pop(invisible=5000)
        assert third.message.reconsume_times == 2
        assert third.message.properties[names.FIRST_POP_TIME] == str(first.handle.pop_time)
        await popper.ack(third)
        await advanced(clock, 60, running)
        assert await popper.pop() == []
        assert running.topics.get("%RETRY%poppers_orders") is not None


async def test_metrics_of_leases(tmp_path: Path) -> None:
    clock = ManualClock()
    async with poppers(tmp_path, clock=clock, broker_options={"metrics_port": 0}) as (popper, running):
        await send(popper, b"a", b"b")
        first, _ = await popper.pop(invisible=5000)
        await popper.ack(first)
        assert await popper.pop() == []
        held = await page(running)
        await advanced(clock, 5, running)
        ended = await page(running)
    assert sample(held, "rocketmq_pop_checkpoint_buffer_size") == 1
    assert sample(held, "rocketmq_rpc_latency_count", 'response_code="polling_timeout"') == 1
    assert sample(held, "rocketmq_pop_revive_in_message_total", 'revive_message_type="CK"') == 1
    assert sample(held, "rocketmq_pop_revive_in_message_total", 'revive_message_type="ACK"') == 1
    assert sample(held, "rocketmq_pop_revive_out_message_total", 'revive_message_type="CK"') == 0
    assert sample(held, "rocketmq_pop_offset_buffer_size") == 1
    assert sum(sample(held, "rocketmq_pop_revive_lag", f'queue_id="{number}"') for number in range(8)) == 2
    assert sample(held, "rocketmq_pop_buffer_scan_time_consume_count") >= 1
    assert sample(ended, "rocketmq_pop_checkpoint_buffer_size") == 0
    assert sample(ended, "rocketmq_pop_revive_out_message_total", 'revive_message_type="CK"') == 1
    assert sample(ended, "rocketmq_pop_revive_out_message_total", 'revive_message_type="ACK"') == 2
    assert sum(sample(ended, "rocketmq_pop_revive_lag", f'queue_id="{number}"') for number in range(8)) == 0
    assert sample(ended, "rocketmq_pop_revive_in_message_total", 'revive_message_type="ACK"') == 2
    assert sample(ended, "rocketmq_pop_revive_retry_messages_total", 'topic="orders"') == 1
    assert sample(ended, "rocketmq_pop_revive_latency") == 0
    how = "accelerated" if steps is not None else "not_accelerated"
    for family, count in {"pops": 2, "acks": 1}.items():
        assert sample(ended, f"downrange_requests_{how}_total", f'family="{family}"') == count


async def page(running: RunningBroker) -> str:
    """The page /metrics of a broker."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.metrics_port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    try:
        return (await reader.read()).decode()
    finally:
        writer.close()


def sample(text: str, name: str, label: str = "") -> float:
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name}{{") and label in line)
    return float(line.rpartition(" ")[2])


async def test_retry_topics_of_version_2(tmp_path: Path) -> None:
    clock = ManualClock()
    async with poppers(tmp_path, clock=clock, broker_options={"enable_retry_topic_v2": True}) as (popper, running):
        await send(popper, b"a")
        assert bodies(await popper.pop(invisible=1000)) == [b"a"]
        await advanced(clock, 1, running)
        (again,) = await popper.pop()
        assert again.handle.retry_flag == 2
        assert running.topics.get("%RETRY%poppers+orders") is not None
        await popper.ack(again)
        assert len(running.pop.state.leases) == 0


async def test_batch_ack(tmp_path: Path) -> None:
    clock = ManualClock()
    async with poppers(tmp_path, queues=2, clock=clock) as (popper, running):
        await send(popper, *(b"a%d" % number for number in range(4)))
        await send(popper, *(b"b%d" % number for number in range(4)), queue_id=1)
        found = await popper.pop(invisible=6000)
        assert len(found) == 8
        left_out = next(each for each in found if each.body == b"a0")
        await popper.batch_ack(each for each in found if each is not left_out)
        await popper.batch_ack(each for each in found if each is not left_out)
        await advanced(clock, 6, running)
        (again,) = await popper.pop(invisible=6000)
        assert again.body == b"a0"
        await popper.batch_ack([again])
        assert len(running.pop.state.leases) == 0


async def test_a_changed_invisible_time_replaces_the_lease(tmp_path: Path) -> None:
    clock = ManualClock()
    async with poppers(tmp_path, clock=clock) as (popper, running):
        await send(popper, b"a", b"b")
        first, second = await popper.pop(invisible=30_000)
        changed = await popper.change(first, 4000)
        await popper.change(first, 4000)  # the first handle is over: RocketMQ would deliver the message twice
        await popper.ack(first)
        renewed = await popper.change(second, 60_000)
        await advanced(clock, 4.1, running)
        (again,) = await popper.pop()
        assert (again.body, again.handle.offset) == (b"a", 0)
        assert await popper.pop() == []
        await popper.ack(changed, again)
        await advanced(clock, 30, running)
        assert await popper.pop() == []
        await popper.ack(renewed)
        assert len(running.pop.state.leases) == 0


async def test_a_late_nack_wakes_a_waiting_pop_at_once(tmp_path: Path) -> None:
    async with poppers(tmp_path) as (popper, running), client_of(running) as other:
        await send(popper, b"a")
        (first,) = await popper.pop(invisible=600_000)
        start = time.monotonic()
        waiting = asyncio.ensure_future(Popper(other).pop(poll=30_000))
        await until(lambda: len(running.pop.state.waiting) == 1)
        await popper.change(first, 0)
        (again,) = await waiting
        assert (again.body, again.message.reconsume_times) == (b"a", 1)
        assert time.monotonic() - start < 10


async def test_an_expired_lease_wakes_a_waiting_pop(tmp_path: Path) -> None:
    async with poppers(tmp_path) as (popper, running), client_of(running) as other:
        await send(popper, b"a")
        assert len(await popper.pop(invisible=300)) == 1
        (again,) = await Popper(other).pop(poll=30_000)
        assert again.message.store_timestamp - int(again.message.properties[names.FIRST_POP_TIME]) >= 300


async def test_a_new_message_wakes_a_waiting_pop(tmp_path: Path) -> None:
    async with (
        poppers(tmp_path, queues=4) as (popper, running),
        client_of(running) as other,
        client_of(running) as third,
    ):
        waiting = asyncio.ensure_future(Popper(other).pop(poll=30_000))
        await until(lambda: len(running.pop.state.waiting) == 1)
        of_queue_2 = asyncio.ensure_future(Popper(third).pop(poll=30_000, queue_id=2))
        await until(lambda: len(running.pop.state.waiting) == 2)
        number = await popper.client.call(
            RequestCode.POLLING_INFO, {"consumerGroup": "poppers", "topic": "orders", "queueId": 2}
        )
        assert number.ext_fields["pollingNum"] == "1"
        await send(popper, b"a", queue_id=3)
        assert bodies(await waiting) == [b"a"]
        assert not of_queue_2.done()
        await send(popper, b"b", queue_id=2)
        assert bodies(await of_queue_2) == [b"b"]


async def test_a_pop_waits_for_its_time_only(tmp_path: Path) -> None:
    async with poppers(tmp_path) as (popper, running):
        start = time.monotonic()
        reply = await popper.answer(poll=1000, expect=NOTHING)
        assert 0.9 < time.monotonic() - start < 10
        assert reply.remark == "NO_MESSAGE_IN_QUEUE"
        header = reply.header(PopMessageResponse)
        assert (header.start_offset_info, header.msg_offset_info, header.rest_num) == ("", "", 0)
        assert len(running.pop.state.waiting) == 0


async def test_a_pop_of_a_closed_connection_takes_nothing(tmp_path: Path) -> None:
    async with poppers(tmp_path) as (popper, running):
        async with client_of(running) as other:
            waiting = asyncio.ensure_future(Popper(other).pop(poll=30_000))
            await until(lambda: len(running.pop.state.waiting) == 1)
            other.connection.abort()
            waiting.cancel()
        await until(lambda: len(running.pop.state.waiting) == 0)
        await send(popper, b"a")
        assert bodies(await popper.pop()) == [b"a"]


async def test_too_many_waiting_pops_are_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("downrange.broker.pop.waiting.MOST_PER_KEY", 3)
    async with poppers(tmp_path) as (popper, running):
        commands = [popper.pop_command(poll=20_000) for _ in range(3)]
        waiting = [asyncio.ensure_future(popper.client.connection.request(each, 60)) for each in commands]
        await until(lambda: len(running.pop.state.waiting) == 3)
        await popper.answer(poll=20_000, expect=209)
        await send(popper, b"a", b"b", b"c")
        replies = await asyncio.gather(*waiting)
        assert sum(reply.body_bytes.count(b"orders") for reply in replies) >= 3


async def test_every_message_goes_to_one_of_many_waiting_pops(tmp_path: Path) -> None:
    async with poppers(tmp_path, queues=4) as (popper, running):
        async with client_of(running) as one, client_of(running) as two:
            found: list[bytes] = []

            async def consume(mine: Popper) -> None:
                while len(found) < 200:
                    taken = await mine.pop(poll=500, most=3)
                    found.extend(bodies(taken))
                    await mine.batch_ack(taken) if taken else None

            tasks = [asyncio.ensure_future(consume(Popper(client))) for client in (one, two)]
            for number in range(200):
                await send(popper, b"%d" % number, queue_id=number % 4)
            await asyncio.gather(*tasks)
        assert sorted(found) == sorted(b"%d" % number for number in range(200))
        assert len(running.pop.state.leases) == 0


@pytest.mark.parametrize(("kind", "expression"), [("TAG", "A || C"), ("SQL92", "n > 2")])
async def test_filters(tmp_path: Path, kind: str, expression: str) -> None:
    clock = ManualClock()
    async with poppers(tmp_path, clock=clock) as (popper, running):
        for number, tag in enumerate(["B", "B", "B", "A", "C"]):
            await send(popper, b"%d" % number, TAGS=tag, n=str(number))
        found = await popper.pop(exp_type=kind, exp=expression, invisible=1000)
        assert bodies(found) == [b"3", b"4"]
        assert {each.handle.start_offset for each in found} == {0}
        await popper.ack(found[0])
        assert await popper.pop() == []  # what was passed over is gone for this group
        await advanced(clock, 1, running)
        assert bodies(await popper.pop(exp_type=kind, exp=expression)) == [b"4"]


async def test_a_filter_passes_a_long_backlog(tmp_path: Path) -> None:
    async with poppers(tmp_path) as (popper, running):
        sends = [popper.client.send_command("orders", b"no", properties={"TAGS": "B"}) for _ in range(3000)]
        await asyncio.gather(*(popper.client.ask(each) for each in sends))
        await send(popper, b"yes", TAGS="A")
        assert bodies(await popper.pop(exp="A", poll=20_000)) == [b"yes"]
        waiting = asyncio.ensure_future(popper.pop(exp="A", poll=20_000))
        await until(lambda: len(running.pop.state.waiting) == 1)
        await send(popper, b"no", TAGS="B")
        await send(popper, b"yes", TAGS="A")
        assert bodies(await waiting) == [b"yes"]


async def test_an_expression_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    async with poppers(tmp_path) as (popper, _):
        for kind, expression in (("SQL92", "n > > 5"), ("SQL92", ""), ("FOO", "*")):
            reply = await popper.answer(exp_type=kind, exp=expression, expect=23)
            assert reply.remark == "parse the consumer's subscription failed"
            assert reply.header(PopMessageResponse) == PopMessageResponse()


async def test_new_groups_begin_where_they_ask(tmp_path: Path) -> None:
    async with poppers(tmp_path, store_options={"access_message_in_memory_max_ratio": 0}) as (popper, _):
        await send(popper, b"a", b"b", b"c")
        assert bodies(await Popper(popper.client, group="old").pop(init_mode=0)) == [b"a", b"b", b"c"]
        assert bodies(await Popper(popper.client, group="new").pop(init_mode=1)) == [b"c"]


async def test_the_queue_of_a_crowded_group_is_passed_over(tmp_path: Path) -> None:
    options = {"enable_pop_message_threshold": True, "pop_inflight_message_threshold": 2}
    async with poppers(tmp_path, broker_options=options) as (popper, _):
        await send(popper, *(b"%d" % number for number in range(5)))
        first = await popper.pop(most=3)
        reply = await popper.answer(expect=NOTHING)
        assert reply.header(PopMessageResponse).rest_num == 2
        await popper.ack(first[0])
        assert len(await popper.pop()) == 2


async def test_order(tmp_path: Path) -> None:
    clock = ManualClock()
    async with poppers(tmp_path, clock=clock) as (popper, running):
        await send(popper, *(b"o%d" % number for number in range(4)))

        async def ordered(most: int, attempt: str, invisible: int = 6000) -> tuple[list[Held], str | None]:
            command = popper.pop_command(order=True, most=most, attempt=attempt, invisible=invisible, queue_id=0)
            reply = await popper.client.connection.request(command, 10)
            counts = reply.header(PopMessageResponse).order_count_info
            return ([] if reply.code == NOTHING else held(reply)), counts

        first, counts = await ordered(2, "A1")
        assert (bodies(first), counts) == ([b"o0", b"o1"], "0 0 0")
        assert first[0].handle.is_orderly
        assert await ordered(2, "A2") == ([], "")
        repeated, counts = await ordered(2, "A1")
        assert (bodies(repeated), counts) == ([b"o0", b"o1"], "0 0 0")
        await clock.advance(6.01)  # the repeated pop was a millisecond later
        again, counts = await ordered(2, "A3")
        assert (bodies(again), counts) == ([b"o0", b"o1"], "0 qo0%0 1;0 qo0%1 1;0 0 1")
        await popper.ack(first[0])  # an old handle: nothing happens
        assert (await ordered(2, "A4"))[0] == []
        await popper.ack(again[0])
        assert (await ordered(2, "A4"))[0] == []
        await clock.advance(0.446)
        changed = await popper.change(again[1], 2000)
        assert changed.handle.invisible_time == 2446
        await clock.advance(2)
        more, counts = await ordered(4, "A5")
        assert (bodies(more), counts) == ([b"o1", b"o2", b"o3"], "0 qo0%1 2;0 0 0")
        assert more[0].handle.start_offset == 1
        offsets = running.pop.state.tables.offsets
        await popper.ack(more[1])
        assert offsets.get("orders", "poppers", 0) == 1
        await popper.ack(more[0])
        assert offsets.get("orders", "poppers", 0) == 3
        await popper.ack(more[2])
        assert offsets.get("orders", "poppers", 0) == 4
        assert await ordered(4, "A6") == ([], "")


async def test_an_ordered_pop_waits_until_its_queue_is_free(tmp_path: Path) -> None:
    async with poppers(tmp_path) as (popper, running), client_of(running) as other:
        await send(popper, b"a", b"b")
        (first,) = await popper.pop(order=True, most=1, invisible=30_000)
        waiting = asyncio.ensure_future(Popper(other).pop(order=True, poll=30_000, invisible=500))
        await until(lambda: len(running.pop.state.waiting) == 1)
        await popper.ack(first)
        (second,) = await waiting
        assert second.body == b"b"
        (again,) = await popper.pop(order=True, poll=30_000)  # when the lease is over
        assert (again.body, again.handle.pop_time - second.handle.pop_time >= 500) == (b"b", True)


async def test_wrong_requests(tmp_path: Path) -> None:
    async with poppers(tmp_path) as (popper, running):
        await send(popper, b"a")
        (first,) = await popper.pop()
        place = {"consumerGroup": "poppers", "topic": "orders", "queueId": 0, "offset": 0}
        extra = {"extraInfo": str(first.handle)}
        ack, change = RequestCode.ACK_MESSAGE, RequestCode.CHANGE_MESSAGE_INVISIBLETIME
        for code in (ack, change):
            for wrong, expect in (
                ({"topic": "nowhere"}, 17),
                ({"queueId": 9}, 13),
                ({"queueId": -1}, 13),
                ({"offset": 99}, 208),
                ({"extraInfo": "nonsense"}, 1),
                ({"extraInfo": "0 0 0 0 7 broker-a 0 0"}, 1),
            ):
                fields = {**place, **extra, "invisibleTime": 5000, **wrong}
                await popper.client.call(code, fields, expect=expect)
        await popper.client.call(ack, {**place, **extra, "offset": 1})  # the end of the queue passes
        batch = RequestCode.BATCH_ACK_MESSAGE
        await popper.client.call(batch, expect=208)
        await popper.client.call(batch, body=b'{"acks":[]}', expect=208)
        await popper.client.call(batch, body=b"nonsense", expect=1)
        await popper.client.call(batch, body=popper.batch_body([first]).replace(b"orders", b"nowher"))
        assert len(running.pop.state.leases) == 1
        await popper.answer(most=33, expect=29)
        await popper.answer(queue_id=9, expect=29)
        await Popper(popper.client, "nowhere").answer(expect=17)
        reply = await popper.answer(born=1, expect=NOTHING)
        assert reply.remark == "the broker[127.0.0.1] pop message is timeout too much"


async def test_peek_and_notification(tmp_path: Path) -> None:
    async with poppers(tmp_path, queues=2) as (popper, running), client_of(running) as other:
        place: dict[str, object] = {"consumerGroup": "poppers", "topic": "orders", "queueId": -1}
        peek = {**place, "maxMsgNums": 4}
        reply = await popper.client.call(RequestCode.PEEK_MESSAGE, peek, expect=19)
        notify = {**place, "pollTime": 0, "bornTime": 0}
        reply = await popper.client.call(RequestCode.NOTIFICATION, notify)
        assert reply.ext_fields["hasMsg"] == "false"
        waiting = asyncio.ensure_future(other.call(RequestCode.NOTIFICATION, {**notify, "pollTime": 9000}))
        await until(lambda: len(running.pop.state.waiting) == 1)
        await send(popper, b"a", queue_id=1)
        assert (await waiting).ext_fields["hasMsg"] == "true"
        reply = await popper.client.call(RequestCode.PEEK_MESSAGE, peek)
        assert reply.header(PopMessageResponse) == PopMessageResponse(rest_num=1)
        assert reply.body_bytes.count(b"orders") == 1
        (found,) = await popper.pop()
        assert (await popper.client.call(RequestCode.NOTIFICATION, notify)).ext_fields["hasMsg"] == "false"
        await popper.ack(found)


async def test_leases_last_over_a_clean_restart(tmp_path: Path) -> None:
    clock = ManualClock()
    async with poppers(tmp_path, clock=clock) as (popper, _):
        await send(popper, b"a", b"b", b"c")
        first, second, third = await popper.pop(invisible=60_000)
        await popper.ack(first)
        third = await popper.change(third, 90_000)
    async with poppers(tmp_path, clock=clock) as (popper, running):
        assert await popper.pop() == []
        assert sum(len(lease.left) for lease in running.pop.state.leases) == 2
        await popper.ack(third)
        await advanced(clock, 60, running)
        (again,) = await popper.pop()
        assert again.body == b"b"
        await popper.ack(second, again)
    async with poppers(tmp_path, clock=clock) as (popper, running):
        await advanced(clock, 600, running)
        assert await popper.pop() == []
        assert len(running.pop.state.leases) == 0


@pytest.mark.parametrize("flush", FlushDiskType)
async def test_pops_acks_and_changes_however_the_log_is_flushed(tmp_path: Path, flush: FlushDiskType) -> None:
    async with poppers(tmp_path, store_options={"flush_disk_type": flush}) as (popper, running):
        waiting = asyncio.ensure_future(popper.pop(exp="paid", poll=20_000))
        await until(lambda: len(running.pop.state.waiting) == 1)
        await send(popper, b"a", TAGS="paid")
        (first,) = await waiting
        await send(popper, b"b", b"c", TAGS="paid")
        await send(popper, b"d", TAGS="open")
        second, third = await popper.pop(exp="paid")
        assert bodies([first, second, third]) == [b"a", b"b", b"c"]
        command = popper.ack_command(first.handle)
        fields = {**command.ext_fields, "extraInfo": f"{first.handle} 4711"}  # as a proxy writes it
        await popper.client.ask(request(command.code, ext_fields=fields))
        await popper.batch_ack([third])
        await popper.change(second, 0)
        (again,) = await popper.pop(exp="paid", poll=20_000)
        assert (again.message.topic, again.body, again.message.reconsume_times) == ("orders", b"b", 1)
        await popper.ack(again)
        assert len(running.pop.state.leases) == 0
        running.pop.state.check_invariants()


async def test_a_sync_master_without_its_slave_leases_and_takes_acknowledgements(tmp_path: Path) -> None:
    async with poppers(tmp_path, store_options={"broker_role": BrokerRole.SYNC_MASTER}) as (popper, running):
        waiting = asyncio.ensure_future(popper.pop(poll=20_000))
        await until(lambda: len(running.pop.state.waiting) == 1)
        for body in (b"a", b"b"):
            reply = await popper.client.connection.request(popper.client.send_command("orders", body), 20)
            assert reply.code == ResponseCode.SLAVE_NOT_AVAILABLE
        (first,) = await waiting
        (second,) = await popper.pop()
        assert bodies([first, second]) == [b"a", b"b"]
        await popper.ack(first)
        await popper.batch_ack([second])
        assert len(running.pop.state.leases) == 0


@pytest.mark.parametrize("failing", ["reading", "a checkpoint", "storing"])
async def test_what_cannot_be_leased_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    async with poppers(tmp_path, queues=2) as (popper, running):
        await send(popper, b"a", b"b")
        await send(popper, b"c", queue_id=1)
        pop = running.pop
        with monkeypatch.context() as broken:
            if failing == "reading":
                reads = itertools.count()
                read = running.store.read

                def fail_at_second(*args: object, **options: object) -> ReadResult:
                    if next(reads):
                        raise OSError("the disk is gone")
                    return read(*args, **options)  # type: ignore[arg-type]

                broken.setattr(pop.receiving, "_read", fail_at_second)
                broken.setattr(running.store, "take_unread", lambda *_: ([], None))  # which would read another way
            elif failing == "a checkpoint":
                broken.delattr(pop.state, "records")
            else:
                running.store._refusals.refuse("test", "no room")
            assert (await popper.client.connection.request(popper.pop_command(), 20)).code != 0
            running.store._refusals.allow("test")
        assert len(pop.state.leases) == 0
        assert sorted(bodies(await popper.pop())) == [b"a", b"b", b"c"]
        pop.state.check_invariants()


async def test_a_slave_leases_nothing(tmp_path: Path) -> None:
    options = {"broker_role": BrokerRole.SLAVE}
    async with (
        standalone(tmp_path, store_options=options, broker_options={"broker_id": 1}) as running,
        popper_of(running) as popper,
    ):
        reply = await popper.answer(expect=14)
        assert "slave" in (reply.remark or "")


async def test_clients_cannot_write_revive_records(tmp_path: Path) -> None:
    async with poppers(tmp_path) as (popper, running):
        await send(popper, b"a")
        assert len(await popper.pop()) == 1
        command = popper.client.send_command(running.pop.state.records.topic, b"{}", properties={"TAGS": "ck"})
        reply = await popper.client.connection.request(request(command.code, ext_fields=command.ext_fields), 10)
        assert reply.code != 0
