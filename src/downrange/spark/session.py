"""A Spark session with settings for small machines and this connector, in which `rocketmq` is registered."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pyspark import SparkContext
from pyspark.sql import SparkSession

_SETTINGS: Final = {
    # Times are shown in UTC on every machine; a local zone would change the output of a query.
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Needed by `pushDownFilters`.
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.streaming.metricsEnabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
# Settings for a master that runs inside this process.
_LOCAL_SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # Spark's default of 200 shuffle partitions makes small queries slow.
    "spark.sql.shuffle.partitions": str(os.cpu_count() or 2),
    # Workers and the JVM exchange data through Unix sockets: a scan takes a sixth less CPU than with TCP.
    "spark.python.unix.domain.socket.enabled": "true",
    # Spark's default for local checkpoints starts a process `readlink` for every file: a third of the time of a small
    # micro-batch.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}


def session(
    app_name: str = "downrange",
    *,
    master: str | None = None,
    log_level: str = "WARN",
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """The Spark session of this process, created if missing, with the data source `rocketmq` registered.

    `master` is `local[*]` unless given here or by spark-submit. `settings` override ours. On a cluster, ship the
    package with `--py-files` or install it on every node.
    """
    existing = SparkSession.getActiveSession()
    if existing is None:
        chosen = master or os.environ.get("MASTER") or _submitted_master() or "local[*]"
        _choose_worker_python(chosen)
        builder = SparkSession.builder.appName(app_name).master(chosen)
        wanted = {**_SETTINGS, **(_LOCAL_SETTINGS if chosen.startswith("local") else {}), **(settings or {})}
        for key, value in wanted.items():
            builder = builder.config(key, value)
        existing = builder.getOrCreate()
        existing.sparkContext.setLogLevel(log_level)
    if not _is_registered(existing):
        register(existing)
    return existing


def _choose_worker_python(master: str) -> None:
    """Let workers run this Python, in which downrange and pyarrow are installed."""
    starter = Path(__file__).with_name("worker-python")
    # The worker reads our environment, which only workers of this machine get, and only from a JVM that we start.
    starts_jvm = SparkContext._gateway is None and "PYSPARK_GATEWAY_PORT" not in os.environ
    if starts_jvm and master.partition("[")[0] == "local" and os.access(starter, os.X_OK):
        os.environ["DOWNRANGE_SPARK_PYTHON"] = sys.executable
        os.environ.setdefault("PYSPARK_PYTHON", str(starter))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def register(spark: SparkSession) -> None:
    """Register `rocketmq` in a session that was created elsewhere, also one of Spark Connect."""
    from downrange.spark.data_source import RocketMQDataSource

    spark.dataSource.register(RocketMQDataSource)


def _is_registered(spark: SparkSession) -> bool:
    """Whether Spark found the source by itself: it looks at installed packages, not at those of `--py-files`."""
    java: Any = getattr(spark, "_jsparkSession", None)  # None for a session of Spark Connect
    return java is not None and bool(java.sessionState().dataSourceManager().dataSourceExists("rocketmq"))


def _submitted_master() -> str | None:
    """The master given to spark-submit, which starts the JVM before us and sets this variable."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return None
    from pyspark import SparkConf

    SparkContext._ensure_initialized()  # the JVM runs already; this only connects to it
    return SparkConf().get("spark.master")
