"""Metrics of brokers as the console reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from downrange.client.config import ClientConfig
from downrange.clock import ManualClock
from downrange.console.clusters import Cluster
from downrange.console.config import parse_metrics
from downrange.console.metrics import MetricsWatch, read_metrics
from downrange.console.snapshot import GroupState, TopicState
from downrange.settings import ConfigError
from tests.support.broker_client import client_of, standalone

TEXT = """# HELP rocketmq_consumer_lag_messages messages not consumed yet
rocketmq_consumer_lag_messages{cluster="c",topic="orders",consumer_group="billing",is_retry="false"} 40
rocketmq_consumer_lag_messages{cluster="c",topic="%RETRY%billing",consumer_group="billing",is_retry="true"} 2.0
rocketmq_consumer_lag_messages{topic="odd \\"name\\"}",consumer_group="mail"} 0
rocketmq_messages_in_total{topic="orders",message_type="normal"} 1000
rocketmq_messages_in_total{topic="orders",message_type="delay"} 1e2
rocketmq_consumer_lag_messages{topic="orders",consumer_group="broken"} NaN
something else
"""


def test_lag_and_messages_are_summed() -> None:
    read = read_metrics(TEXT)
    assert dict(read.lag) == {"billing": 42, "mail": 0}
    assert dict(read.stored) == {"orders": 1100}


def stored(count: int, lag: int = 0) -> str:
    return (
        f'rocketmq_messages_in_total{{topic="orders"}} {count}\n'
        f'rocketmq_consumer_lag_messages{{topic="orders",consumer_group="billing"}} {lag}\n'
    )


def test_rates_are_of_all_brokers_and_a_group_that_falls_behind_is_asked_for() -> None:
    clock = ManualClock(1_800_000_000_000)
    cluster = Cluster("prod", ClientConfig.of("127.0.0.1:1"), clock, ("a", "b"))
    topic = cluster.snapshot.topics["orders"] = TopicState("orders")
    cluster.snapshot.groups["billing"] = GroupState("billing", at=1)
    cluster.snapshot.groups["unmetered"] = GroupState("unmetered", at=1)
    asked: list[str] = []
    watch = MetricsWatch(cluster, asked.append)
    watch.take({"a": stored(1000), "b": stored(50)})
    assert (topic.rate, asked) == (None, [])
    clock.tick(10)
    watch.take({"a": stored(1200), "b": stored(150, lag=3)})
    assert (topic.rate, topic.metered_at, asked) == (30.0, clock.now(), ["billing"])
    clock.tick(10)
    watch.take({"a": stored(5), "b": stored(150)})  # a began anew
    assert (topic.rate, asked) == (0.0, ["billing"])


def test_addresses_belong_to_clusters() -> None:
    assert parse_metrics(["http://a:5557/metrics?x=1"], ["local"]) == {"local": ("http://a:5557/metrics?x=1",)}
    assert parse_metrics(["prod=http://a/m", "test=https://b/m", "prod=http://c/m"], ["prod", "test"]) == {
        "prod": ("http://a/m", "http://c/m"),
        "test": ("https://b/m",),
    }
    for wrong in ("http://a/m", "stage=http://a/m", "prod=file:///etc/passwd", "prod=", "prod=http:///m"):
        with pytest.raises(ConfigError, match="--metrics"):
            parse_metrics([wrong], ["prod", "test"])


async def test_a_broker_is_read_and_an_address_without_one_is_told(tmp_path: Path) -> None:
    async with standalone(tmp_path, broker_options={"metrics_port": 0}) as running, client_of(running) as client:
        await client.send("orders", b"one")
        addresses = (f"http://127.0.0.1:{running.metrics_port}/metrics", "http://127.0.0.1:1/metrics")
        cluster = Cluster("prod", ClientConfig.of("127.0.0.1:1"), ManualClock(), addresses)
        watch = MetricsWatch(cluster, lambda group: None)
        good, bad = [await watch.fetch(address) for address in addresses]
        assert good is not None
        assert read_metrics(good).stored["orders"] == 1
        assert bad is None
        assert "refused" in cluster.snapshot.metrics_errors[addresses[1]]
        await cluster.close()
