"""One Spark session for all tests of this folder: starting the JVM takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import downrange.spark

TIMEOUT = 900
"""Seconds for a test. With twelve busy processes a core, the JVM alone takes three minutes to start."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """`local[2]` without UI, one shuffle partition. Tests use `trigger(availableNow=True)` instead of waiting."""
    directory = tmp_path_factory.mktemp("spark")
    running = downrange.spark.session(
        "downrange tests",
        master="local[2]",
        log_level="ERROR",
        settings={
            "spark.sql.shuffle.partitions": "1",
            "spark.default.parallelism": "2",
            "spark.sql.warehouse.dir": str(directory / "warehouse"),
            "spark.local.dir": str(directory / "local"),
            "spark.sql.streaming.numRecentProgressUpdates": "1000",
            # A test JVM lives for a minute: compiling thoroughly costs more than it brings.
            "spark.driver.extraJavaOptions": f"-XX:TieredStopAtLevel=1 -Dderby.system.home={directory}",
        },
    )
    yield running
    running.stop()
