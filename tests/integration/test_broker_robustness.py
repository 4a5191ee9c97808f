"""Clients that idle, do not read, or send rubbish cost a broker little, and nobody else anything."""

from __future__ import annotations

import random
import resource
import socket
import statistics
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from downrange.protocol import bodies
from downrange.protocol.bodies.fields import Header
from downrange.protocol.codes import RequestCode, SerializeType
from downrange.protocol.command import Command
from downrange.protocol.framing import MAX_FRAME, FrameDecoder, encode
from tests.support.broker_client import BrokerClient
from tests.support.golden import scenarios
from tests.support.requests import connected, create_topic
from tests.support.standalone_process import Standalone, standalone_process

MIB = 1 << 20
IDLE_CONNECTIONS = 5000
# Requests whose answer may come late: a broker holds pulls, and asks other clients about these.
MAY_BE_LATE = {
    int(RequestCode.PULL_MESSAGE),
    int(RequestCode.LITE_PULL_MESSAGE),
    int(RequestCode.GET_CONSUMER_RUNNING_INFO),
    int(RequestCode.CONSUME_MESSAGE_DIRECTLY),
    int(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS),
}


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


def socket_to(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def connect_without_reading(address: str) -> socket.socket:
    """A connection whose replies pile up at the other end soon."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, _, port = address.rpartition(":")
    connection.connect((host, int(port)))
    return connection


def fill(connection: socket.socket, frame: bytes) -> None:
    """Send the same request until the other end takes no more."""
    connection.setblocking(False)
    try:
        while True:
            connection.send(frame * 100)
            time.sleep(0.001)  # a broker that would take more gets the time to do it
    except BlockingIOError:
        pass


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


# --- rubbish ----------------------------------------------------------------------------------------------------------


def field_names() -> list[str]:
    """Every ext field any request has, so that rubbish gets past the first look."""
    for module in ("admin", "consumers", "groups", "offsets", "pull", "query", "send", "statistics", "topics"):
        __import__(f"{bodies.__name__}.{module}")
    names = {field.encode_name for header in _all_headers(Header) for field in msgspec.structs.fields(header)}
    assert len(names) > 50
    return sorted(names)


def _all_headers(kind: type[Header]) -> list[type[Header]]:
    return [found for child in kind.__subclasses__() for found in (child, *_all_headers(child))]


VALUES = [
    *("", "0", "1", "-1", "2147483648", "-9223372036854775809", "1.5", "NaN", "true", "null", "x", "\0", "\x01\x02"),
    *("robust", "%RETRY%robust", "%DLQ%", "SCHEDULE_TOPIC_XXXX", "TBW102", "../../etc", "a" * 300, "a@b", "ü"),
]
BODIES = [
    *(b"", b"{}", b"[]", b"null", b"not json", b'{"a":', b"\xff\xfe", b"\0" * 64, b"[" * 5000, b'{"$ref":"$"}'),
    *(
        b'{"clientID":1,"consumerDataSet":7}',
        b'{"topicConfigTable":[]}',
        b"=\n==\nbrokerName=x\nx",
        b"a=1\nlistenPort=-1",
    ),
    *(b'{"mqSet":[{"topic":null}],"consumerGroup":{}}', b"\x7f\xff\xff\xff" * 8, b"\0\0\0\x20" + b"\xff" * 40),
]


def rubbish(code: int, names: list[str], source: random.Random) -> Iterator[Command]:
    """Requests of one code: nothing in them, everything in them wrong, and something of each."""
    yield Command(code)
    yield Command(code, body=source.choice(BODIES))
    for kind in SerializeType:
        for count in (3, 12, len(names)):
            fields = {name: source.choice(VALUES) for name in source.sample(names, count)}
            body = source.choice([*BODIES, source.randbytes(source.randrange(200))])
            yield Command(code, raw_ext=fields, body=body, serialize_type=kind)


def nearly_right(source: random.Random) -> Iterator[Command]:
    """What genuine clients sent, each with one thing wrong."""
    for name, rows in scenarios().items():
        for row in rows:
            if (row.sender, row.receiver) != ("client", "broker") or row.is_response or name.startswith("ha/"):
                continue
            (command,) = FrameDecoder(max_header=MAX_FRAME).feed(row.frame)
            if command.code == RequestCode.UPDATE_BROKER_CONFIG:
                continue  # a broker that was told to take no messages takes none
            fields = dict(command.ext_fields)
            if fields and source.random() < 0.7:
                field = source.choice(sorted(fields))
                if source.random() < 0.3:
                    del fields[field]
                else:
                    fields[field] = source.choice(VALUES)
            body = bytearray(command.body_bytes)
            if body and source.random() < 0.5:
                body[source.randrange(len(body))] = source.randrange(256)
                del body[source.randrange(len(body)) + 1 :]
            yield msgspec.structs.replace(command, raw_ext=fields, body=bytes(body))


class RubbishSender:
    """Sends requests and reads what comes; a connection the broker closes is opened anew."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket = socket_to(address)
        self._decoder = FrameDecoder()
        self.answers = 0
        self.closed = 0

    def ask(self, commands: list[Command]) -> None:
        """Every request is answered, or the connection ends; those that may be answered late are not waited for."""
        waiting = {
            opaque
            for opaque, command in enumerate(commands)
            if command.code not in MAY_BE_LATE and not command.is_oneway
        }
        try:
            self._socket.sendall(b"".join(encode(command, opaque) for opaque, command in enumerate(commands)))
            while waiting:
                data = self._socket.recv(65536)
                if not data:
                    raise ConnectionResetError
                for reply in self._decoder.feed(data):
                    if reply.is_response:
                        waiting.discard(reply.opaque)
                        self.answers += 1
        except ConnectionError:
            self.closed += 1
            self.reconnect()

    def send_bytes(self, data: bytes) -> None:
        """What is not a frame is never answered."""
        try:
            self._socket.sendall(data)
            self._socket.shutdown(socket.SHUT_WR)
            while self._socket.recv(65536):
                pass
        except ConnectionError:
            pass
        self.closed += 1
        self.reconnect()

    def reconnect(self) -> None:
        self._socket.close()
        self._socket = socket_to(self._address)
        self._decoder = FrameDecoder()

    def close(self) -> None:
        self._socket.close()


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


def batched(commands: Iterator[Command], size: int) -> Iterator[list[Command]]:
    while batch := list(islice(commands, size)):
        yield batch
