"""A driver killed with kill -9 in every phase of a batch: started again it reads what is missing, and nothing twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from downrange.testing import broker
from tests.spark.messages import send

# Writes each batch to a file of its own, under its number. Says where it is, and waits there when told to.
_DRIVER = """
import json, os, sys, time
from pathlib import Path
import downrange.spark

namesrv, directory, stop_at = sys.argv[1:]
directory = Path(directory)
spark = downrange.spark.session(master="local[1]", log_level="OFF")

def reached(number, phase):
    if stop_at == f"{number} {phase}":
        print("REACHED", flush=True)
        time.sleep(600)

def write(frame, number):
    reached(number, "planned")
    rows = frame.select("body").toLocalIterator()
    found = [next(rows)] if stop_at == f"{number} half read" else []
    reached(number, "half read")
    found += list(rows)
    file = directory / f"batch-{number}.tmp"
    file.write_text(json.dumps([int(row.body) for row in found]))
    reached(number, "read")
    file.rename(directory / f"batch-{number}.json")
    reached(number, "written")

stream = spark.readStream.format("rocketmq").options(
    namesrv=namesrv, subscribe="orders", startingOffsets="earliest", maxOffsetsPerTrigger="25", group="killed",
    commitGroupOffsets="true", minPartitions="3",
)
writer = stream.load().writeStream.foreachBatch(write).option("checkpointLocation", str(directory / "checkpoint"))
writer.trigger(availableNow=True).start().awaitTermination()
print("DONE", flush=True)
"""


def drive(namesrv: str, directory: Path, stop_at: str = "") -> str:
    """Run the driver until it is done, or until it says that it has reached `stop_at`: then kill it and its JVM."""
    process = subprocess.Popen(
        [sys.executable, "-c", _DRIVER, namesrv, str(directory), stop_at],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        last = line.strip()
        if last == "REACHED":
            os.killpg(process.pid, signal.SIGKILL)
            break
    process.stdout.close()
    process.wait(60)
    return last


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_in_every_phase(tmp_path: Path) -> None:
    import json

    with broker() as mq:
        mq.create_topic("orders", 3)
        send(mq, "orders", range(100))
        for number, phase in enumerate(("planned", "half read", "read", "written")):
            assert drive(mq.namesrv, tmp_path, f"{number} {phase}") == "REACHED"
        send(mq, "orders", range(100, 110))
        assert drive(mq.namesrv, tmp_path) == "DONE"
    batches = {file.stem: json.loads(file.read_text()) for file in tmp_path.glob("batch-*.json")}
    assert [len(batches[f"batch-{number}"]) for number in range(5)] == [25, 25, 25, 25, 10]
    assert sorted(number for batch in batches.values() for number in batch) == list(range(110))
