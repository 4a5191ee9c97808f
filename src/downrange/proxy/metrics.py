"""`/metrics` of a gRPC server that stands alone. Names and labels: docs/reference/metrics.md."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final

from downrange.model.histogram import RPC_MILLIS_BOUNDS
from downrange.proxy.call_figures import CallFigures
from downrange.transport.http_pages import HttpReply, HttpServer

_BASE: Final = {"node_type": "proxy"}


@asynccontextmanager
async def metrics_page(figures: CallFigures, node_id: str, port: int) -> AsyncIterator[int | None]:
    """Serve the page on this port, 0 for a free one, -1 for none; gives the real port."""
    if port < 0:
        yield None
        return
    base = {**_BASE, "node_id": node_id}

    async def page() -> HttpReply:
        # prometheus-client takes 60 ms to import; a server starts without it.
        return HttpReply(HTTPStatus.OK, *await asyncio.to_thread(_text, figures, base))

    server = HttpServer({"/metrics": page}, "127.0.0.1", port)
    await server.start()
    try:
        yield server.port
    finally:
        await server.stop()


def _text(figures: CallFigures, base: dict[str, str]) -> tuple[bytes, str]:
    from prometheus_client import CONTENT_TYPE_LATEST, ProcessCollector, generate_latest
    from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector

    names, values = tuple(base), tuple(base.values())
    up = GaugeMetricFamily("rocketmq_proxy_up", "1: the server serves.", labels=(*names, "proxy_mode"))
    up.add_metric((*values, "cluster"), 1)
    connections = GaugeMetricFamily("downrange_grpc_connections", "Open connections of gRPC clients.", labels=names)
    connections.add_metric(values, figures.connections)
    clients = GaugeMetricFamily("downrange_grpc_clients", "gRPC clients by type.", labels=(*names, "client_type"))
    for kind, count in figures.clients.items():
        clients.add_metric((*values, kind), count)
    more = ("protocol_type", "request_code", "response_code")
    calls = HistogramMetricFamily("rocketmq_rpc_latency", "Time to answer a request in ms.", labels=(*names, *more))
    for (method, code), histogram in tuple(figures.calls.items()):
        passed, buckets = 0, []
        for end, count in zip((*map(str, RPC_MILLIS_BOUNDS), "+Inf"), tuple(histogram.counts), strict=True):
            passed += count
            buckets.append((end, float(passed)))
        calls.add_metric((*values, "grpc", method, code), buckets, histogram.sum)

    class Families(Collector):
        def collect(self) -> Iterable[Metric]:
            return (up, connections, clients, calls, *ProcessCollector(registry=None).collect())

    return generate_latest(Families()), CONTENT_TYPE_LATEST
