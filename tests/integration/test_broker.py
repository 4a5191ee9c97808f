"""A broker over real sockets: sending, pulling, waiting, stopping."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from downrange.broker.app import RunningBroker
from downrange.compiled import VARIANT
from downrange.model import properties as names
from downrange.model.subscription import subscribe
from downrange.namesrv.app import name_server
from downrange.namesrv.config import NamesrvConfig
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.routes import TopicRouteData
from downrange.protocol.bodies.send import (
    BatchEntry,
    SendMessageRequest,
    SendMessageResponse,
    encode_batch,
    encode_send_v1,
)
from downrange.protocol.codes import RequestCode, ResponseCode, SerializeType
from downrange.protocol.command import Command, request
from downrange.protocol.framing import encode
from downrange.store.config import BrokerRole, FlushDiskType
from downrange.transport.connection import Connection
from downrange.transport.pool import connect
from tests.support.broker_client import BrokerClient, client_of, everything, standalone
from tests.support.fault_proxy import FaultProxy, Way
from tests.support.processes import running
from tests.support.rubbish import nearly_right


async def test_a_message_sent_is_pulled_with_everything_it_had(tmp_path: Path) -> None:
    async with standalone(tmp_path) as running, client_of(running) as client:
        properties = {"KEYS": "k1 k2", "TAGS": "TagA", "UNIQ_KEY": "U1", "WAIT": "true", "colour": "rot\u00e4"}
        sent = await client.send("orders", b"hello", queue_id=1, properties=properties, flag=7)
        assert (sent.queue_id, sent.queue_offset) == (1, 0)
        assert (sent.msg_region, sent.trace_on) == ("DefaultRegion", True)
        (message,), header = await client.pull("orders", queue_id=1)
        assert (message.topic, message.body, message.flag, message.queue_offset) == ("orders", b"hello", 7, 0)
        assert message.offset_message_id == sent.msg_id
        expected = {key: value for key, value in properties.items() if key != "WAIT"} | {"CLUSTER": "DefaultCluster"}
        assert message.properties == expected
        assert (header.next_begin_offset, header.min_offset, header.max_offset) == (1, 0, 1)
        assert message.born_host.host == "127.0.0.1"
        assert message.store_host.port == running.config.broker.listen_port


@pytest.mark.parametrize("kind", SerializeType)
async def test_both_header_encodings_and_both_send_headers_work(tmp_path: Path, kind: SerializeType) -> None:
    async with standalone(tmp_path) as running, client_of(running) as client:
        v2 = client.send_command("orders", b"v2")
        header = v2.header(SendMessageRequest)
        for command in (
            Command(RequestCode.SEND_MESSAGE_V2, raw_ext=v2.raw_ext, body=b"v2", serialize_type=kind),
            Command(RequestCode.SEND_MESSAGE, raw_ext=encode_send_v1(header), body=b"v1", serialize_type=kind),
        ):
            reply = await client.ask(command)
            assert reply.serialize_type == kind
            assert set(reply.ext_fields) == {"msgId", "queueId", "queueOffset", "MSG_REGION", "TRACE_ON"}
        messages, _ = await client.pull("orders")
        assert [message.body for message in messages] == [b"v2", b"v1"]


async def test_a_batch_is_stored_as_messages_of_its_own(tmp_path: Path) -> None:
    async with standalone(tmp_path) as running, client_of(running) as client:
        body = encode_batch([BatchEntry(0, b"one", "TAGS\x01A"), BatchEntry(5, b"two", "KEYS\x01k\x02")])
        command = client.send_command("orders", body, code=RequestCode.SEND_BATCH_MESSAGE, batch=True, queue_id=2)
        answer = (await client.ask(command)).header(SendMessageResponse)
        messages, _ = await client.pull("orders", queue_id=2)
        assert [(m.body, m.flag, m.queue_offset) for m in messages] == [(b"one", 0, 0), (b"two", 5, 1)]
        assert answer.msg_id == ",".join(message.offset_message_id for message in messages)
        assert messages[0].properties == {"TAGS": "A", "CLUSTER": "DefaultCluster"}
        assert messages[1].properties == {"KEYS": "k", "CLUSTER": "DefaultCluster"}
        for wrong in (b"", body[:-1], b"\x00" * 40, b"\xff" * 50):
            await client.ask(
                client.send_command("orders", wrong, code=RequestCode.SEND_BATCH_MESSAGE, batch=True),
                ResponseCode.MESSAGE_ILLEGAL if wrong == b"" else ResponseCode.SYSTEM_ERROR,
            )


async def test_a_held_pull_is_answered_the_moment_a_message_arrives(tmp_path: Path) -> None:
    async with standalone(tmp_path) as running, client_of(running) as client, client_of(running) as other:
        await client.send("orders", b"first")
        for number in range(1, 6):
            # So long that its time is not over before this test's.
            held = client.connection.request_nowait(client.pull_command("orders", offset=number, wait_millis=600_000))
            await client.call(RequestCode.GET_MAX_OFFSET, {"topic": "orders", "queueId": 0})  # by now the pull waits
            assert not held.done()
            await other.send("orders", b"next")
            assert (await asyncio.wait_for(held, 30)).code == ResponseCode.SUCCESS


async def test_a_held_pull_ends_empty_when_its_time_is_over(tmp_path: Path) -> None:
    async with standalone(tmp_path) as running, client_of(running) as client:
        await client.send("orders", b"first")
        start = time.perf_counter()
        _, header = await client.pull("orders", offset=1, wait_millis=300, expect=ResponseCode.PULL_NOT_FOUND)
        assert time.perf_counter() - start >= 0.29
        assert (header.next_begin_offset, header.max_offset) == (1, 1)


async def test_a_held_pull_with_tags_is_not_woken_by_others(tmp_path: Path) -> None:
    async with standalone(tmp_path) as running, client_of(running) as client, client_of(running) as other:
        await other.send("orders", b"0", properties={"TAGS": "A"})
        held = client.connection.request_nowait(
            client.pull_command("orders", offset=1, tags="B || C", wait_millis=60_000)
        )
        await other.send("orders", b"1", properties={"TAGS": "A"})
        await asyncio.sleep(0.1)
        assert not held.done()
        await other.send("orders", b"2", properties={"TAGS": "C"})
        reply = await asyncio.wait_for(held, 30)
        assert reply.code == ResponseCode.SUCCESS
        messages, _ = await client.pull("orders", tags="B || C")
        assert [message.body for message in messages] == [b"2"]
        _, header = await client.pull("orders", tags="Z", expect=ResponseCode.PULL_RETRY_IMMEDIATELY)
        assert header.next_begin_offset == 3


async def test_a_client_that_goes_away_leaves_no_held_pull(tmp_path: Path) -> None:
    async with standalone(tmp_path) as running, client_of(running) as client:
        await client.send("orders", b"first")
        gone = await connect(f"127.0.0.1:{running.config.broker.listen_port}")
        for _ in range(3):
            gone.request_nowait(client.pull_command("orders", offset=1, wait_millis=15_000)).cancel()
        await client.send("other", b"x")
        gone.abort()
        await client.send("orders", b"second")
        messages, _ = await client.pull("orders", offset=1)
        assert [message.body for message in messages] == [b"second"]


async def test_pull_codes_and_next_offsets(tmp_path: Path) -> None:
    async with standalone(tmp_path) as running, client_of(running) as client:
        for number in range(3):
            await client.send("orders", b"%d" % number)
        for offset, code, next_offset in (
            (0, ResponseCode.SUCCESS, 3),
            (3, ResponseCode.PULL_NOT_FOUND, 3),
            (4, ResponseCode.PULL_OFFSET_MOVED, 3),
            (-1, ResponseCode.PULL_OFFSET_MOVED, 0),
        ):
            _, header = await client.pull("orders", offset=offset, expect=code)
            assert (header.next_begin_offset, header.suggest_which_broker_id) == (next_offset, 0)
        await client.pull("orders", queue_id=1, expect=ResponseCode.PULL_NOT_FOUND)
        await client.pull("orders", queue_id=1, offset=9, expect=ResponseCode.PULL_OFFSET_MOVED)
        (event, *_), _ = await client.pull("OFFSET_MOVED_EVENT")
        assert event.tags == "consumers"
        assert b'"offsetRequest":4' in event.body


@pytest.mark.parametrize(
    ("options", "code", "remark"),
    [
        ({"topic": "nowhere"}, ResponseCode.TOPIC_NOT_EXIST, "topic[nowhere] not exist, apply first please!"),
        ({"queue_id": 99}, ResponseCode.SYSTEM_ERROR, "queueId[99] is illegal, topic:[orders]"),
        ({"queue_id": -1}, ResponseCode.SYSTEM_ERROR, "queueId[-1] is illegal"),
        ({"with_subscription": False}, ResponseCode.SUBSCRIPTION_NOT_EXIST, "the consumer's group info not exist"),
        ({"group": "not legal"}, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, "subscription group [not legal]"),
    ],
)
async def test_pulls_that_are_refused(tmp_path: Path, options: dict[str, object], code: int, remark: str) -> None:
    async with standalone(tmp_path) as running, client_of(running) as client:
        await client.send("orders", b"x")
        reply = await client.ask(client.pull_command(**{"topic": "orders", **options}), code)  # type: ignore[arg-type]
        assert remark in (reply.remark or "")


async def test_the_subscription_of_the_heartbeat_counts(tmp_path: Path) -> None:
    async with standalone(tmp_path) as running, client_of(running) as client:
        await client.send("orders", b"a", properties={"TAGS": "A"})
        await client.send("orders", b"b", properties={"TAGS": "B"})
        await client.heartbeat(consume={"consumers": [subscribe("orders", "B", version=5)]})
        messages, _ = await client.pull("orders", with_subscription=False)
        assert [message.body for message in messages] == [b"b"]
        newer = client.pull_command("orders", with_subscription=False)
        fields = {**newer.ext_fields, "subVersion": "6"}
        await client.ask(request(RequestCode.PULL_MESSAGE, ext_fields=fields), ResponseCode.SUBSCRIPTION_NOT_LATEST)
        await client.ask(client.pull_command("TBW102", with_subscription=False), ResponseCode.SUBSCRIPTION_NOT_EXIST)


@pytest.mark.parametrize(
    ("topic", "options", "code", "remark"),
    [
        ("", {}, 1, "The specified topic is blank."),
        ("../../x", {}, 1, "illegal characters"),
        ("x" * 128, {}, 1, "longer than topic max length"),
        ("SCHEDULE_TOPIC_XXXX", {}, 16, "Sending message to topic[SCHEDULE_TOPIC_XXXX] is forbidden."),
        ("RMQ_SYS_TRANS_HALF_TOPIC", {}, 16, "is forbidden"),
        ("new", {"default_topic": "nowhere"}, 17, "topic[new] not exist, apply first please!"),
        ("orders", {"queue_id": 99}, 1, "request queueId[99] is illegal, TopicConfig [topicName=orders"),
        ("orders", {"properties": {"p": "x" * 40_000}}, 13, "the message is illegal"),
    ],
)
async def test_sends_that_are_refused(
    tmp_path: Path, topic: str, options: dict[str, object], code: int, remark: str
) -> None:
    async with standalone(tmp_path) as running, client_of(running) as client:
        await client.send("orders", b"x")
        before = running.store.max_offset
        reply = await client.ask(client.send_command(topic, b"x", **options), code)  # type: ignore[arg-type]
        assert remark in (reply.remark or "")
        assert set(reply.ext_fields) == {"MSG_REGION", "TRACE_ON"}
        assert running.store.max_offset == before
        assert not (tmp_path / "x").exists()


async def test_a_body_above_the_limit_is_refused(tmp_path: Path) -> None:
    async with standalone(tmp_path, store_options={"max_message_size": 1000}) as running, client_of(running) as client:
        await client.send("orders", b"x" * 1000)
        reply = await client.ask(client.send_command("orders", b"x" * 1001), ResponseCode.MESSAGE_ILLEGAL)
        assert "msg body length limit 1000B" in (reply.remark or "")


@pytest.mark.parametrize("code", [RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE])
async def test_a_new_topic_is_known_to_the_name_server_when_its_first_message_is_answered(
    tmp_path: Path, code: RequestCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("downrange.broker.handlers.sends._WAIT_FOR_NAMESRV_SECONDS", 30)  # a busy machine is slow, too
    async with name_server_far_away(tmp_path) as (running, way, namesrv), client_of(running) as client:
        way.delay_seconds = 0.1
        is_batch = code == RequestCode.SEND_BATCH_MESSAGE
        body = encode_batch([BatchEntry(0, b"x", "")]) if is_batch else b"x"
        await client.ask(
            client.send_command("fresh", body, code=code, batch=is_batch or None, default_topic_queue_nums=3)
        )
        config = running.topics.get("fresh")
        assert config is not None
        assert (config.read_queue_nums, config.write_queue_nums, config.perm) == (3, 3, 6)
        reply = await namesrv.request(request(RequestCode.GET_ROUTEINFO_BY_TOPIC, ext_fields={"topic": "fresh"}), 5)
        assert reply.code == 0, reply.remark
        (broker_data,) = decode_body(TopicRouteData, reply.body_bytes).broker_datas
        assert broker_data.master_address == running.config.broker.address


async def test_a_name_server_that_does_not_answer_holds_up_the_first_message_alone_and_not_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with name_server_far_away(tmp_path) as (running, way, _), client_of(running) as client:
        await client.send("known", b"x")
        way.freeze()
        start = time.perf_counter()
        await client.send("fresh", b"x")
        assert time.perf_counter() - start > 0.4
        monkeypatch.setattr("downrange.broker.handlers.sends._WAIT_FOR_NAMESRV_SECONDS", 60)  # who waits now, gives up
        await client.send("fresh", b"x")
        await client.send("known", b"x")
        way.thaw()


@asynccontextmanager
async def name_server_far_away(root: Path) -> AsyncIterator[tuple[RunningBroker, Way, Connection]]:
    """A broker, its way to its name server, and a connection of ours to that."""
    names = NamesrvConfig(listen_port=0, kv_config_path=root / "kv.json", config_store_path=root / "ns.properties")
    async with (
        name_server(names) as namesrv,
        FaultProxy(("127.0.0.1", namesrv.port)) as proxy,
        standalone(root, broker_options={"namesrv_addr": f"127.0.0.1:{proxy.port}"}) as running,
    ):
        near = await connect(f"127.0.0.1:{namesrv.port}")
        yield running, proxy.to_server, near
        await near.drain(1)


async def test_a_negative_queue_id_lets_the_broker_choose(tmp_path: Path) -> None:
    async with standalone(tmp_path) as running, client_of(running) as client:
        chosen = {(await client.send("orders", b"x", queue_id=-1)).queue_id for _ in range(60)}
        assert chosen == {0, 1, 2, 3}


async def test_many_messages_come_back_whole_and_in_order(tmp_path: Path) -> None:
    async with standalone(tmp_path) as running, client_of(running) as client:
        bodies = [os.urandom(1 + number * 37 % 3000) for number in range(3000)]
        await asyncio.gather(*(client.send("orders", body, queue_id=number % 4) for number, body in enumerate(bodies)))
        found: list[bytes] = []
        for queue_id in range(4):
            offset = 0
            expected = bodies[queue_id::4]
            received: list[bytes] = []
            while len(received) < len(expected):
                messages, header = await client.pull("orders", queue_id=queue_id, offset=offset)
                assert [m.queue_offset for m in messages] == list(range(offset, offset + len(messages)))
                received += [message.body for message in messages]
                offset = header.next_begin_offset
            assert received == expected
            found += received
        assert len(found) == 3000


async def test_sync_flush_answers_after_the_disk(tmp_path: Path) -> None:
    options = {"flush_disk_type": FlushDiskType.SYNC_FLUSH}
    async with standalone(tmp_path, store_options=options) as running, client_of(running) as client:
        await asyncio.gather(*(client.send("orders", b"x%d" % number) for number in range(200)))
        assert running.store.flushed_offset == running.store.max_offset
        await client.send("orders", b"no hurry", properties={names.WAIT: "false"})


async def test_the_vip_port_serves_everything_but_pulls(tmp_path: Path) -> None:
    async with standalone(tmp_path) as running:
        connection = await connect(f"127.0.0.1:{running.config.broker.listen_port - 2}")
        vip = BrokerClient(connection, "vip@1")
        await vip.send("orders", b"x")
        await vip.ask(vip.pull_command("orders"), ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
        await vip.call(RequestCode.GET_ALL_TOPIC_CONFIG)
        await connection.drain(1)


async def test_offsets_topics_and_messages_survive_a_restart(tmp_path: Path) -> None:
    async with standalone(tmp_path) as running, client_of(running) as client:
        await client.send("orders", b"kept", properties={"KEYS": "k"})
        await client.pull("orders", commit=1)
        await client.heartbeat(consume={"consumers": [everything("orders")]})
    assert not (tmp_path / "store" / "abort").exists()
    async with standalone(tmp_path) as running, client_of(running) as client:
        assert running.store.recovery.clean
        messages, _ = await client.pull("orders")
        assert [message.body for message in messages] == [b"kept"]
        fields = {"consumerGroup": "consumers", "topic": "orders", "queueId": 0}
        reply = await client.call(RequestCode.QUERY_CONSUMER_OFFSET, fields)
        assert reply.ext_fields["offset"] == "1"
        assert "%RETRY%consumers" in running.topics


async def test_stopping_answers_held_pulls(tmp_path: Path) -> None:
    async with standalone(tmp_path) as running:
        connection = await connect(f"127.0.0.1:{running.config.broker.listen_port}")
        client = BrokerClient(connection, "c@1")
        await client.send("orders", b"x")
        held = connection.request_nowait(client.pull_command("orders", offset=1, wait_millis=15_000))
        await asyncio.sleep(0.05)
    assert (await asyncio.wait_for(held, 30)).code == ResponseCode.PULL_NOT_FOUND


async def test_unknown_requests_are_refused_by_number(tmp_path: Path) -> None:
    async with standalone(tmp_path) as running, client_of(running) as client:
        reply = await client.call(9999, expect=ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
        assert reply.remark == " request type 9999 not supported"
        reply = await client.call(RequestCode.SEND_MESSAGE_V2, {"a": "g"}, expect=1)
        assert reply.remark == "missing required field 'b'"


async def test_a_sync_master_without_slaves_says_that_there_is_no_second_copy(tmp_path: Path) -> None:
    options = {"broker_role": BrokerRole.SYNC_MASTER}
    async with standalone(tmp_path, store_options=options) as running, client_of(running) as client:
        reply = await client.ask(client.send_command("orders", b"x"), ResponseCode.SLAVE_NOT_AVAILABLE)
        assert reply.header(SendMessageResponse).queue_offset == 0
        await client.send("orders", b"no hurry", properties={names.WAIT: "false"})
        messages, _ = await client.pull("orders")
        assert len(messages) == 2


@pytest.mark.parametrize(("data", "told"), [("file/data", "file is a file"), ("/proc/nowhere", "cannot ")])
def test_a_data_directory_that_cannot_be_used_is_one_line(tmp_path: Path, data: str, told: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    ports = ("--namesrv-port", "0", "--broker-port", "0", "--metrics-port", "-1", "--grpc-port", "-1")
    with running("standalone", "--data", str(tmp_path / data), *ports) as process:
        assert process.wait() in (1, 2)
        (line,) = process.errors.splitlines()
        assert line.startswith("downrange: ")
        assert told in line


async def test_the_first_line_of_a_log_says_whether_the_server_is_compiled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with standalone(tmp_path) as running:
            namesrv_port = (running.config.broker.namesrv_addr or "").rpartition(":")[2]
    lines = [(record.name, record.getMessage()) for record in caplog.records if record.name.startswith("downrange")]
    assert lines[:2] == [
        ("downrange.namesrv.app", f"name server started port={namesrv_port} variant={VARIANT}"),
        ("downrange.broker.app", f"broker starting name=broker-a variant={VARIANT}"),
    ]


async def test_clients_that_leave_are_freed_without_the_garbage_collector(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a broker with thousands of connections pauses, again and again, to look for those that were closed."""
    frames = [encode(command, opaque) for opaque, command in enumerate(nearly_right(random.Random(22)))]
    made: weakref.WeakSet[Connection] = weakref.WeakSet()
    caplog.set_level(logging.CRITICAL)  # errors that are kept hold the connections that they are about
    async with standalone(tmp_path) as running, client_of(running) as last:
        address = "127.0.0.1", running.config.broker.listen_port
        gc.collect()
        gc.disable()
        try:
            async with client_of(running, "client@2") as client:
                await client.heartbeat(consume={"billing": [everything("orders")]}, produce=("shop",))
                await client.send("orders", b"x")
                client.connection.oneway(client.pull_command("orders", offset=9, wait_millis=600_000))
                await client.send("orders", b"y")
                made.update(running.server.connections)
                assert len(made) == 2
            for first in range(0, len(frames), 50):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(b"".join(frames[first : first + 50]) + b"\xff" * 8)  # no frame begins so
                await reader.read(1)
                made.update(running.server.connections)
                with suppress(ConnectionResetError):
                    await reader.read()
                writer.close()
            await last.send("orders", b"z")  # a broker knows who asked it last
            async with asyncio.timeout(30):
                while len(made) > 1:
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()
