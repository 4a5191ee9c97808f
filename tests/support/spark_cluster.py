"""A Spark standalone cluster of real processes, and a Python in which the wheel of this project is installed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyspark

from tests.support.lasting_port import lasting_port
from tests.support.processes import Running

ROOT = Path(__file__).parents[2]
SPARK_HOME = Path(pyspark.__file__).parent
_LOCAL = {"SPARK_HOME": str(SPARK_HOME), "SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": ""}


def installed(directory: Path) -> Path:
    """The `downrange` of a new environment: our wheel, and the packages of this Python, but not its downrange."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    (wheel,) = directory.glob("*.whl")
    home = directory / "environment"
    venv.create(home, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(home), "platbase": str(home)}))
    # Its .pth files are not read from here, so that an editable downrange is not found.
    (packages / "packages.pth").write_text(sysconfig.get_path("purelib"))
    install = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install", "--no-deps", "-q"]
    subprocess.run([*install, str(wheel)], check=True, env={**os.environ, "PYTHONPATH": ""})
    return home / "bin" / "downrange"


@dataclass
class SparkCluster:
    """One master and its workers, each with one core."""

    directory: Path
    master: Running
    url: str
    downrange: Path
    workers: list[Running] = field(default_factory=list)
    started: int = 0
    """How many workers were started, dead ones too."""

    def start_worker(self) -> Running:
        """A worker that has registered."""
        self.started += 1
        worker = _server(
            "worker.Worker",
            *("--host", "127.0.0.1", "--webui-port", "0", "--cores", "1", "--memory", "2g"),
            *("--work-dir", str(self.directory / f"work-{self.started}"), self.url),
        )
        self.workers.append(worker)
        _wait_for_log(worker, "Successfully registered with master")
        return worker

    def driver(self, *arguments: str) -> Running:
        """`downrange pipeline …` of the wheel on this cluster."""
        return Running("pipeline", *arguments, "--master", self.url, program=(str(self.downrange),), env=_LOCAL)

    def executors(self, worker: Running) -> list[int]:
        """The process ids of the executors that a worker started."""
        return [pid for pid in _children(worker.pid) if b"CoarseGrainedExecutorBackend" in _command_line(pid)]

    def kill_an_executor(self, seconds: float = 600) -> int:
        """kill -9 of the first executor there is."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for worker in self.workers:
                for pid in self.executors(worker):
                    os.kill(pid, signal.SIGKILL)
                    return pid
            time.sleep(0.1)
        raise AssertionError("no executor was started")

    def kill_a_worker(self) -> None:
        """kill -9 of the oldest worker; its executors end by themselves."""
        worker = self.workers.pop(0)
        worker.kill()
        worker.close()


@contextmanager
def spark_cluster(directory: Path, workers: int = 2) -> Iterator[SparkCluster]:
    port = lasting_port()
    downrange = installed(directory)
    master = _server("master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0")
    cluster = SparkCluster(directory, master, f"spark://127.0.0.1:{port}", downrange)
    try:
        _wait_for_log(master, "I have been elected leader")
        for _ in range(workers):
            cluster.start_worker()
        yield cluster
    finally:
        for process in (*cluster.workers, master):
            process.close()


def _server(name: str, *arguments: str) -> Running:
    program = (str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}")
    return Running(*arguments, program=program, env={**_LOCAL, "SPARK_DAEMON_MEMORY": "256m"})


def _wait_for_log(process: Running, text: str, seconds: float = 600) -> None:
    """Wait for a line of the log, which Spark writes to standard error."""
    deadline = time.monotonic() + seconds
    while text not in process.errors:
        assert time.monotonic() < deadline, process.errors[-2000:]
        time.sleep(0.1)


def _children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            behind_name = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended in between
            continue
        if int(behind_name[1]) == parent:
            found.append(int(stat.parent.name))
    return found


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
