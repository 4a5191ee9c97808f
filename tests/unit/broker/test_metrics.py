from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from downrange.broker.clients import Client, ConsumerGroup
from downrange.broker.config import BrokerConfig
from downrange.broker.json_file import JsonFile
from downrange.broker.live_config import LiveConfig
from downrange.broker.metrics import MetricSources, MetricsServer, ReplicaFigures, Traffic
from downrange.broker.metrics_collector import BrokerCollector
from downrange.broker.pop.leases import Leases
from downrange.broker.statistics import Statistics
from downrange.broker.tables import Tables
from downrange.broker.timer_metrics import TimerMetrics
from downrange.clock import ManualClock
from downrange.model.histogram import Histogram
from downrange.protocol.bodies.offsets import ConsumerOffsets
from downrange.store.config import StoreConfig
from downrange.transport.connection import Connection
from downrange.transport.errors import ListenFailed
from downrange.transport.http_pages import MAX_CONNECTIONS, HttpReply, HttpServer
from tests.unit.broker.counted_puts import put

NOW = 1_794_732_390_000
DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"


class FakeStore:
    """Queue 0 of topic A holds offsets 10 to 99, one message a second, the newest stored just now."""

    def __init__(self) -> None:
        self.min_offset, self.max_offset, self.flushed_offset = 1000, 5000, 4500
        self.dispatch_behind_bytes = 120
        self.earliest_store_time = NOW - 60_000
        self.refusals: dict[str, str] = {}

    def min_offset_of(self, topic: str, queue_id: int) -> int:
        return 10 if (topic, queue_id) == ("A", 0) else 0

    def max_offset_of(self, topic: str, queue_id: int) -> int:
        return 100 if (topic, queue_id) == ("A", 0) else 0

    def store_time_of(self, topic: str, queue_id: int, queue_offset: int) -> int:
        return NOW - (99 - queue_offset) * 1000 if (topic, queue_id) == ("A", 0) else -1


class FakeOffsets:
    def __init__(self, table: dict[str, dict[int, int]]) -> None:
        self._table = table

    def table(self) -> ConsumerOffsets:
        return ConsumerOffsets(offset_table=self._table)


def client(name: str, language: int = 0, version: int = 409) -> Client:
    return Client(cast(Connection, object()), name, language, version, NOW)


class Family:
    """A family of requests that has served none."""

    accelerated = not_accelerated = 0


class FakeTimer:
    """Timer messages: three wait, two of them since too long."""

    enqueue_behind = 7
    enqueue_behind_millis = 80
    read_behind_millis = 900

    def __init__(self, root: Path) -> None:
        self.metrics = TimerMetrics(JsonFile(root / "timermetrics"), ManualClock(NOW))
        for _ in range(4):
            self.metrics.enqueued("A")
        self.metrics.dequeued("A")

    def count_within(self, seconds: int) -> int:
        return seconds // 60

    def count_overdue(self) -> int:
        return 2


class FakePop:
    checkpoints = 5
    acknowledgements = 4
    overdue_millis = 0

    def __init__(self) -> None:
        self.revived = Counter({("A", "g"): 3})
        self.scan_millis = Histogram((1, 10))
        self.leases = Leases()

    def needed_records(self) -> dict[int, tuple[int, int]]:
        return {0: (7, 9)}


class FakeGrpc:
    """A gRPC server with one connection of a producer, which has sent nothing."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], Histogram] = {}
        self.connections = 1
        self.clients = {"producer": 1}


class Broker:
    """The parts a metrics server reads, to be filled by a test."""

    def __init__(self) -> None:
        self.clock = ManualClock(NOW)
        self.statistics = Statistics(NOW)
        self.store = FakeStore()
        self.sends, self.pulls = Family(), Family()
        self.consumers: list[ConsumerGroup] = []
        self.producers: list[tuple[str, list[Client]]] = []
        self.offsets: dict[str, dict[int, int]] = {}
        self.metrics_port = 0
        self.half_messages: Callable[[], Mapping[str, int]] | None = None
        self.slave_lags: Callable[[], Mapping[str, int]] | None = None
        self.timer: FakeTimer | None = None

    def server(self) -> MetricsServer:
        config = BrokerConfig(broker_name="broker-a", broker_permission=6, metrics_port=self.metrics_port)
        tables = SimpleNamespace(
            topics=["A", "B", "C"],
            groups=["g", "h"],
            offsets=FakeOffsets(self.offsets),
            consumers=self.consumers,
            producers=self.producers,
        )
        families = {"sends": self.sends, "pulls": self.pulls}
        traffic = Traffic(
            self.statistics,
            families,
            self.half_messages,
            self.slave_lags,
            lambda: {"login": 2},
            lambda: ReplicaFigures("MASTER", 3, 2, 1.5, 1),
            FakePop(),
        )
        live = LiveConfig(config, StoreConfig())
        return MetricsServer(MetricSources(live, self.store, cast(Tables, tables), traffic, self.clock, self.timer))

    async def scrape(self) -> str:
        async with serving(self.server()) as port:
            status, headers, body = await get(port, "/metrics")
        assert status == 200
        assert headers["content-type"].startswith("text/plain; version=")
        return body.decode()

    async def samples(self, name: str) -> dict[frozenset[tuple[str, str]], float]:
        """Samples of one name without the labels that all have; those are checked here."""
        found = {}
        for sample in parse(await self.scrape()):
            if sample.name == name:
                labels = dict(sample.labels)
                assert labels.pop("cluster") == "DefaultCluster"
                assert labels.pop("node_type") == "broker"
                assert labels.pop("node_id") == "broker-a"
                found[frozenset(labels.items())] = sample.value
        return found


@pytest.fixture
def broker() -> Broker:
    return Broker()


@asynccontextmanager
async def serving(server: MetricsServer) -> AsyncIterator[int]:
    await server.start()
    try:
        assert server.port is not None
        yield server.port
    finally:
        await server.stop()


async def exchange(port: int, request: bytes) -> bytes:
    """What a client gets that sends these bytes and waits for the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return await reader.read()
    finally:
        writer.close()


async def get(port: int, path: str) -> tuple[int, dict[str, str], bytes]:
    head, _, body = (await exchange(port, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())).partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    assert int(headers["content-length"]) == len(body)
    return int(first.split(" ")[1]), headers, body


def parse(text: str) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def labels(**values: str) -> frozenset[tuple[str, str]]:
    return frozenset(values.items())


def of_broker() -> str:
    """The part of the reference page that is about brokers."""
    return DOCUMENT.read_text("utf-8").partition("## Metrics of a proxy")[0]


def documented() -> dict[str, str]:
    """Name -> type of every metric of a broker in the reference page."""
    rows = re.findall(r"^\| `((?:rocketmq|downrange)_\w+)` \| (\w+)", of_broker(), re.MULTILINE)
    return dict(rows)


async def test_every_documented_metric_is_there_with_its_type_and_no_other(broker: Broker) -> None:
    types = re.findall(r"^# TYPE ((?:rocketmq|downrange)_\w+) (\w+)$", await broker.scrape(), re.MULTILINE)
    assert len(types) == len(dict(types))
    assert dict(types) == documented()


async def test_timer_messages(broker: Broker, tmp_path: Path) -> None:
    broker.timer = FakeTimer(tmp_path)
    of_topic = frozenset({("topic", "A")})
    assert await broker.samples("rocketmq_timing_messages") == {of_topic: 3}
    assert await broker.samples("rocketmq_timer_enqueue_total") == {of_topic: 4}
    assert await broker.samples("rocketmq_timer_dequeue_total") == {of_topic: 1}
    assert await broker.samples("rocketmq_timer_enqueue_lag") == {frozenset(): 7}
    assert await broker.samples("rocketmq_timer_dequeue_lag") == {frozenset(): 2}
    assert await broker.samples("rocketmq_timer_dequeue_latency") == {frozenset(): 900}
    snapshot = await broker.samples("rocketmq_timer_message_snapshot")
    assert snapshot[frozenset({("timer_bound_s", "300")})] == 5
    assert len(snapshot) == 8


async def test_documented_labels_are_the_labels(broker: Broker, tmp_path: Path) -> None:
    broker.timer = FakeTimer(tmp_path)
    statistics = broker.statistics
    put(statistics, "A", 1, 100)
    statistics.got("A", "g", 1, 100)
    statistics.sent_to_dlq("g")
    statistics.committed("A")
    statistics.rolled_back("A")
    statistics.rpc(310, 0, 1.0)
    statistics.grpc = FakeGrpc()
    broker.producers = [("p", [client("p1")])]
    broker.consumers = [ConsumerGroup("g", "CONSUME_PASSIVELY", "CLUSTERING", "", {}, _members(client("c1")))]
    broker.offsets = {"A@g": {0: 50}}
    broker.half_messages = lambda: {"A": 1}
    broker.slave_lags = lambda: {"10.0.0.2:42911": 8}
    text = await broker.scrape()
    wanted = {
        name: {part.strip() for part in row.split(",") if part.strip()}
        for name, row in re.findall(r"^\| `((?:rocketmq|downrange)_\w+)` \|[^|]*\|([^|]*)\|", of_broker(), re.MULTILINE)
    }
    common = {"cluster", "node_type", "node_id", "le", "storage_type", "storage_medium"}
    for sample in parse(text):
        if sample.name.startswith(("rocketmq_", "downrange_")):
            name = re.sub(r"_(bucket|count|sum)$", "", sample.name)
            assert sample.labels.keys() - common == wanted.pop(name, sample.labels.keys() - common), name
    assert wanted == {}  # each had a sample


def _members(*clients: Client) -> dict[Connection, Client]:
    return {one.connection: one for one in clients}


async def test_incoming_messages_by_topic(broker: Broker) -> None:
    put(broker.statistics, "A", 3, 900)
    put(broker.statistics, "A", 1, 5000)
    put(broker.statistics, "SCHEDULE_TOPIC_XXXX", 1, 100)
    assert await broker.samples("rocketmq_messages_in_total") == {
        labels(topic="A", message_type="normal", is_system="false"): 4,
        labels(topic="SCHEDULE_TOPIC_XXXX", message_type="normal", is_system="true"): 1,
    }
    sizes = await broker.samples("rocketmq_throughput_in_total")
    assert sizes[labels(topic="A", message_type="normal", is_system="false")] == 5900


async def test_requests_that_a_compiled_step_has_served_and_those_that_it_has_not(broker: Broker) -> None:
    broker.sends.accelerated, broker.sends.not_accelerated, broker.pulls.accelerated = 7, 2, 1
    for name, counts in (("accelerated", (7, 1)), ("not_accelerated", (2, 0))):
        assert await broker.samples(f"downrange_requests_{name}_total") == {
            labels(family="sends"): counts[0],
            labels(family="pulls"): counts[1],
        }


async def test_message_sizes_accumulate(broker: Broker) -> None:
    put(broker.statistics, "A", 2, 2048)
    put(broker.statistics, "A", 1, 5000)
    buckets = await broker.samples("rocketmq_message_size_bucket")
    ends = {dict(key)["le"]: value for key, value in buckets.items()}
    assert ends == {"1024": 2, "4096": 2, "524288": 3, "1048576": 3, "2097152": 3, "4194304": 3, "+Inf": 3}
    assert await broker.samples("rocketmq_message_size_sum") == {labels(topic="A", is_system="false"): 7048}
    assert await broker.samples("rocketmq_message_size_count") == {labels(topic="A", is_system="false"): 3}


async def test_outgoing_messages_by_topic_and_group(broker: Broker) -> None:
    broker.statistics.got("A", "g", 32, 9000)
    broker.statistics.got("%RETRY%g", "g", 1, 100)
    broker.statistics.got("A", "CID_RMQ_SYS_TRANS", 1, 100)
    broker.statistics.sent_to_dlq("g")
    broker.statistics.sent_to_dlq("g")
    assert await broker.samples("rocketmq_messages_out_total") == {
        labels(topic="A", consumer_group="g", is_retry="false", is_system="false"): 32,
        labels(topic="%RETRY%g", consumer_group="g", is_retry="true", is_system="false"): 1,
        labels(topic="A", consumer_group="CID_RMQ_SYS_TRANS", is_retry="false", is_system="true"): 1,
    }
    dead = await broker.samples("rocketmq_send_to_dlq_messages_total")
    assert dead == {labels(consumer_group="g", is_system="false"): 2}


async def test_lag_is_what_a_group_has_not_consumed(broker: Broker) -> None:
    group = {"is_retry": "false", "is_system": "false"}
    broker.offsets = {"A@done": {0: 100}, "A@behind": {0: 90, 1: 0}, "A@expired": {0: 3}, "A@ahead": {0: 120}}
    expected = {"done": (0, 0), "behind": (10, 9000), "expired": (90, 89_000), "ahead": (0, 0)}
    for position, name in enumerate(("rocketmq_consumer_lag_messages", "rocketmq_consumer_lag_latency")):
        assert await broker.samples(name) == {
            labels(topic="A", consumer_group=key, **group): value[position] for key, value in expected.items()
        }
    ready = await broker.samples("rocketmq_consumer_ready_messages")
    assert ready[labels(topic="A", consumer_group="behind", **group)] == 10


async def test_connections_by_language_and_version(broker: Broker) -> None:
    broker.producers = [("p", [client("p1"), client("p2", language=3)]), ("q", [client("q1")])]
    members = _members(client("c1"), client("c2"))
    broker.consumers = [ConsumerGroup("g", "CONSUME_ACTIVELY", "CLUSTERING", "", {}, members)]
    assert await broker.samples("rocketmq_producer_connections") == {
        labels(language="java", version="409", protocol_type="remoting"): 2,
        labels(language="python", version="409", protocol_type="remoting"): 1,
    }
    ((key, count),) = (await broker.samples("rocketmq_consumer_connections")).items()
    assert count == 2
    assert dict(key) == {
        "consumer_group": "g",
        "consume_mode": "pull",
        "language": "java",
        "version": "409",
        "protocol_type": "remoting",
        "is_system": "false",
    }


async def test_storage_figures(broker: Broker) -> None:
    values = {sample.name: sample.value for sample in parse(await broker.scrape())}
    assert values["rocketmq_storage_size"] == 4000
    assert values["rocketmq_storage_flush_behind_bytes"] == 500
    assert values["rocketmq_storage_dispatch_behind_bytes"] == 120
    assert values["rocketmq_storage_message_reserve_time"] == 60_000
    assert values["rocketmq_topic_number"] == 3
    assert values["rocketmq_consumer_group_number"] == 2
    assert values["rocketmq_broker_permission"] == 6
    broker.store.min_offset, broker.store.max_offset, broker.store.flushed_offset = -1, 0, 0
    broker.store.earliest_store_time = -1
    values = {sample.name: sample.value for sample in parse(await broker.scrape())}
    assert values["rocketmq_storage_size"] == 0
    assert "rocketmq_storage_message_reserve_time" not in values


async def test_requests_and_delays_as_histograms(broker: Broker) -> None:
    broker.statistics.rpc(310, 0, 0.4)
    broker.statistics.rpc(310, 0, 4.0)
    broker.statistics.rpc(9999, 777, 1.0)
    broker.statistics.delayed(61, 1)
    assert await broker.samples("rocketmq_rpc_latency_count") == {
        labels(request_code="send_message_v2", response_code="success", protocol_type="remoting"): 2,
        labels(request_code="9999", response_code="777", protocol_type="remoting"): 1,
    }
    delays = await broker.samples("rocketmq_delay_message_latency_bucket")
    assert [value for key, value in delays.items() if dict(key)["le"] in ("60", "600")] == [0, 1]


async def test_names_of_any_kind_survive_the_text(broker: Broker) -> None:
    topic = 'odd"name\\with\nlines and ünicode'
    put(broker.statistics, topic, 1, 100)
    (key,) = await broker.samples("rocketmq_messages_in_total")
    assert dict(key)["topic"] == topic


async def test_counters_only_grow_over_scrapes(broker: Broker) -> None:
    async with serving(broker.server()) as port:
        seen = []
        for _ in range(3):
            put(broker.statistics, "A", 2, 200)
            _, _, body = await get(port, "/metrics?x=1")
            seen += [one.value for one in parse(body.decode()) if one.name == "rocketmq_messages_in_total"]
    assert seen == [2, 4, 6]


async def test_several_scrapers_at_once_get_the_same_page(broker: Broker) -> None:
    put(broker.statistics, "A", 1, 100)
    async with serving(broker.server()) as port:
        answers = await asyncio.gather(*(get(port, "/metrics") for _ in range(8)))
    pages = {re.sub(rb"(?m)^(# \w+ )?process_.*\n", b"", body) for _, _, body in answers}
    assert len(pages) == 1


async def test_the_process_is_measured_too(broker: Broker) -> None:
    assert "\nprocess_resident_memory_bytes " in await broker.scrape()


def test_a_broker_starts_without_the_prometheus_library() -> None:
    code = "import sys, downrange.broker.metrics; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Health.


async def test_a_healthy_broker(broker: Broker) -> None:
    broker.clock.tick(86.5)
    async with serving(broker.server()) as port:
        status, headers, body = await get(port, "/healthz")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(body) == {
        "status": "ok",
        "broker": "broker-a",
        "role": "ASYNC_MASTER",
        "storeWritable": True,
        "reasons": [],
        "uptimeSeconds": 86,
    }


async def test_a_store_that_refuses_messages_is_unhealthy_and_says_why(broker: Broker) -> None:
    broker.store.refusals = {"disk full": "the disk is too full"}
    async with serving(broker.server()) as port:
        status, _, body = await get(port, "/healthz")
        assert status == 503
        health = json.loads(body)
        assert (health["status"], health["storeWritable"]) == ("unhealthy", False)
        assert health["reasons"] == ["the disk is too full"]
        broker.store.refusals = {}
        assert (await get(port, "/healthz"))[0] == 200


async def test_a_slave_refuses_producers_and_is_healthy(broker: Broker) -> None:
    broker.store.refusals = {"slave": "this broker is a slave"}
    async with serving(broker.server()) as port:
        status, _, body = await get(port, "/healthz")
        assert (status, json.loads(body)["storeWritable"]) == (200, False)
        broker.store.refusals["flush"] = "cannot sync"
        assert (await get(port, "/healthz"))[0] == 503


# The server.


async def test_the_pages_can_be_turned_off(broker: Broker) -> None:
    broker.metrics_port = -1
    server = broker.server()
    await server.start()
    assert server.port is None
    await server.stop()


async def test_a_port_in_use_is_a_clear_error(broker: Broker) -> None:
    async with serving(broker.server()) as port:
        broker.metrics_port = port
        with pytest.raises(ListenFailed, match=f"cannot listen on 127.0.0.1:{port}"):
            await broker.server().start()


async def test_only_loopback_is_listened_on(broker: Broker) -> None:
    server = broker.server()
    async with serving(server):
        assert server._http is not None
        assert server._http._server is not None
        assert {socket.getsockname()[0] for socket in server._http._server.sockets} == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /nothing HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics/ HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 405),
        (b"get /metrics HTTP/1.1\r\n\r\n", 405),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET /metrics HTTP/2\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"\x00\xff\xfe\x80 \r\n\r\n", 400),
        (b'\x00\x00\x00\x40\x00\x00\x00\x3c{"code":105,', 400),  # of a client that takes this for a name server
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nX: " + b"y" * 9000 + b"\r\n\r\n", 431),
    ],
)
async def test_what_is_not_asked_well_is_refused_and_the_next_is_served(
    broker: Broker, request_bytes: bytes, status: int
) -> None:
    async with serving(broker.server()) as port:
        answer = await exchange(port, request_bytes)
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
        assert (await get(port, "/healthz"))[0] == 200


async def test_an_endless_request_is_cut_off(broker: Broker) -> None:
    async with serving(broker.server()) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(b"x" * 65536)
                await writer.drain()
        writer.close()
        assert (await get(port, "/healthz"))[0] == 200


async def test_a_request_may_arrive_in_pieces(broker: Broker) -> None:
    async with serving(broker.server()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for byte in b"GET /healthz HTTP/1.1\r\n\r\n":
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()


async def one_page() -> HttpReply:
    return HttpReply(HTTPStatus.OK, b"page")


@asynccontextmanager
async def http(pages: Mapping[str, Any] | None = None, seconds: float = 5.0) -> AsyncIterator[HttpServer]:
    server = HttpServer(pages or {"/": one_page}, "127.0.0.1", 0, seconds=seconds)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def test_a_client_that_says_nothing_is_sent_away() -> None:
    async with http(seconds=0.05) as server:
        assert (await exchange(server.port, b"GET / HT")).startswith(b"HTTP/1.1 408 ")
        assert (await exchange(server.port, b"")).startswith(b"HTTP/1.1 408 ")
        while server._tasks:
            await asyncio.sleep(0)


async def test_a_client_that_does_not_read_is_cut_off() -> None:
    async def endless() -> HttpReply:
        return HttpReply(HTTPStatus.OK, b"x" * 50_000_000)

    async with http({"/": endless}, seconds=0.1) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await writer.drain()
        while not server._tasks:
            await asyncio.sleep(0)
        await asyncio.wait(server._tasks)
        received = 0
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(1 << 20):
                received += len(part)
        assert received < 50_000_000
        writer.close()


async def test_a_client_that_leaves_early_is_no_trouble(caplog: pytest.LogCaptureFixture) -> None:
    async with http() as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HT")
        writer.close()
        await writer.wait_closed()
        assert (await get(server.port, "/"))[2] == b"page"
    assert caplog.records == []


async def test_there_are_only_so_many_connections() -> None:
    async with http() as server:
        idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(MAX_CONNECTIONS)]
        try:
            while len(server._tasks) < MAX_CONNECTIONS:
                await asyncio.sleep(0)
            answer = b""
            with contextlib.suppress(ConnectionError):
                answer = await exchange(server.port, b"GET / HTTP/1.1\r\n\r\n")
            assert answer == b""
        finally:
            for _, writer in idle:
                writer.close()
        while server._tasks:
            await asyncio.sleep(0)
        assert (await get(server.port, "/"))[0] == 200


async def test_stopping_ends_open_connections() -> None:
    async with http() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        while not server._tasks:
            await asyncio.sleep(0)
    with pytest.raises((ConnectionError, EOFError)):
        await reader.readexactly(1)
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", server.port)


async def test_a_page_that_fails_is_a_500_and_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    async def broken() -> HttpReply:
        raise ZeroDivisionError

    async with http({"/": broken}) as server:
        status, _, body = await get(server.port, "/")
    assert status == 500
    assert b"ZeroDivision" not in body
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


def test_a_large_page_comes_in_small_pieces_and_is_whole(broker: Broker) -> None:
    for number in range(500):
        put(broker.statistics, f"topic-{number}", 1, 100)
        broker.offsets[f"topic-{number}@g"] = {0: 0}
    pieces = list(BrokerCollector(broker.server()._sources).pieces())
    assert max(piece.count(b"\n") for piece in pieces) <= 66
    samples = parse(b"".join(pieces).decode())
    for name in ("rocketmq_messages_in_total", "rocketmq_message_size_count", "rocketmq_consumer_lag_messages"):
        topics = {sample.labels["topic"] for sample in samples if sample.name == name}
        assert topics == {f"topic-{number}" for number in range(500)}
    heads = re.findall(r"^# TYPE (\w+)", b"".join(pieces).decode(), re.MULTILINE)
    assert len(heads) == len(set(heads))
