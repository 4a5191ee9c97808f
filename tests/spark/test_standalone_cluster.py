"""Pipelines of an installed wheel on a real Spark cluster whose executors, workers and drivers are killed."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Thread

import pytest

from downrange import Message
from downrange.spark.lake.check import problems
from downrange.spark.lake.lake import Lake
from downrange.testing import EmbeddedBroker, broker
from tests.support.spark_cluster import SparkCluster, spark_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
QUEUES = 4


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    with spark_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@contextmanager
def sending(mq: EmbeddedBroker) -> Iterator[None]:
    """Messages go out all the time."""
    stop = Event()
    mq.create_topic("orders", QUEUES)

    def send() -> None:
        producer = mq.producer()
        number = 0
        while not stop.wait(0.2):
            for one in range(number, number + 10):
                producer.send(Message("orders", b"%d" % one, sharding_key=f"k{one % 7}"))
            number += 10

    thread = Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Supervised:
    """A driver that is started again when it fails, as a supervisor does: on a busy machine Spark gives up waiting for
    its Python processes after ten seconds."""

    def __init__(self, cluster: SparkCluster, *command: str) -> None:
        self._start = partial(cluster.driver, *command)
        self.process = self._start()

    def keep_alive(self) -> bool:
        """Whether the driver had ended and was started again."""
        if self.process.is_running:
            return False
        print("driver ended:", self.process.errors[-500:])
        self.process.close()
        self.process = self._start()
        return True

    def told(self) -> int:
        """The last count of messages that the driver has shown."""
        counts = re.findall(r"(?:archived|mirrored) ([\d,]+) messages", self.process.errors)
        return int(counts[-1].replace(",", "")) if counts else 0

    def wait_for_more(self, seconds: float = 600) -> None:
        """Wait until the driver has done another batch, so that it goes on after whatever was killed."""
        deadline = time.monotonic() + seconds
        before = self.told()
        while self.told() <= before:
            assert time.monotonic() < deadline, self.process.errors[-2000:]
            if self.keep_alive():
                before = 0
            time.sleep(0.1)


def kill_everything_once(cluster: SparkCluster, *command: str) -> None:
    """An executor, a worker and the driver die while the command runs. Another worker comes in between."""
    driver = Supervised(cluster, *command)
    try:
        driver.wait_for_more()
        cluster.kill_an_executor()
        driver.wait_for_more()
        cluster.kill_a_worker()
        driver.wait_for_more()
        cluster.start_worker()
        driver.process.kill()
    finally:
        driver.process.close()


def finish(cluster: SparkCluster, *command: str) -> None:
    """Run the command until it succeeds."""
    for _ in range(3):
        driver = cluster.driver(*command)
        try:
            if driver.wait(600) == 0:
                return
            print("driver ended:", driver.errors[-500:])
        finally:
            driver.close()
    pytest.fail("the command did not succeed")


def bodies(mq: EmbeddedBroker, topic: str) -> dict[int, list[bytes]]:
    found: dict[int, list[bytes]] = {}
    for message in sorted(mq.messages(topic), key=lambda one: (one.queue_id, one.queue_offset)):
        found.setdefault(message.queue_id, []).append(message.body)
    return found


def test_archive_and_replay(cluster: SparkCluster, tmp_path: Path) -> None:
    lake = str(tmp_path / "lake")
    with broker() as mq:
        archive = ("archive", lake, "orders", "-n", mq.namesrv)
        with sending(mq):
            kill_everything_once(cluster, *archive, "--continuous", "--every", "0.1")
        finish(cluster, *archive)
        there = sum(map(len, bodies(mq, "orders").values()))
        table = Lake.open(lake).dataset().to_table(["queue_id", "queue_offset"])
        places = Counter(zip(*(column.to_pylist() for column in table.columns), strict=True))
        assert len(places) == there
        assert max(places.values()) == 1
        assert list(problems(Lake.open(lake))) == []

        replay = ("replay", lake, "orders", "--to", "again", "-n", mq.namesrv)
        driver = cluster.driver(*replay, "--rate", "200")
        try:
            deadline = time.monotonic() + 600
            while len(mq.messages("again")) < 200:
                assert time.monotonic() < deadline, driver.errors[-2000:]
                time.sleep(0.2)
            cluster.kill_an_executor()
            before = len(mq.messages("again"))
            while len(mq.messages("again")) <= before:
                assert time.monotonic() < deadline, driver.errors[-2000:]
                time.sleep(0.2)
            driver.kill()
        finally:
            driver.close()
        finish(cluster, *replay)
        again = Counter(body for queue in bodies(mq, "again").values() for body in queue)
        once = Counter(body for queue in bodies(mq, "orders").values() for body in queue)
        assert set(again) == set(once)
        assert (again - once).total() <= 500  # the chunk under way when the driver died, as the page says


def test_mirror(cluster: SparkCluster, tmp_path: Path) -> None:
    with broker() as east, broker() as west:
        mirror = (
            *("mirror", "orders", "--from", east.namesrv, "--to", west.namesrv),
            *("--from-cluster", "east", "--to-cluster", "west", "--checkpoint", str(tmp_path / "checkpoint")),
        )
        with sending(east):
            kill_everything_once(cluster, *mirror, "--batch", "400", "--continuous", "--every", "0.1")
        finish(cluster, *mirror)
        assert bodies(west, "orders") == bodies(east, "orders")
