"""Every pipeline is seen from outside: it tells the cluster its progress and its error, and commits it as a group."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.client.pipeline_status import PipelineStatus
from downrange.spark.lake.lake import Lake
from downrange.spark.options import parse_options
from downrange.spark.pipelines.archive import archive
from downrange.spark.pipelines.latest import latest
from downrange.spark.pipelines.replay import replay
from downrange.spark.pipelines.replay_plan import Choice
from downrange.spark.pipelines.seen import as_group
from downrange.testing import EmbeddedBroker, broker
from tests.spark.messages import send


@pytest.fixture(scope="module")
def mq() -> Iterator[EmbeddedBroker]:
    with broker() as running:
        yield running


def last_status(mq: EmbeddedBroker, name: str) -> PipelineStatus:
    async def ask() -> PipelineStatus:
        async with Admin(ClientConfig.of(mq.namesrv)) as admin:
            return (await admin.pipelines.status(name))[-1]

    return asyncio.run(ask())


def behind(mq: EmbeddedBroker, group: str) -> dict[str, int]:
    """The lag of a group by topic, as `downrange group progress` asks for it."""

    async def ask() -> dict[str, int]:
        found: dict[str, int] = {}
        async with Admin(ClientConfig.of(mq.namesrv)) as admin:
            for stats in (await admin.groups.progress(group)).done.values():
                for queue, at in stats.offset_table.items():
                    found[queue.topic] = found.get(queue.topic, 0) + at.broker_offset - at.consumer_offset
        return {topic: lag for topic, lag in found.items() if not topic.startswith("%")}

    return asyncio.run(ask())


def no_disk(_: object) -> None:
    raise OSError("no disk")


def test_an_archive_and_a_replay_of_it(spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path) -> None:
    for topic in ("orders", "payments"):
        send(mq, topic, range(20))
    options = {"namesrv": mq.namesrv, "subscribe": "orders,payments"}
    archive(spark, tmp_path / "lake", options, name="shop.eu")
    told = last_status(mq, "shop.eu")
    assert (told.kind, told.source, told.target) == ("archive", "orders,payments", str(tmp_path / "lake"))
    assert (told.lag, told.last_error) == ({"orders": 0, "payments": 0}, None)
    for figure in (told.batch_seconds, told.rows_per_second, told.bytes_per_second):
        assert figure is not None
    send(mq, "payments", range(5))
    assert behind(mq, "archive_shop_eu") == {"orders": 0, "payments": 5}
    with pytest.raises(OSError, match="no disk"):
        archive(spark, tmp_path / "lake", options, name="shop.eu", on_progress=no_disk)
    assert last_status(mq, "shop.eu").last_error == "no disk"
    replay(spark, Lake.open(tmp_path / "lake"), Choice("again", ("orders",)), mq.namesrv)
    told = last_status(mq, "replay_again")
    assert (told.kind, told.source, told.target) == ("replay", str(tmp_path / "lake"), "again")
    assert told.rows_per_second


def test_the_newest_of_each_key(spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path) -> None:
    send(mq, "prices", range(20))
    options = {"namesrv": mq.namesrv, "subscribe": "prices"}
    latest(spark, tmp_path / "prices", options, name="prices")
    told = last_status(mq, "prices")
    assert (told.kind, told.source, told.target) == ("latest", "prices", str(tmp_path / "prices"))
    assert (told.lag, told.last_error) == ({"prices": 0}, None)
    assert behind(mq, "latest_prices") == {"prices": 0}
    send(mq, "prices", range(3))
    with pytest.raises(OSError, match="no disk"):
        latest(spark, tmp_path / "prices", options, name="prices", on_progress=no_disk)
    assert last_status(mq, "prices").last_error == "no disk"
    assert behind(mq, "latest_prices") == {"prices": 3}


@pytest.mark.parametrize(
    ("given", "group", "commits"),
    [
        ({}, "archive_a_b", True),
        ({"Group": "billing"}, "billing", False),
        ({"commitGroupOffsets": "false"}, "TOOLS_CONSUMER", False),
        ({"storePath": "/data"}, "TOOLS_CONSUMER", False),
    ],
)
def test_offsets_of_a_group_that_the_user_names_are_left_alone(
    given: dict[str, Any], group: str, commits: bool
) -> None:
    options = parse_options({"subscribe": "orders", **as_group(given, "archive", "a.b")})
    assert (options.group, options.commit_group_offsets) == (group, commits)
