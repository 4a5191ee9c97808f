"""Clients that a broker must outlive: those that do not read, and requests that are wrong in some way."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from itertools import islice

import msgspec

from downrange.protocol import bodies
from downrange.protocol.bodies.fields import Header
from downrange.protocol.codes import RequestCode, SerializeType
from downrange.protocol.command import Command
from downrange.protocol.framing import MAX_FRAME, FrameDecoder, encode
from tests.support.golden import scenarios

# Requests whose answer may come late: a broker holds pulls, and asks other clients about these.
MAY_BE_LATE = {
    int(RequestCode.PULL_MESSAGE),
    int(RequestCode.LITE_PULL_MESSAGE),
    int(RequestCode.GET_CONSUMER_RUNNING_INFO),
    int(RequestCode.CONSUME_MESSAGE_DIRECTLY),
    int(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS),
}


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


def right() -> Iterator[Command]:
    """What genuine clients sent."""
    for name, rows in scenarios().items():
        for row in rows:
            if (row.sender, row.receiver) != ("client", "broker") or row.is_response or name.startswith("ha/"):
                continue
            (command,) = FrameDecoder(max_header=MAX_FRAME).feed(row.frame)
            if command.code != RequestCode.UPDATE_BROKER_CONFIG:  # a broker told to take no messages takes none
                yield command


def nearly_right(source: random.Random) -> Iterator[Command]:
    """What genuine clients sent, each with one thing wrong."""
    for command in right():
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


def batched(commands: Iterator[Command], size: int) -> Iterator[list[Command]]:
    while batch := list(islice(commands, size)):
        yield batch
