"""The gRPC port over real sockets: TLS beside plain, flow control, clients that go away, rubbish, access control."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import random
import socket
import ssl
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import hpack
import pytest
import pytest_asyncio

from downrange.auth.access_control import Action
from downrange.auth.plain_accounts import DENY, Permissions, PlainAccount
from downrange.auth.plain_acl import PlainAccessControl
from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.model.topics import SubscriptionGroupConfig, TopicConfig
from downrange.proxy.app import grpc_server
from downrange.proxy.config import ProxyConfig
from downrange.proxy.http2.frames import (
    END_HEADERS,
    END_STREAM,
    HEAD_SIZE,
    PREFACE,
    ErrorCode,
    Kind,
    encode_frame,
    encode_settings,
    encode_window_update,
)
from downrange.proxy.wire import messages as m
from downrange.proxy.wire.enums import ClientType, Code
from downrange.proxy.wire.schema import SERVICE
from tests.support.golden import GOLDEN
from tests.support.grpc_calls import Caller, message, route_request, send_request, settings_command
from tests.support.grpc_cluster import GrpcCluster, grpc_cluster
from tests.support.two_brokers import two_brokers

TOPIC = "GrpcTopic"


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[GrpcCluster]:
    async with grpc_cluster(tmp_path) as running:
        await running.create({TOPIC: "NORMAL"}, [SubscriptionGroupConfig("once", retry_max_times=0)])
        yield running


@pytest.mark.parametrize("tls", [False, True])
async def test_one_port_takes_plain_and_tls(cluster: GrpcCluster, tls: bool) -> None:
    certificate = None
    if tls:
        host, port = cluster.target.split(":")
        certificate = (await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))).encode()
    async with Caller(cluster.target, certificate=certificate) as caller:
        answer = await caller("QueryRoute", route_request(TOPIC))
        assert answer.status.code == Code.OK
        assert [queue.id for queue in answer.message_queues] == [0, 1]
        address = answer.message_queues[0].broker.endpoints.addresses[0]
        assert f"{address.host}:{address.port}" == cluster.target


async def test_the_largest_body_goes_in_and_out(cluster: GrpcCluster) -> None:
    body = random.randbytes(4 * 1024 * 1024)
    async with Caller(cluster.target) as caller:
        sent = await caller("SendMessage", send_request(message(TOPIC, body)))
        assert sent.status.code == Code.OK
        (found,) = await caller.received(TOPIC, "large", poll=5)
        assert found.body == body
        refused = await caller("SendMessage", send_request(message(TOPIC, body + b"x")))
        assert refused.status.code == Code.MESSAGE_BODY_TOO_LARGE


async def test_a_receive_that_was_given_up_takes_no_message(cluster: GrpcCluster) -> None:
    async with Caller(cluster.target) as caller:
        await caller.received(TOPIC, "given-up", poll=0)
        waiting = caller.receive(TOPIC, "given-up", poll=10)
        reading = asyncio.ensure_future(waiting.read())
        await asyncio.sleep(0.3)  # nothing says that the call waits at the broker
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await reading
        await caller("SendMessage", send_request(message(TOPIC, b"for another")))
        (found,) = await caller.received(TOPIC, "given-up", poll=5)
        assert found.system_properties.delivery_attempt == 1


async def test_a_waiting_receive_is_woken_by_a_message(cluster: GrpcCluster) -> None:
    loop = asyncio.get_running_loop()
    async with Caller(cluster.target) as caller:
        await caller.received(TOPIC, "woken", poll=0)
        receiving = asyncio.ensure_future(caller.received(TOPIC, "woken", poll=10))
        await asyncio.sleep(0.3)
        began = loop.time()
        await caller("SendMessage", send_request(message(TOPIC, b"wake up")))
        (found,) = await receiving
        assert found.body == b"wake up"
        assert loop.time() - began < 1


async def test_messages_of_a_push_consumer_that_died_come_again(cluster: GrpcCluster) -> None:
    async with Caller(cluster.target) as caller, Caller(cluster.target) as other:
        telemetry = caller.telemetry()
        await telemetry.write(settings_command(ClientType.PUSH_CONSUMER, TOPIC, "dying"))
        await telemetry.read()
        await caller("SendMessage", send_request(message(TOPIC, b"work")))
        request = m.ReceiveMessageRequest(batch_size=1, auto_renew=True)
        request.group.name = "dying"
        request.message_queue.topic.name = TOPIC
        call = caller.channel.unary_stream(f"/{SERVICE}/ReceiveMessage")
        frames = [m.ReceiveMessageResponse.FromString(data) async for data in call(
            request.SerializeToString(), metadata=caller.metadata, timeout=10)]  # fmt: skip
        assert [frame.WhichOneof("kind") for frame in frames] == ["status", "message", "delivery_timestamp"]
        assert len(cluster.proxy.renewal) == 1
        ending = m.NotifyClientTerminationRequest()
        ending.group.name = "dying"
        assert (await caller("NotifyClientTermination", ending)).status.code == Code.OK
        assert len(cluster.proxy.renewal) == 0
        (again,) = await other.received(TOPIC, "dying", poll=8)
        assert again.system_properties.delivery_attempt == 2


async def test_settings_are_sent_a_second_time(cluster: GrpcCluster) -> None:
    async with Caller(cluster.target) as caller:
        telemetry = caller.telemetry()
        await telemetry.write(settings_command(ClientType.PRODUCER, TOPIC))
        first, second = await telemetry.read(), await telemetry.read()
        assert first == second
        command = m.TelemetryCommand.FromString(first)
        assert command.settings.publishing.max_body_size == 4 * 1024 * 1024
        await telemetry.done_writing()
        assert await telemetry.code() is grpc.StatusCode.OK


# --- operators ----------------------------------------------------------------------------------------------------


async def test_an_operator_reaches_a_consumer_behind_the_port(cluster: GrpcCluster) -> None:
    """Requests 309 and 307 become commands on the telemetry stream."""
    async with Caller(cluster.target) as caller, Admin(ClientConfig.of(cluster.namesrv)) as admin:
        telemetry = caller.telemetry()
        await telemetry.write(settings_command(ClientType.PUSH_CONSUMER, TOPIC, "watched"))
        await telemetry.read()
        await telemetry.read()
        sent = await caller("SendMessage", send_request(message(TOPIC, b"verify me")))
        async with asyncio.timeout(20):
            while not (found := (await admin.groups.connections("watched")).done) or not all(found.values()):
                await asyncio.sleep(0.05)  # until the heartbeat of the port has arrived
        (connection,) = [one for each in found.values() if each is not None for one in each.connection_set]
        verifying = asyncio.ensure_future(
            admin.messages.consume_directly("watched", connection.client_id, sent.entries[0].message_id, TOPIC)
        )
        command = m.TelemetryCommand.FromString(await telemetry.read())
        assert command.verify_message_command.message.body == b"verify me"
        answer = m.TelemetryCommand()
        answer.status.code = Code.FAILED_TO_CONSUME_MESSAGE
        answer.verify_message_result.nonce = command.verify_message_command.nonce
        await telemetry.write(answer.SerializeToString())
        assert (await verifying).consume_result == "CR_LATER"
        asking = asyncio.ensure_future(admin.groups.running_info("watched", connection.client_id, with_stack=True))
        command = m.TelemetryCommand.FromString(await telemetry.read())
        answer = m.TelemetryCommand()
        answer.status.code = Code.OK
        answer.thread_stack_trace.nonce = command.print_thread_stack_trace_command.nonce
        answer.thread_stack_trace.thread_stack_trace = "main at line 1"
        await telemetry.write(answer.SerializeToString())
        assert (await asking).jstack == "main at line 1"


async def test_one_server_serves_all_brokers_of_a_cluster(tmp_path: Path) -> None:
    async with two_brokers(tmp_path) as brokers:
        cluster = ClientConfig((brokers.namesrv,), route_seconds=1.0)
        async with grpc_server(ProxyConfig(port=0), cluster) as proxy, Admin(cluster) as admin:
            (await admin.topics.create(TopicConfig("Everywhere", 2, 2))).raise_if_none()
            async with Caller(f"127.0.0.1:{proxy.port}") as caller:
                route = await caller("QueryRoute", route_request("Everywhere"))
                assert {queue.broker.name for queue in route.message_queues} == {"broker-a", "broker-b"}
                for number in range(8):
                    sent = await caller("SendMessage", send_request(message("Everywhere", b"%d" % number)))
                    assert sent.status.code == Code.OK
                found = []
                for name in ("broker-a", "broker-b"):
                    messages = await caller.received("Everywhere", "all", poll=2, broker=name)
                    assert len(messages) == 4
                    found += messages
                    for one in messages:
                        ack = m.AckMessageRequest()
                        ack.group.name, ack.topic.name = "all", "Everywhere"
                        ack.entries.add().receipt_handle = one.system_properties.receipt_handle
                        assert (await caller("AckMessage", ack)).status.code == Code.OK
                assert sorted(one.body for one in found) == [b"%d" % number for number in range(8)]


# --- rubbish ------------------------------------------------------------------------------------------------------


def captured_requests() -> list[tuple[str, bytes]]:
    found = []
    with tarfile.open(GOLDEN / "grpc-533.tar.xz") as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            for line in file.read().decode().splitlines():
                row = json.loads(line)
                if row["event"] == "c2s" and "b64" in row and len(row["b64"]) < 4000:
                    found.append((row["method"], base64.b64decode(row["b64"])))
    return found


async def test_mutated_requests_are_answered(cluster: GrpcCluster, caplog: pytest.LogCaptureFixture) -> None:
    source = random.Random(5)
    requests = captured_requests()
    async with Caller(cluster.target) as caller:
        for _ in range(400):
            method, data = source.choice(requests)
            if method in ("ReceiveMessage", "Telemetry", "NoSuchMethod"):
                continue
            broken = bytearray(data)
            for _ in range(source.randrange(1, 6)):
                kind, at = source.randrange(3), source.randrange(len(broken) + 1)
                if kind == 0 and broken:
                    broken[min(at, len(broken) - 1)] = source.randrange(256)
                elif kind == 1:
                    broken[at:at] = source.randbytes(source.randrange(1, 9))
                else:
                    del broken[at : at + source.randrange(1, 9)]
            code = grpc.StatusCode.OK
            try:
                await caller.raw(method, bytes(broken))
            except grpc.aio.AioRpcError as error:
                code = error.code()
            assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNIMPLEMENTED)
        assert (await caller("QueryRoute", route_request(TOPIC))).status.code == Code.OK
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


def headers_frame(stream: int, *, method: str = "QueryRoute", flags: int = END_HEADERS, more: Any = ()) -> bytes:
    fields = [
        (":method", "POST"), (":scheme", "http"), (":path", f"/{SERVICE}/{method}"), (":authority", "x"),
        ("content-type", "application/grpc"), ("te", "trailers"), ("x-mq-client-id", "raw"), *more,
    ]  # fmt: skip
    return encode_frame(Kind.HEADERS, flags, stream, hpack.Encoder().encode(fields))


def data_frame(stream: int, data: bytes, flags: int = END_STREAM) -> bytes:
    return encode_frame(Kind.DATA, flags, stream, b"\0" + len(data).to_bytes(4, "big") + data)


HELLO = PREFACE + encode_settings({})
GOOD = HELLO + headers_frame(1) + data_frame(1, route_request(TOPIC).SerializeToString())
WRONG = {
    "HTTP/1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(100),
    "half a preface": PREFACE[:10] + b"x" * 20,
    "remoting": b"\0\0\0\x20\0\0\0\x10" + bytes(28),
    "a TLS record of nothing": b"\x16\x03\x01\0\x05hello" + bytes(100),
    "a frame too large": HELLO + b"\x7f\xff\xff\0\0\0\0\0\1",
    "data of no stream": HELLO + data_frame(7, b"x"),
    "data of stream 0": HELLO + data_frame(0, b"x"),
    "headers of stream 2": HELLO + headers_frame(2),
    "headers of an old stream": HELLO + headers_frame(5) + headers_frame(3),
    "headers that cannot be read": HELLO + encode_frame(Kind.HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"),
    "a continuation of nothing": HELLO + encode_frame(Kind.CONTINUATION, END_HEADERS, 1, b"\x82"),
    "an interrupted header block": HELLO + headers_frame(1, flags=0) + encode_frame(Kind.PING, 0, 0, bytes(8)),
    "endless headers": HELLO + headers_frame(1, flags=0) + 9 * encode_frame(Kind.CONTINUATION, 0, 1, bytes(9000)),
    "a window that grows by nothing": HELLO + encode_window_update(0, 0),
    "a window too large": HELLO + 2 * encode_window_update(0, 0x7FFFFFFF),
    "settings of a wrong size": HELLO + encode_frame(Kind.SETTINGS, 0, 0, b"abc"),
    "a ping of a wrong size": HELLO + encode_frame(Kind.PING, 0, 0, b"abc"),
    "padding without payload": HELLO + headers_frame(1) + encode_frame(Kind.DATA, 8, 1, b"\xff"),
    "a push": HELLO + encode_frame(Kind.PUSH_PROMISE, END_HEADERS, 1, bytes(8)),
    "a reset of nothing": HELLO + encode_frame(Kind.RST_STREAM, 0, 9, bytes(4)),
}


async def send_bytes(target: str, data: bytes, seconds: float = 5) -> bytes:
    """All that the server answers until it closes the connection, or until nothing comes for some time."""
    host, port = target.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    found = b""
    try:
        writer.write(data)
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(seconds):
                while more := await reader.read(65536):
                    found += more
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return found


def kinds(data: bytes) -> list[int]:
    found = []
    while len(data) >= HEAD_SIZE:
        found.append(data[3])
        data = data[HEAD_SIZE + int.from_bytes(data[:3], "big") :]
    return found


@pytest.mark.parametrize("name", WRONG)
async def test_a_connection_that_breaks_the_rules_is_closed(
    cluster: GrpcCluster, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await send_bytes(cluster.target, WRONG[name])
    if answer and answer[0] != 0x15:  # an alert of TLS
        assert kinds(answer)[-1] == Kind.GOAWAY
    async with Caller(cluster.target) as caller:
        assert (await caller("QueryRoute", route_request(TOPIC))).status.code == Code.OK
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_mutated_connections_harm_nobody(cluster: GrpcCluster, caplog: pytest.LogCaptureFixture) -> None:
    source = random.Random(7)
    for _ in range(150):
        broken = bytearray(GOOD)
        for _ in range(source.randrange(1, 5)):
            at = source.randrange(len(PREFACE), len(broken))
            if source.random() < 0.7:
                broken[at] = source.randrange(256)
            else:
                del broken[at : at + source.randrange(1, 20)]
        await send_bytes(cluster.target, bytes(broken), 0.02)
    async with Caller(cluster.target) as caller:
        assert (await caller("QueryRoute", route_request(TOPIC))).status.code == Code.OK
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_request_in_single_bytes_is_answered(cluster: GrpcCluster) -> None:
    host, port = cluster.target.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in GOOD:
        writer.write(bytes((byte,)))
        await asyncio.sleep(0)
    answer = b""
    async with asyncio.timeout(10):
        while b"grpc-status" not in answer:
            answer += await reader.read(65536)
    assert b"broker-a" in answer
    writer.close()


async def test_calls_given_up_in_masses_end_the_connection(cluster: GrpcCluster) -> None:
    resets = b"".join(
        headers_frame(number, method="ReceiveMessage")
        + encode_frame(Kind.RST_STREAM, 0, number, int(ErrorCode.CANCEL).to_bytes(4, "big"))
        for number in range(1, 2 * 1100, 2)
    )
    answer = await send_bytes(cluster.target, HELLO + resets)
    assert kinds(answer)[-1] == Kind.GOAWAY


async def test_a_request_that_is_not_grpc_is_refused(cluster: GrpcCluster) -> None:
    fields = [(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "x")]
    block = hpack.Encoder().encode(fields)
    answer = await send_bytes(
        cluster.target, HELLO + encode_frame(Kind.HEADERS, END_HEADERS | END_STREAM, 1, block), 0.5
    )
    assert b"415" in answer


# --- access control -----------------------------------------------------------------------------------------------


async def test_calls_need_the_signature_and_the_rights_of_an_account(tmp_path: Path) -> None:
    access = PlainAccessControl()
    rights = Permissions(DENY, {TOPIC: frozenset({Action.PUB, Action.SUB})})
    groups = Permissions(DENY, {"allowed": frozenset({Action.SUB})})
    shop = PlainAccount("shop-user", "shop-secret", (), False, rights, groups)
    admin = PlainAccount("admin-user", "admin-secret", (), True, Permissions(DENY, {}), Permissions(DENY, {}))
    access.put({"shop-user": shop, "admin-user": admin}, ())
    audit = tmp_path / "audit.log"
    async with grpc_cluster(tmp_path, {"auditLogFile": audit}, access=access) as cluster:
        cluster.broker.topics.ensure(TOPIC, 2)
        cluster.broker.topics.ensure("Other", 2)
        async with Caller(cluster.target, account=("shop-user", "shop-secret")) as caller:
            async with asyncio.timeout(30):
                while (await caller("QueryRoute", route_request(TOPIC))).status.code == Code.TOPIC_NOT_FOUND:
                    await asyncio.sleep(0.1)  # until the topics are registered
            sent = await caller("SendMessage", send_request(message(TOPIC, b"signed")))
            assert sent.status.code == Code.OK
            (found,) = await caller.received(TOPIC, "allowed", poll=5)
            assert found.body == b"signed"
            refused = await caller("SendMessage", send_request(message("Other", b"signed")))
            assert refused.status.code == Code.UNAUTHORIZED
            frames = [m.ReceiveMessageResponse.FromString(one) async for one in caller.receive(TOPIC, "forbidden")]
            assert [frame.status.code for frame in frames] == [Code.UNAUTHORIZED]
        for account in (("shop-user", "wrong-secret"), ("nobody-known", "shop-secret"), None):
            async with Caller(cluster.target, account=account) as caller:
                answer = await caller("SendMessage", send_request(message(TOPIC, b"not signed")))
                assert answer.status.code == Code.UNAUTHORIZED
                telemetry = caller.telemetry()
                await telemetry.write(settings_command(ClientType.PRODUCER, TOPIC))
                command = m.TelemetryCommand.FromString(await telemetry.read())
                assert command.status.code == Code.UNAUTHORIZED
                assert await telemetry.code() is grpc.StatusCode.OK
    lines = audit.read_text().splitlines()
    assert any("call=SendMessage" in line and "account=shop-user resource=Topic:Other" in line for line in lines)
    assert any("call=ReceiveMessage" in line and "Group:forbidden" in line for line in lines)
    assert any("call=SendMessage" in line and "account=- " in line for line in lines)
    assert "secret" not in audit.read_text()


async def test_guessing_a_password_is_slow(tmp_path: Path) -> None:
    access = PlainAccessControl()
    access.put({}, ())
    loop = asyncio.get_running_loop()
    async with (
        grpc_cluster(tmp_path, access=access) as cluster,
        Caller(cluster.target, account=("shop-user", "guessed")) as caller,
    ):
        longest = 0.0
        for _ in range(25):
            began = loop.time()
            assert (await caller("QueryRoute", route_request(TOPIC))).status.code == Code.UNAUTHORIZED
            longest = max(longest, loop.time() - began)
        assert longest >= 1
        answers = await asyncio.gather(*(caller("QueryRoute", route_request(TOPIC)) for _ in range(20)))
        assert sum("too many failed logins" in answer.status.message for answer in answers) >= 18
