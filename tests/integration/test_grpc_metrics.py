"""The figures of gRPC calls: on the page of a proxy, and on the page of the broker whose process has the port."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families as parse

from downrange.client.config import ClientConfig
from downrange.proxy.app import grpc_server
from downrange.proxy.config import ProxyConfig
from downrange.proxy.wire.enums import Code
from tests.support.grpc_calls import Caller, message, send_request
from tests.support.grpc_cluster import grpc_cluster

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
TOPIC = "GrpcTopic"


async def scraped(port: int | None) -> list[tuple[str, dict[str, str], float]]:
    def get() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as page:
            return str(page.read().decode())

    text = await asyncio.to_thread(get)
    return [(one.name, dict(one.labels), one.value) for family in parse(text) for one in family.samples]


def documented() -> dict[str, set[str]]:
    page = DOCUMENT.read_text("utf-8").partition("## Metrics of a proxy")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `((?:rocketmq|downrange)_\w+)` \|[^|]*\|([^|]*)\|", page, re.MULTILINE)
    return {name: {part.strip() for part in more.split(",") if part.strip()} for name, more in rows}


async def test_a_proxy_tells_what_its_page_is_documented_to_tell(tmp_path: Path) -> None:
    async with grpc_cluster(tmp_path) as cluster:
        await cluster.create({TOPIC: "NORMAL"})
        config = ProxyConfig(port=0, metrics_port=0)
        async with (
            grpc_server(config, ClientConfig((cluster.namesrv,))) as proxy,
            Caller(f"127.0.0.1:{proxy.port}") as caller,
        ):
            assert (await caller("SendMessage", send_request(message(TOPIC, b"x")))).status.code == Code.OK
            refused = await caller("SendMessage", send_request(message("Missing", b"x")))
            assert refused.status.code == Code.TOPIC_NOT_FOUND
            assert len(await caller.received(TOPIC, "readers", poll=5)) == 1
            samples = await scraped(proxy.metrics_port)
    wanted = documented()
    own = {"node_type", "node_id", "le"}
    for name, labels, _ in samples:
        if name.startswith(("rocketmq_", "downrange_")):
            family = re.sub(r"_(bucket|count|sum)$", "", name)
            assert labels.keys() - own == wanted[family], name
            assert labels["node_type"] == "proxy"
    counts = {
        (labels["request_code"], labels["response_code"]): value
        for name, labels, value in samples
        if name == "rocketmq_rpc_latency_count"
    }
    assert counts["send_message", "ok"] == 1
    assert counts["send_message", "topic_not_found"] == 1
    assert counts["receive_message", "ok"] == 1
    values = {name: value for name, _, value in samples}
    assert values["rocketmq_proxy_up"] == 1
    assert values["downrange_grpc_connections"] == 1


async def test_the_page_of_a_broker_has_the_calls_of_its_grpc_port(tmp_path: Path) -> None:
    async with grpc_cluster(tmp_path, {"metricsPort": 0}) as cluster:
        await cluster.create({TOPIC: "NORMAL"})
        cluster.broker.statistics.grpc = cluster.proxy.figures  # as the command line does
        async with Caller(cluster.target) as caller:
            assert (await caller("SendMessage", send_request(message(TOPIC, b"x")))).status.code == Code.OK
            samples = await scraped(cluster.broker.metrics_port)
    (count,) = [
        value
        for name, labels, value in samples
        if name == "rocketmq_rpc_latency_count" and labels["protocol_type"] == "grpc"
    ]
    assert count == 1
    assert [value for name, _, value in samples if name == "downrange_grpc_connections"] == [1]
