"""Members of a mixed group, of which some are Apache's C++ client, over a kill -9 of their broker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from downrange import Message, MQError, Producer, PushConsumer, ReceivedMessage
from tests.interop.test_cpp_client import CppClient
from tests.support.standalone_process import standalone_process

QUEUES = set(range(4))


@pytest.mark.slow
def test_every_member_consumes_again_after_the_broker_was_killed(tmp_path: Path) -> None:
    """The pulls that the C++ client loses end after 30 s; a queue that it gives up before that is lost to it."""
    ours: list[tuple[float, int]] = []
    sent: set[str] = set()
    stop = threading.Event()

    def on_message(message: ReceivedMessage) -> None:
        ours.append((time.time(), message.queue_id))
        got.add(message.body.decode())

    def produce(namesrv: str) -> None:
        with Producer("p", namesrv) as producer:
            while not stop.wait(0.02):
                with suppress(MQError):  # while there is no broker
                    producer.send(Message("orders", b"%d" % len(sent)))
                    sent.add(str(len(sent)))

    def shares() -> list[set[int]]:
        """The queues of which each member got messages in the last 5 s, and from the broker that runs now."""
        since = max(time.time() - 5, started[-1])
        of_cpp = [{line["queue_id"] for line in one.messages if line["at"] / 1000 > since} for one in members]
        return [*of_cpp, {queue for at, queue in ours if at > since}]

    def wait_until(condition: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, shares()
            time.sleep(0.5)

    got: set[str] = set()
    started = [time.time()]
    members: list[CppClient] = []
    with standalone_process(tmp_path) as first:
        namesrv_port, broker_port = (int(address.rpartition(":")[2]) for address in (first.namesrv, first.broker))
        producing = threading.Thread(target=produce, args=(first.namesrv,))
        producing.start()
        try:
            wait_until(lambda: bool(sent), 30)
            for name in ("m0", "m1"):
                home = tmp_path / name
                home.mkdir()
                order = {"do": "consume", "namesrv": first.namesrv, "group": "mixed", "topic": "orders"}
                members.append(CppClient({**order, "instance": name}, home))
            with PushConsumer("mixed", first.namesrv, on_message=on_message) as consumer:
                consumer.subscribe("orders")
                wait_until(lambda: all(shares()) and set.union(*shares()) == QUEUES, 90)
                first.process.kill()
                with standalone_process(tmp_path, namesrv_port=namesrv_port, broker_port=broker_port):
                    started.append(time.time())
                    wait_until(lambda: all(shares()) and set.union(*shares()) == QUEUES, 120)
                    stop.set()
                    wait_until(lambda: sent <= got | {line["body"] for one in members for line in one.messages}, 60)
        finally:
            stop.set()
            producing.join()
            for member in members:
                with member.process:  # closes its pipes
                    member.process.kill()
                    member.end()
