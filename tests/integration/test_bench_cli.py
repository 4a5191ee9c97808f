"""`downrange bench` against real brokers, and against what is none."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from downrange.cli.main import app
from downrange.cli.options import UsageError
from downrange.load import LoadReport, PullPlan, SendPlan, Target, find_target, links, pull_load, send_load
from downrange.load.links import Links
from downrange.load.sending import Sender
from downrange.load.server_process import ServerProcess, listening_at
from downrange.model.errors import MQError
from downrange.protocol.codes import SerializeType
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError, RemoteProtocolError
from downrange.protocol.framing import FrameDecoder, encode
from downrange.transport.errors import RequestTimedOut
from downrange.transport.loop import run as run_loop
from tests.support.processes import DOWNRANGE
from tests.support.standalone_process import Standalone, standalone_process


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone_process(tmp_path_factory.mktemp("bench"), log_level="ERROR") as running:
        yield running


def bench(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*DOWNRANGE, "bench", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def measured(*arguments: str) -> dict[str, Any]:
    """Without a process: most of the time of a short load would be its start."""
    done = CliRunner().invoke(app, ["bench", *arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def stored(cluster: Standalone, topic: str) -> int:
    target = run_loop(find_target(topic=topic, queues=4, broker=cluster.broker))
    return sum(end - first for first, end in (target.ranges or {}).values())


SHORT = ("--seconds", "0.4", "--warm-up", "0.1")


@pytest.mark.parametrize("header", ["json", "binary"])
@pytest.mark.parametrize("batch", ["1", "16"])
def test_what_is_sent_is_stored_and_can_be_pulled(cluster: Standalone, header: str, batch: str) -> None:
    topic = f"load-{header}-{batch}"
    where = ("--broker", cluster.broker, "--topic", topic, "--header", header)
    sent = measured("send", *where, *SHORT, "--batch", batch, "--connections", "3", "--outstanding", "5")
    there = stored(cluster, topic)
    assert 0 < sent["messages"] < there  # the warm-up and the last replies are not counted, but stored
    assert sent["rate"] == pytest.approx(sent["messages"] / sent["seconds"])
    assert sent["server_cpu_micros"] > 0
    assert 0 < sent["latency"]["reply"]["p50"] <= sent["latency"]["reply"]["p999"] <= sent["latency"]["reply"]["max"]
    pulled = measured("pull", *where, "--connections", "2", "--outstanding", "3")
    assert pulled["messages"] == there


@pytest.mark.parametrize("header", list(SerializeType))
def test_by_tag_exactly_the_wanted_ones_are_counted(cluster: Standalone, header: SerializeType) -> None:
    topic = f"load-tags-{header.name}"

    def target() -> Target:
        return run_loop(find_target(topic=topic, queues=2, broker=cluster.broker))

    send_load(target(), SendPlan(0.3, 0, batch=4, connections=2, outstanding=2, tags=("a", "b", "c", "d")))
    there = stored(cluster, topic)
    counted = {
        tags: pull_load(target(), PullPlan(connections=2, outstanding=3, header=header, tags=tags)).messages
        for tags in ("*", "c", "a || d", "nothing")
    }
    assert counted == {"*": there, "c": there // 4, "a || d": there // 2, "nothing": 0}


def test_end_to_end_receives_all_that_is_sent_at_the_rate(cluster: Standalone) -> None:
    arguments = ("--namesrv", cluster.namesrv, "-t", "latency", "--rate", "300", "--seconds", "2", "--warm-up", "0.1")
    found = measured("end-to-end", *arguments)
    assert 0 < found["rate"] < 1.5 * 300, "a busy machine may send less, never more"
    assert 0 < found["latency"]["end to end"]["p50"] <= found["latency"]["end to end"]["max"]
    assert 0 < found["latency"]["sent late"]["p50"] <= found["latency"]["end to end"]["max"]


@pytest.mark.parametrize("header", ["json", "binary"])
def test_many_topics_are_created_and_all_their_queues_get_messages(cluster: Standalone, header: str) -> None:
    topic = f"many-{header}"
    run_loop(find_target(topic=f"{topic}-00007", queues=3, broker=cluster.broker))  # one is there, with fewer queues
    arguments = ("-b", cluster.broker, "-t", topic, "--topics", "30", "--queues", "4", "--header", header)
    sent = measured("send", *arguments, "--seconds", "2", "--warm-up", "0")
    assert sent["messages"] > 2048, "not once around the ring"
    for number in range(1, 31):
        target = run_loop(find_target(topic=f"{topic}-{number:05}", queues=1, broker=cluster.broker))
        ends = [end for _, end in (target.ranges or {}).values()]
        assert len(ends) == (3 if number == 7 else 4)
        assert all(ends[:3]), "the load keeps to the queues that all of the topics have"


@pytest.mark.parametrize("shape", [("1", "1"), ("2", "3")])
def test_a_caller_may_poll_for_its_replies(cluster: Standalone, shape: tuple[str, str]) -> None:
    arguments = ("-b", cluster.broker, "-t", f"polled-{shape[0]}", "--connections", shape[0], "--outstanding", shape[1])
    sent = measured("send", *arguments, "--poll", *SHORT)
    assert 0 < sent["messages"] < stored(cluster, f"polled-{shape[0]}")
    assert 0 < sent["latency"]["reply"]["p50"] <= sent["latency"]["reply"]["max"]


def test_a_topic_that_is_there_keeps_its_queues(cluster: Standalone) -> None:
    measured("send", "-b", cluster.broker, "-t", "two-queues", "--queues", "2", *SHORT)
    target = run_loop(find_target(topic="two-queues", queues=7, broker=cluster.broker))
    assert target.queues == 2


def test_the_tables_name_the_process_of_the_server(cluster: Standalone) -> None:
    shown = bench("--namesrv", cluster.namesrv, *SHORT, "--rate", "500").stdout
    assert f"(process {cluster.process.pid})" in shown
    assert "latency, ms" in shown
    assert listening_at(cluster.broker) == ServerProcess(cluster.process.pid)


@pytest.mark.parametrize(
    ("arguments", "error", "problem"),
    [
        (("send", "--broker", "BROKER", "--size", "2"), UsageError, "size 2: expected 16"),
        (("send", "--broker", "BROKER", "--queues", "11"), UsageError, "queues 11: expected 1 to 10"),
        (("send", "--broker", "BROKER", "--topics", "100000"), UsageError, "topics 100000: expected 1 to 99999"),
        (("pull", "--broker", "BROKER", "--topics", "2"), UsageError, "leave --topics out"),
        (("send", "--broker", "BROKER", "--topic", "a b"), MQError, "topic"),
        (("send", "--broker", "not-there", "--namesrv", "NAMESRV"), MQError, "no broker not-there"),
        (("pull", "--broker", "BROKER", "--topic", "nothing-here"), UsageError, "is empty: send something first"),
        (("end-to-end", "--broker", "BROKER", "--batch", "2"), UsageError, "leave --batch out"),
        (("send", "--broker", "BROKER", "--server-pid", "4194305"), UsageError, "there is no process 4194305"),
    ],
)
def test_what_cannot_work_says_why(
    cluster: Standalone, arguments: tuple[str, ...], error: type[MQError], problem: str
) -> None:
    names = {"BROKER": cluster.broker, "NAMESRV": cluster.namesrv}
    with pytest.raises(error, match=problem):
        measured(*(names.get(part, part) for part in arguments))


def test_a_broker_that_cannot_be_reached_is_one_line() -> None:
    done = bench("send", "--broker", "127.0.0.1:1", code=1)
    assert "cannot connect to 127.0.0.1:1" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


class ScriptedBroker:
    """Answers each send as the script says: with a code, with a wrong opaque, the third one very late, or no longer."""

    def __init__(
        self, *codes: int, opaque_shift: int = 0, sends_before_third: int = 0, silent_after: int | None = None
    ) -> None:
        self._silent_after = silent_after
        self._sends_before_third = sends_before_third
        self._held: tuple[socket.socket, bytes] | None = None
        self._lock = threading.Lock()
        self._codes = codes
        self._shift = opaque_shift
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.sends = 0
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits in `accept`; closing does not
        self._accepting.join(10)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connected,), daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        decoder = FrameDecoder()
        with connected, suppress(OSError):  # a load that ends with an error leaves without a word
            while data := connected.recv(1 << 16):
                for command in decoder.feed(data):
                    with self._lock:
                        self._reply(connected, encode(self._answer(command)))

    def _reply(self, connected: socket.socket, reply: bytes) -> None:
        if self.sends == 3 and self._sends_before_third:
            self._held = (connected, reply)
            return
        if self._silent_after is not None and self.sends > self._silent_after:
            return
        connected.sendall(reply)
        if self._held is not None and self.sends > self._sends_before_third:
            self._held[0].sendall(self._held[1])
            self._held = None

    def _answer(self, command: Command) -> Command:
        if command.code != 310:
            return command.reply(17, "no such topic")
        self.sends += 1
        code = self._codes[self.sends % len(self._codes)] if self.sends > 1 else 0
        shift = self._shift if self.sends > 1 else 0
        ext = {"msgId": "0", "queueId": "0", "queueOffset": str(self.sends)}
        return Command(code, command.opaque + shift, 1, ext, remark=None if code == 0 else "as scripted")


@pytest.fixture
def script(request: pytest.FixtureRequest) -> Iterator[ScriptedBroker]:
    broker = ScriptedBroker(*request.param[0], **request.param[1])
    yield broker
    broker.close()


SHAPES = pytest.mark.parametrize("shape", [(2, 4), (1, 1)])


def load(broker: ScriptedBroker, shape: tuple[int, int]) -> LoadReport:
    plan = SendPlan(seconds=1, warm_up_seconds=0, connections=shape[0], outstanding=shape[1])
    return send_load(run_loop(find_target(topic="orders", queues=4, broker=broker.address)), plan)


@SHAPES
@pytest.mark.parametrize("script", [((0, 2, 215), {})], indirect=True)
def test_flow_control_is_counted_and_does_not_end_the_load(script: ScriptedBroker, shape: tuple[int, int]) -> None:
    report = load(script, shape)
    assert report.messages > 0
    assert report.refused.keys() == {"SYSTEM_BUSY", "FLOW_CONTROL"}


@pytest.mark.parametrize("script", [((0, 2, 215), {})], indirect=True)
def test_nobody_waits_for_a_message_that_was_refused(script: ScriptedBroker) -> None:
    target = run_loop(find_target(topic="orders", queues=4, broker=script.address))
    with Links(script.address, 1) as opened:
        (link,) = opened.all
        sender = Sender(SendPlan(rate=1000.0), target, opened.all)
        due: dict[bytes, int] = {}
        sender.on_refused = due.pop
        sender.send_due(link, range(1, 31), due.update)
        assert len(due) == 30
        while sender.outstanding:
            for readable in opened.wait(10):
                sender.receive(readable)
    assert sender.refused == {"SYSTEM_BUSY": 10, "FLOW_CONTROL": 10}
    assert len(due) == sender.messages == 10


@SHAPES
@pytest.mark.parametrize("script", [((0, 16), {})], indirect=True)
def test_any_other_refusal_ends_it(script: ScriptedBroker, shape: tuple[int, int]) -> None:
    with pytest.raises(BrokerError, match="as scripted"):
        load(script, shape)


@SHAPES
@pytest.mark.parametrize("script", [((0,), {"opaque_shift": 500_000})], indirect=True)
def test_a_reply_to_a_request_nobody_made_is_an_error(script: ScriptedBroker, shape: tuple[int, int]) -> None:
    with pytest.raises(RemoteProtocolError, match="not outstanding"):
        load(script, shape)


@pytest.mark.parametrize("polls", [False, True])
@pytest.mark.parametrize("script", [((0,), {"silent_after": 5})], indirect=True)
def test_a_broker_that_falls_silent_is_given_up(
    script: ScriptedBroker, polls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "PATIENCE_SECONDS", 1.0)
    target = run_loop(find_target(topic="orders", queues=4, broker=script.address))
    plan = SendPlan(seconds=30, warm_up_seconds=0, connections=1, outstanding=1, polls=polls)
    with pytest.raises(RequestTimedOut, match="answered nothing for 1 s"):
        send_load(target, plan)


def test_a_silent_broker_is_given_up_by_a_process_that_is_interrupted_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that is stopped and goes on: each signal makes the kernel wait for its whole time again."""
    monkeypatch.setattr(links, "PATIENCE_SECONDS", 1.0)
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    is_over = threading.Event()

    def interrupt() -> None:
        while not is_over.wait(0.3):
            os.kill(os.getpid(), signal.SIGUSR1)

    interrupting = threading.Thread(target=interrupt)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        link = links.WaitingLink(f"127.0.0.1:{silent.getsockname()[1]}")
        interrupting.start()
        try:
            with link, pytest.raises(RequestTimedOut, match="answered nothing for 1 s"):
                link.read()
        finally:
            is_over.set()
            interrupting.join()
            signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("script", [((0,), {"sends_before_third": 3000})], indirect=True)
def test_a_reply_may_come_after_the_ring_of_frames_has_come_round(script: ScriptedBroker) -> None:
    target = run_loop(find_target(topic="orders", queues=4, broker=script.address))
    plan = SendPlan(size=4096, connections=2, outstanding=4)
    with Links(script.address, plan.connections) as opened:
        sender = Sender(plan, target, opened.all)
        assert sender.frames.count < 3000
        for link in opened.all:
            sender.send(link, plan.outstanding)
        while script.sends < 3500:
            for link in opened.wait(1):
                sender.send(link, sender.receive(link))
        while sender.outstanding:
            for link in opened.wait(1):
                sender.receive(link)
    assert sender.messages == script.sends - 1  # the first one was not the sender's


def test_a_server_of_another_protocol_is_told_apart() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connected, _ = listener.accept()
        with connected:
            connected.recv(1000)
            connected.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    threading.Thread(target=answer, daemon=True).start()
    done = bench("send", "--broker", f"127.0.0.1:{listener.getsockname()[1]}", code=1)
    listener.close()
    assert "the other end speaks HTTP" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_command_of_the_page_works(cluster: Standalone) -> None:
    page = Path(__file__).parent.parent.parent / "docs" / "how-to" / "measure.md"
    commands = re.findall(r"`downrange bench ([^`]+)`", page.read_text("utf-8"))
    assert len(commands) >= 7
    for command in commands:
        found = measured(*command.split(), "-b", cluster.broker, "-t", "page", "--seconds", "0.2", "--warm-up", "0")
        assert found["messages"] > 0, command
