"""Clients that idle, do not read, or send rubbish cost a broker little, and nobody else anything."""

from __future__ import annotations

import asyncio
import random
import resource
import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from downrange.broker.config import BrokerConfig
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.framing import FrameDecoder, encode
from tests.support.broker_client import BrokerClient
from tests.support.requests import connected, create_topic
from tests.support.rubbish import (
    RubbishSender,
    batched,
    connect_without_reading,
    field_names,
    fill,
    nearly_right,
    rubbish,
    socket_to,
)
from tests.support.standalone_process import Standalone, standalone_process

MIB = 1 << 20
IDLE_CONNECTIONS = 5000


@pytest.fixture(autouse=True)
def _many_files() -> Iterator[None]:
    """This process and the servers it starts may open as many files as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard >= IDLE_CONNECTIONS + 1000, f"at most {hard} open files are allowed here: raise the hard limit"
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Standalone]:
    """A broker that must end in good order, whatever was done to it."""
    with standalone_process(tmp_path, {"maxMessageSize": 4 * MIB}) as running:
        yield running
        assert running.process.stop() == 0
        assert "Traceback" not in running.process.errors, running.process.errors


async def send_latencies(client: BrokerClient, count: int) -> list[float]:
    latencies = []
    for _ in range(count):
        began = time.perf_counter()
        await client.send("robust", b"x" * 128)
        latencies.append(time.perf_counter() - began)
    return latencies


async def test_thousands_of_idle_connections_and_a_slow_reader_do_not_disturb_a_sender(servers: Standalone) -> None:
    async with connected(servers.broker) as client:
        await create_topic(client, "robust", queues=4)
        quiet = await send_latencies(client, 100)
        before = servers.resident_bytes
        idle = [socket_to(servers.broker) for _ in range(IDLE_CONNECTIONS)]
        slow = connect_without_reading(servers.broker)
        fill(slow, encode(client.pull_command("robust", queue_id=0)))
        crowded = await send_latencies(client, 300)
        growth = servers.resident_bytes - before
        assert servers.open_files > IDLE_CONNECTIONS
        for connection in (*idle, slow):
            connection.close()
    # Each send is one round trip, and a busy machine is busy before and after.
    assert statistics.median(crowded) < 0.05 + 5 * statistics.median(quiet)
    assert growth < 64 * MIB, f"{growth / MIB:.1f} MiB for {IDLE_CONNECTIONS} idle connections and one slow reader"


async def test_pulls_of_a_client_that_does_not_read_cost_bounded_memory(servers: Standalone) -> None:
    async with connected(servers.broker) as client:
        await create_topic(client, "backlog", queues=1)
        for _ in range(64):
            await client.send("backlog", b"b" * 65536)
        before = servers.resident_bytes
        deaf = [connect_without_reading(servers.broker) for _ in range(8)]
        pulls = encode(client.pull_command("backlog")) * 500
        for connection in deaf:
            connection.setblocking(False)
            connection.send(pulls)  # eight times 500 replies of 256 KiB: a gigabyte, if they were all made
        for _ in range(200):  # by then the broker has long done all it does for the deaf ones
            await client.send("backlog", b"still served")
        growth = servers.resident_bytes - before
        for connection in deaf:
            connection.close()
    assert growth < 64 * MIB, f"{growth / MIB:.1f} MiB"


async def test_long_polls_of_a_client_that_stops_reading_cost_bounded_memory(servers: Standalone) -> None:
    async with connected(servers.broker) as client:
        await create_topic(client, "polled", queues=1)
        await client.send("polled", b"first")
        before = servers.resident_bytes
        deaf = connect_without_reading(servers.broker)
        held = 5000
        polls = [encode(client.pull_command("polled", offset=1, wait_millis=30_000), opaque) for opaque in range(held)]
        question = encode(Command(RequestCode.GET_MAX_OFFSET, raw_ext={"topic": "polled", "queueId": "0"}), held)
        deaf.sendall(b"".join([*polls, question]))
        (answer,) = FrameDecoder().feed(deaf.recv(4096))
        assert answer.opaque == held  # the last request is answered, so all before it are held
        holding = servers.resident_bytes - before
        await client.send("polled", b"m" * 200_000)  # wakes them all: a gigabyte of replies nobody reads
        (message,), _ = await client.pull("polled", offset=1)
        assert len(message.body) == 200_000
        woken = servers.resident_bytes - before
        deaf.close()
    assert holding < 32 * MIB, f"{holding / MIB:.1f} MiB for {held} held pulls"
    assert woken < 160 * MIB, f"{woken / MIB:.1f} MiB after they were woken"


async def test_a_broker_that_was_stopped_refuses_nothing_that_lay_in_its_sockets(tmp_path: Path) -> None:
    """Refusing is for a broker that has too much to do. One that stood still has no more to do than before."""
    default = BrokerConfig().wait_time_mills_in_send_queue
    with standalone_process(tmp_path, {"waitTimeMillsInSendQueue": default}) as running:
        async with connected(running.broker) as client:
            await create_topic(client, "robust", queues=4)
            for _ in range(3):
                running.process.signal(signal.SIGSTOP)
                sent = [client.connection.request_nowait(client.send_command("robust", b"x")) for _ in range(200)]
                await asyncio.sleep(3 * default / 1000)
                running.process.signal(signal.SIGCONT)
                async with asyncio.timeout(60):
                    codes = Counter([(await one).code for one in sent])
                assert codes == {ResponseCode.SUCCESS: 200}


# --- rubbish ----------------------------------------------------------------------------------------------------------


async def test_rubbish_of_every_request_code_is_refused(servers: Standalone) -> None:
    source = random.Random(20_111)
    names = field_names()
    await say_something(servers)
    sender = RubbishSender(servers.broker)
    for code in range(401):
        sender.ask(list(rubbish(code, names, source)))
    sender.close()
    assert sender.answers > 2000, f"{sender.answers} answers, {sender.closed} connections closed"
    await say_something(servers)


async def test_requests_with_one_thing_wrong_are_refused_or_served(servers: Standalone) -> None:
    source = random.Random(20_112)
    await say_something(servers)
    sender = RubbishSender(servers.broker)
    for commands in batched(nearly_right(source), 10):
        sender.ask(commands)
    sender.close()
    assert sender.answers > 500, f"{sender.answers} answers, {sender.closed} connections closed"
    await say_something(servers)


async def test_what_is_not_a_frame_closes_the_connection(servers: Standalone) -> None:
    source = random.Random(20_113)
    sender = RubbishSender(servers.broker)
    for data in (
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff\xff\xff\xff" * 4,
        b"\x7f\xff\xff\xff\x00\x00\x00\x10",
        b"\0\0\0\x08\x02\0\0\x04abcd",
        b"\0\0\0\x08\0\0\0\x04[1]]",
        b'\0\0\0\x0a\0\0\0\x06{"a":\0',
        b"\0\0\0\x06\x01\0\0\x02\0\0",
        *(source.randbytes(source.randrange(1, 400)) for _ in range(200)),
    ):
        sender.send_bytes(data)
    sender.close()
    await say_something(servers)


async def say_something(servers: Standalone) -> None:
    """The broker takes a message and gives it back."""
    async with connected(servers.broker) as client:
        await create_topic(client, "robust", queues=4)
        sent = await client.send("robust", b"hello", queue_id=1)
        (message, *_), _ = await client.pull("robust", queue_id=1, offset=sent.queue_offset)
    assert message.body == b"hello"
