"""Apache RocketMQ's own C++ client (in the wheel `rocketmq` 0.4.4) against our name server and broker."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from downrange import Message, Producer, PushConsumer, ReceivedMessage
from tests.support.standalone_process import Standalone, standalone_process

SCRIPT = Path(__file__).parent / "cpp" / "client.py"
# Retries begin with level 3 and would take 10 s with RocketMQ's own levels.
DELAY_LEVELS = "1s 2s " + "1s " * 16
SEND_OK = 0


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    settings = {"messageDelayLevel": DELAY_LEVELS.strip()}
    with standalone_process(tmp_path_factory.mktemp("cpp"), settings) as running:
        yield running
        assert running.process.stop() == 0
        assert running.process.errors == ""


class CppClient:
    """One process of the C++ client; its lines as they come."""

    def __init__(self, order: dict[str, Any], home: Path) -> None:
        self.lines: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # tracebacks of the failures that a test asks for
            text=True,
            env={"HOME": str(home), "PATH": ""},  # it writes its log below the home directory
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.lines.append(json.loads(line))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "body" in line]

    def wait_for(self, count: int, seconds: float = 60) -> list[dict[str, Any]]:
        with self._news:
            self._news.wait_for(lambda: len(self.messages) >= count or self.process.poll() is not None, seconds)
        assert len(self.messages) >= count, f"{len(self.messages)} of {count} messages: {self.messages[-3:]}"
        return self.messages

    def wait_started(self) -> None:
        with self._news:
            assert self._news.wait_for(lambda: {"started": True} in self.lines, 60)

    def end(self) -> list[dict[str, Any]]:
        self.process.wait(60)
        self._reader.join(30)
        return self.lines

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self._reader.join(30)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@contextmanager
def cpp(home: Path, **order: Any) -> Iterator[CppClient]:
    client = CppClient(order, home)
    try:
        yield client
    finally:
        client.close()


def produce(servers: Standalone, home: Path, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    with cpp(home, do="produce", namesrv=servers.namesrv, messages=messages) as client:
        lines = client.end()
    assert lines[-1:] == [{"done": True}], lines
    return lines[:-1]


def consume_ours(servers: Standalone, topic: str, count: int, group: str) -> list[ReceivedMessage]:
    received: list[ReceivedMessage] = []
    complete = threading.Event()

    def listen(message: ReceivedMessage) -> None:
        received.append(message)
        if len(received) >= count:
            complete.set()

    with PushConsumer(group, servers.namesrv, on_message=listen) as consumer:
        consumer.subscribe(topic)
        complete.wait(20)
    assert len(received) == count
    return received


def test_every_way_of_sending_reaches_our_consumer(servers: Standalone, tmp_path: Path) -> None:
    large = "compressible " * 1000
    sent = produce(
        servers,
        tmp_path,
        {"topic": "cppSent", "body": "plain", "tags": "TagA", "keys": "k1 k2", "properties": {"colour": "blue"}},
        {"topic": "cppSent", "body": "callback", "how": "async"},
        {"topic": "cppSent", "body": "oneway", "how": "oneway"},
        {"topic": "cppSent", "body": large},
        {"topic": "cppSent", "body": "shard", "how": "orderly", "shard": 2},
        *({"topic": "cppSent", "body": f"batch {number}", "how": "batch"} for number in range(5)),
    )
    assert [line.get("status") for line in sent] == [SEND_OK] * 5
    received = {bytes(one.body).decode(): one for one in consume_ours(servers, "cppSent", 10, "oursOfCpp")}
    assert set(received) == {"plain", "callback", "oneway", large, "shard", *(f"batch {number}" for number in range(5))}
    plain = received["plain"]
    assert (plain.tags, plain.keys, plain.properties["colour"]) == ("TagA", ["k1", "k2"], "blue")
    assert plain.unique_key == next(line["id"] for line in sent if line["sent"] == "plain")
    assert received["shard"].queue_id == 2


def test_what_we_send_reaches_it_filtered_by_tag(servers: Standalone, tmp_path: Path) -> None:
    with Producer("oursToCpp", servers.namesrv) as producer:
        for number in range(12):
            tag = ("TagA", "TagB", "TagC")[number % 3]
            message = Message("cppTags", f"{number}".encode(), tags=tag, keys=f"key-{number}")
            message.properties["colour"] = "red"
            producer.send(message)
        large = b"0123456789" * 2000
        producer.send(Message("cppTags", large, tags="TagA"))
    with cpp(
        tmp_path, do="consume", namesrv=servers.namesrv, group="cppTags", topic="cppTags", expression="TagA || TagC"
    ) as client:
        received = {line["body"]: line for line in client.wait_for(9)}
        assert set(received) == {*(str(number) for number in range(12) if number % 3 != 1), large.decode()}
        assert (received["0"]["tags"], received["0"]["keys"], received["0"]["colour"]) == ("TagA", "key-0", "red")


def test_a_message_it_could_not_handle_comes_again(servers: Standalone, tmp_path: Path) -> None:
    produce(servers, tmp_path, {"topic": "cppRetry", "body": "again"})
    with cpp(
        tmp_path, do="consume", namesrv=servers.namesrv, group="cppRetry", topic="cppRetry", fail_first=True
    ) as client:
        first, second = client.wait_for(2, seconds=45)
    assert (first["reconsume_times"], second["reconsume_times"]) == (0, 1)
    assert first["body"] == second["body"] == "again"


def test_a_delayed_message_is_not_early(servers: Standalone, tmp_path: Path) -> None:
    produce(servers, tmp_path, {"topic": "cppDelay", "body": "at once"})  # it looks for new topics every 30 s only
    with cpp(tmp_path, do="consume", namesrv=servers.namesrv, group="cppDelay", topic="cppDelay") as client:
        client.wait_for(1)
        produce(servers, tmp_path, {"topic": "cppDelay", "body": "later", "delay": 2})
        message = client.wait_for(2)[1]
    assert message["body"] == "later"
    assert 2000 <= message["at"] - message["born"] < 12_000  # or else it came when somebody looked again


def test_an_orderly_consumer_gets_each_queue_in_order(servers: Standalone, tmp_path: Path) -> None:
    produce(
        servers,
        tmp_path,
        *(
            {"topic": "cppOrder", "body": f"{number % 3}:{number:02d}", "how": "orderly", "shard": number % 3}
            for number in range(30)
        ),
    )
    with cpp(
        tmp_path, do="consume", namesrv=servers.namesrv, group="cppOrder", topic="cppOrder", orderly=True
    ) as client:
        received = [line["body"] for line in client.wait_for(30)]
    for shard in "012":
        mine = [body for body in received if body.startswith(shard)]
        assert mine == sorted(mine)
        assert len(mine) == 10


def test_it_pulls_what_is_there(servers: Standalone, tmp_path: Path) -> None:
    with Producer("oursToPull", servers.namesrv) as producer:
        for number in range(50):
            producer.send(Message("cppPull", f"{number}".encode()))
    with cpp(tmp_path, do="pull", namesrv=servers.namesrv, group="cppPull", topic="cppPull") as client:
        client.end()
        assert sorted(int(line["body"]) for line in client.messages) == list(range(50))


def test_one_group_of_its_members_and_ours_shares_the_messages(servers: Standalone, tmp_path: Path) -> None:
    ours: list[str] = []
    with Producer("oursToShare", servers.namesrv) as producer:
        producer.send(Message("cppShared", b"first"))

        def listen(message: ReceivedMessage) -> None:
            ours.append(bytes(message.body).decode())

        with PushConsumer("cppShared", servers.namesrv, on_message=listen) as member:
            member.subscribe("cppShared")
            with cpp(tmp_path, do="consume", namesrv=servers.namesrv, group="cppShared", topic="cppShared") as client:
                client.wait_started()
                deadline = time.monotonic() + 60
                sent = {"first"}
                number = 0
                # It rebalances every ten seconds: send until both sides have had their share.
                while not (client.messages and len(ours) > 1):
                    assert time.monotonic() < deadline, (len(client.messages), len(ours))
                    body = f"{number}"
                    producer.send(Message("cppShared", body.encode()))
                    sent.add(body)
                    number += 1
                    time.sleep(0.05)
                while len({*ours, *(line["body"] for line in client.messages)}) < len(sent):
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                counts = Counter([*ours, *(line["body"] for line in client.messages)])
    assert set(counts) == sent
    # Those on their way when queues changed hands may come twice, as in RocketMQ.
    assert sum(counts.values()) - len(counts) < 64
