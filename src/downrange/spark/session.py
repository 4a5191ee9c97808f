"""A Spark session with settings that suit small machines and this connector; `rocketmq` is registered in it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pyspark import SparkContext
from pyspark.sql import SparkSession

_SETTINGS: Final = {
    # Topics are read in UTC on every machine; a local zone would shift what a query prints.
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Lets `pushDownFilters` hand a filter to the broker.
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.streaming.metricsEnabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
# For a master that runs inside this process.
_LOCAL_SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # 200 shuffle partitions make a small query crawl.
    "spark.sql.shuffle.partitions": str(os.cpu_count() or 2),
    # What workers and the JVM tell each other goes through Unix sockets: a sixth less CPU for a scan than by TCP.
    "spark.python.unix.domain.socket.enabled": "true",
    # The other way to write a checkpoint, which Spark would choose, starts a process `readlink` for every file it looks
    # at when these are local: a third of a small micro-batch.
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
    """The Spark session of this process, made when there is none, with the data source `rocketmq` registered.

    `master` is `local[*]` unless given here or by spark-submit. `settings` win over ours. On a cluster, ship the
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
    """Workers must be this Python: the one where downrange and pyarrow are installed."""
    starter = Path(__file__).with_name("worker-python")
    # It reads our environment, which only a JVM that we start hands on; and only the workers of this machine get.
    starts_jvm = SparkContext._gateway is None and "PYSPARK_GATEWAY_PORT" not in os.environ
    if starts_jvm and master.partition("[")[0] == "local" and os.access(starter, os.X_OK):
        os.environ["DOWNRANGE_SPARK_PYTHON"] = sys.executable
        os.environ.setdefault("PYSPARK_PYTHON", str(starter))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def register(spark: SparkSession) -> None:
    """Make `rocketmq` known to a session that was made elsewhere, Spark Connect included."""
    from downrange.spark.data_source import RocketMQDataSource

    spark.dataSource.register(RocketMQDataSource)


def _is_registered(spark: SparkSession) -> bool:
    """Has Spark found the source by itself? It looks among installed packages, not in what `--py-files` brought."""
    java: Any = getattr(spark, "_jsparkSession", None)  # a session of Spark Connect has none
    return java is not None and bool(java.sessionState().dataSourceManager().dataSourceExists("rocketmq"))


def _submitted_master() -> str | None:
    """What spark-submit was given: it starts the JVM before us and passes its settings in this variable's presence."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return None
    from pyspark import SparkConf

    SparkContext._ensure_initialized()  # the JVM is there already; this only connects to it
    return SparkConf().get("spark.master")
