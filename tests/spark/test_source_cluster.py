"""The connector where it is not installed, shipped to the executors of a cluster; and through Spark Connect."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import downrange
from downrange.testing import broker
from tests.spark.messages import send

SOURCE = Path(downrange.__file__).parent.parent

_ON_A_CLUSTER = """
import sys
from pyspark.sql import SparkSession

master, shipped, namesrv = sys.argv[1:]
spark = SparkSession.builder.master(master).config("spark.ui.enabled", "false").config("spark.executor.memory", "512m")
spark = spark.config("spark.driver.host", "127.0.0.1").getOrCreate()
spark.sparkContext.setLogLevel("ERROR")
spark.sparkContext.addPyFile(shipped)
sys.path.insert(0, shipped)
import downrange.spark
downrange.spark.register(spark)
frame = spark.read.format("rocketmq").options(namesrv=namesrv, subscribe="orders", minPartitions="3").load()
where = spark.sparkContext.parallelize([0], 1).map(lambda _: __import__("downrange").__file__).first()
print("RESULT", frame.count(), where)
"""

_WITH_CONNECT = """
import sys
from pyspark.sql import SparkSession

spark = SparkSession.builder.remote("local[1]").getOrCreate()
import downrange.spark
frame = spark.read.format("rocketmq").options(namesrv=sys.argv[1], subscribe="orders").load()
stream = spark.readStream.format("rocketmq").options(namesrv=sys.argv[1], subscribe="orders")
writer = stream.option("startingOffsets", "earliest").load().writeStream.format("memory").queryName("seen")
query = writer.trigger(availableNow=True).start()
query.awaitTermination()
print("RESULT", type(spark).__module__, frame.where("tags = 'a'").count(), spark.table("seen").count())
"""


def result_of(program: str, *arguments: str, environment: dict[str, str]) -> list[str]:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env={**os.environ, **environment})
    for line in done.stdout.splitlines():
        if line.startswith("RESULT"):
            return line.split()[1:]
    said = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("\t"))  # without Java's frames
    raise AssertionError(f"exit status {done.returncode}\n{done.stdout}\n{said[-6000:]}")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_shipped_to_a_cluster(tmp_path: Path) -> None:
    shipped = tmp_path / "downrange.zip"
    with zipfile.ZipFile(shipped, "w") as archive:
        for package in ("downrange", "pyspark_rocketmq"):
            for path in sorted((SOURCE / package).rglob("*.py")):
                archive.write(path, path.relative_to(SOURCE))
    # A Python that has the libraries, but not this checkout: without site, an editable install is not seen.
    bare = tmp_path / "python"
    libraries = sysconfig.get_paths()["purelib"]
    bare.write_text(f'#!/bin/sh\nPYTHONPATH="{libraries}:$PYTHONPATH" exec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    missing = subprocess.run([bare, "-c", "import downrange"], capture_output=True, text=True, env={}, cwd=tmp_path)
    assert "ModuleNotFoundError" in missing.stderr
    with broker() as mq:
        send(mq, "orders", range(100))
        count, where = result_of(
            _ON_A_CLUSTER,
            "local-cluster[1,1,512]",
            str(shipped),
            mq.namesrv,
            environment={
                "PYSPARK_PYTHON": str(bare),
                "PYSPARK_DRIVER_PYTHON": str(bare),
                "PYTHONPATH": "",
                "SPARK_LOCAL_IP": "127.0.0.1",
            },
        )
    assert count == "100"
    assert "downrange.zip" in where


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_through_spark_connect() -> None:
    with broker() as mq:
        send(mq, "orders", range(99))
        # With SPARK_TESTING the server takes a free port.
        environment = {"PYSPARK_PYTHON": sys.executable, "SPARK_TESTING": "1"}
        kind, read, seen = result_of(_WITH_CONNECT, mq.namesrv, environment=environment)
    assert "connect" in kind
    assert (read, seen) == ("33", "99")
