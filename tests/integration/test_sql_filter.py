"""SQL92 filters over real sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from downrange.broker.app import RunningBroker
from downrange.clock import Clock, ManualClock
from downrange.model.message import QueueOffset
from downrange.model.record import decode_records
from downrange.model.subscription import SQL92, Subscription, subscribe
from downrange.protocol.bodies.body import encode_body
from downrange.protocol.bodies.groups import CheckClientBody
from downrange.protocol.bodies.pull import PullMessageRequest, PullMessageResponse, PullSysFlag
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from downrange.store.queue.consume_queue import ENTRY
from tests.support.broker_client import BrokerClient, client_of, standalone

TOPIC, GROUP = "orders", "readers"
FIRST, RETRY, NOT_FOUND = 0, 20, 19
PARSE_FAILED, NO_FILTER, OLD_FILTER = 23, 27, 28
BIT_MAPS: Mapping[str, object] = {"enable_calc_filter_bit_map": True}
WITH_EXT: Mapping[str, object] = {"enable_consume_queue_ext": True}


class SqlClient:
    """A consumer group of one, and a producer, over one connection."""

    def __init__(self, client: BrokerClient, running: RunningBroker) -> None:
        self.client = client
        self.running = running
        self._version = 0

    async def send(self, *values: str, topic: str = TOPIC) -> None:
        """One message for each value of the property `a`."""
        for value in values:
            await self.client.send(topic, value.encode(), properties={"a": value})

    async def subscribe(self, expression: str, *more: Subscription, topic: str = TOPIC) -> None:
        self._version += 1
        wanted = subscribe(topic, expression, SQL92, self._version)
        await self.client.heartbeat(consume={GROUP: [wanted, *more]})

    def pull_command(
        self,
        expression: str | None = None,
        *,
        offset: int = 0,
        wait_millis: int = 0,
        topic: str = TOPIC,
        kind: str = SQL92,
        version: int | None = None,
        most: int = 32,
    ) -> Command:
        """A pull by the group's expression, or by its own."""
        flags = int(PullSysFlag.SUSPEND) if wait_millis else 0
        flags |= int(PullSysFlag.SUBSCRIPTION) if expression is not None else 0
        header = PullMessageRequest(
            consumer_group=GROUP,
            topic=topic,
            queue_id=0,
            queue_offset=offset,
            max_msg_nums=most,
            sys_flag=flags,
            commit_offset=0,
            suspend_timeout_millis=wait_millis,
            subscription=expression,
            expression_type=kind,
            sub_version=self._version if version is None else version,
        )
        return request(RequestCode.PULL_MESSAGE, header)

    async def pull(self, expression: str | None = None, *, expect: int = FIRST, **options: object) -> list[str]:
        reply = await self.client.ask(self.pull_command(expression, **options), expect)  # type: ignore[arg-type]
        return bodies(reply)

    async def refusal(self, expression: str | None = None, *, expect: int, **options: object) -> str:
        reply = await self.client.ask(self.pull_command(expression, **options), expect)  # type: ignore[arg-type]
        assert reply.ext_fields == {}
        return reply.remark or ""

    async def check(self, expression: str, *, expect: int = 0) -> str | None:
        body = CheckClientBody(client_id="c", group=GROUP, subscription_data=subscribe(TOPIC, expression, SQL92))
        reply = await self.client.ask(request(RequestCode.CHECK_CLIENT_CONFIG, body=encode_body(body)), expect)
        return reply.remark


def bodies(reply: Command) -> list[str]:
    return [message.body.decode() for message in decode_records(reply.body_bytes)]


@asynccontextmanager
async def sql_client(
    root: Path,
    broker: Mapping[str, object] | None = None,
    store: Mapping[str, object] | None = None,
    clock: Clock | None = None,
) -> AsyncIterator[SqlClient]:
    async with (
        standalone(root, broker_options=broker, store_options=store, clock=clock) as running,
        client_of(running) as client,
    ):
        yield SqlClient(client, running)


async def test_a_group_gets_what_its_expression_wants(tmp_path: Path) -> None:
    async with sql_client(tmp_path) as sql:
        await sql.send("1", "5", "x", "7", "3")
        await sql.client.send(TOPIC, b"without")
        await sql.subscribe("a BETWEEN 2 AND 6 OR a = 'x' ")
        # A value that is no number has no result, whatever stands beside it.
        assert await sql.pull() == ["5", "3"]
        await sql.subscribe("a IS NULL OR a IN ('x')")
        assert await sql.pull() == ["x", "without"]
        await sql.subscribe("a = 100")
        reply = await sql.client.ask(sql.pull_command(), RETRY)
        header = reply.header(PullMessageResponse)
        assert (reply.remark, header.next_begin_offset, header.max_offset) == ("NO_MATCHED_MESSAGE", 6, 6)


async def test_a_batch_is_filled_with_what_is_wanted(tmp_path: Path) -> None:
    async with sql_client(tmp_path) as sql:
        await sql.send(*(str(number % 3) for number in range(30)))
        await sql.subscribe("a = 1")
        reply = await sql.client.ask(sql.pull_command(most=4))
        assert bodies(reply) == ["1"] * 4
        following = reply.header(PullMessageResponse).next_begin_offset
        assert following == 11  # 10 is the last one taken
        assert await sql.pull(offset=following) == ["1"] * 6


async def test_a_pull_may_bring_its_own_expression(tmp_path: Path) -> None:
    async with sql_client(tmp_path) as sql:
        await sql.send("1", "2", "3")
        assert await sql.pull("a > 1 AND a < 3") == ["2"]
        assert await sql.pull("a LIKE '1%'", expect=RETRY) == []
        assert "unknown expression type LUA" in await sql.refusal("a", kind="LUA", expect=PARSE_FAILED)
        assert await sql.refusal("", expect=PARSE_FAILED) == "parse the consumer's subscription failed"


async def test_a_pull_whose_own_expression_is_wrong_gets_everything_as_from_java_and_the_log_tells(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with sql_client(tmp_path) as sql:
        await sql.send("1", "2")
        with caplog.at_level(logging.WARNING, "downrange.broker.compiled_sql"):
            for _ in range(3):
                assert await sql.pull("wrong >") == ["1", "2"]
        assert [record.getMessage() for record in caplog.records] == [
            "SQL92 expression cannot be used reason=position 8: a value or a property is expected, not the end "
            "expression='wrong >'"
        ]


async def test_a_group_with_a_wrong_expression_is_refused(tmp_path: Path) -> None:
    async with sql_client(tmp_path) as sql:
        await sql.send("1")
        assert await sql.check("a > 0") is None
        assert await sql.check("a >", expect=PARSE_FAILED) == (
            "position 4: a value or a property is expected, not the end"
        )
        await sql.subscribe("a >")
        assert "Your expression may be wrong" in await sql.refusal(expect=NO_FILTER)
        await sql.subscribe("a > 0")
        assert await sql.pull() == ["1"]
        await sql.subscribe("a >")
        assert "Your expression may be wrong" in await sql.refusal(expect=NO_FILTER)


async def test_a_pull_for_a_newer_expression_than_the_broker_has_is_refused(tmp_path: Path) -> None:
    async with sql_client(tmp_path) as sql:
        await sql.send("1")
        await sql.subscribe("a > 0")
        # Members of one group that disagree: what the newest wants cannot be compiled, an older one brings a filter.
        await sql.client.heartbeat(consume={GROUP: [subscribe(TOPIC, "a >", SQL92, 9)]})
        await sql.client.heartbeat(consume={GROUP: [subscribe(TOPIC, "a > 0", SQL92, 7)]})
        assert "not latest" in await sql.refusal(expect=OLD_FILTER, version=9)


@pytest.mark.parametrize("has_own", [True, False])
async def test_filters_may_be_switched_off(has_own: bool, tmp_path: Path) -> None:
    async with sql_client(tmp_path, {"enable_property_filter": False}) as sql:
        await sql.send("1")
        refusal = "The broker does not support consumer to filter message by SQL92"
        assert await sql.check("a > 0", expect=1) == refusal
        await sql.subscribe("a > 0")
        assert await sql.refusal("a > 0" if has_own else None, expect=1) == refusal


@pytest.mark.parametrize("has_own", [True, False])
async def test_a_waiting_pull_is_woken_by_a_message_it_wants_only(has_own: bool, tmp_path: Path) -> None:
    async with sql_client(tmp_path) as sql:
        await sql.subscribe("a = 2")
        await sql.send("0")
        pull = sql.pull_command("a = 2" if has_own else None, offset=1, wait_millis=30_000)
        waiting = asyncio.ensure_future(sql.client.ask(pull, timeout=40))
        await asyncio.sleep(0)  # the pull is on its way before the messages
        await sql.send("1", "x")
        await sql.check("a = 1")  # whatever the messages set off has happened before this is answered
        assert not waiting.done()
        await sql.send("2")
        reply = await waiting
        assert bodies(reply) == ["2"]
        assert reply.header(PullMessageResponse).next_begin_offset == 4


async def test_bit_maps_change_nothing_but_the_work(tmp_path: Path) -> None:
    clock = ManualClock()
    async with sql_client(tmp_path, BIT_MAPS, WITH_EXT, clock) as sql:
        await sql.send("1", "2")  # before the filter was there
        await sql.subscribe("a = 1")
        known = sql.running.filters.get(TOPIC, GROUP)
        assert known is not None
        clock.tick(0.001)
        await sql.send("1", "2", "1")
        assert await sql.pull() == ["1"] * 3
        state = sql.running.store.queues.get(TOPIC, 0)
        assert state is not None
        assert state.ext is not None
        units = [state.ext.get(address) for _, _, address in ENTRY.iter_unpack(state.queue.read(QueueOffset(0), 5))]
        marked = [unit is not None and unit.bitmap == sql.running.filters.bloom.bitmap(known.mask) for unit in units]
        assert marked == [False, False, True, False, True]
        # A changed expression does not trust bits that spoke of the former one.
        await sql.subscribe("a = 2")
        assert await sql.pull() == ["2"] * 2


async def test_filters_are_kept_over_a_restart(tmp_path: Path) -> None:
    async with sql_client(tmp_path, BIT_MAPS, WITH_EXT) as sql:
        await sql.subscribe("a = 1")
        await sql.send("1", "2")
        first = sql.running.filters.get(TOPIC, GROUP)
    async with sql_client(tmp_path, BIT_MAPS, WITH_EXT) as sql:
        again = sql.running.filters.get(TOPIC, GROUP)
        assert first is not None
        assert again is not None
        assert again.is_dead
        assert dataclasses.replace(again, dead_time=0, expression=first.expression) == first
        await sql.subscribe("a = 1")
        assert await sql.pull() == ["1"]


async def test_a_group_that_leaves_has_its_filter_marked_as_dead(tmp_path: Path) -> None:
    async with sql_client(tmp_path) as sql:
        await sql.subscribe("a = 1")
        await sql.client.call(RequestCode.UNREGISTER_CLIENT, {"clientID": sql.client.client_id, "consumerGroup": GROUP})
        known = sql.running.filters.get(TOPIC, GROUP)
        assert known is not None
        assert known.is_dead


@pytest.mark.parametrize(("supports_retry", "expected"), [(False, ["1", "2"]), (True, ["1"])])
async def test_a_retry_topic_is_filtered_if_so_configured(
    supports_retry: bool, expected: list[str], tmp_path: Path
) -> None:
    async with sql_client(tmp_path, {"filter_support_retry": supports_retry}) as sql:
        retry = f"%RETRY%{GROUP}"
        await sql.subscribe("a = 1", subscribe(retry, "*", version=1))
        for value in ("1", "2"):
            await sql.client.send(retry, value.encode(), properties={"a": value, "RETRY_TOPIC": TOPIC})
        assert await sql.pull(topic=retry, kind="TAG", version=1) == expected
