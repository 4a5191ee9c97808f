"""What a new worker process does not wait for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import downrange.spark

_WRITE = """
import sys
from downrange.spark.decoder import Decoder, Fetched
from downrange.spark.lake.location import Location
from downrange.spark.lake.writer import LakeWriter
from downrange.spark.pipelines import archive_reader
from tests.unit.spark.test_decoder import EVERYTHING, SCHEMA, message, record, walk
buffer = b"".join(record(message(number)) for number in range(20))
assert "pandas" not in sys.modules, "imported with the modules"
writer = LakeWriter(Location.of(sys.argv[1]))
for batch in Decoder(SCHEMA, tags=frozenset({"paid"})).batches(Fetched(buffer, walk(buffer), EVERYTHING)):
    writer.add(batch)
assert sum(file.rows for file in writer.finish()) == 20
assert not {"pandas", "deltalake"} & set(sys.modules), "imported while messages were decoded and written"
"""


def test_messages_are_decoded_and_archived_without_pandas(tmp_path: Path) -> None:
    for pure in ("", "1"):
        environment = {**os.environ, "DOWNRANGE_PURE": pure}
        command = [sys.executable, "-c", _WRITE, str(tmp_path / f"lake{pure}")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_workers_load_the_installed_modules_of_spark() -> None:
    starter = str(Path(downrange.spark.__file__).with_name("worker-python"))
    path = ["/spark/python/lib/pyspark.zip", "/spark/python/lib/py4j-0.1-src.zip", "/spark/jars/spark-core_2.13-4.jar"]
    environment = {
        **os.environ,
        "DOWNRANGE_SPARK_PYTHON": sys.executable,
        "PYTHONPATH": ":".join([*path, "/of the user/*", "/more"]),
    }
    command = [starter, "-c", "import os, sys; print(os.environ['PYTHONPATH'], *sys.argv[1:])", "a b", "c"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "/of the user/*:/more a b c\n"
