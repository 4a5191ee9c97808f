"""Answers requests with what genuine servers of RocketMQ once answered, on one port for name server and broker.

A request gets the captured answer to a request of its code that names the same topic, group and client. Where there is
none, it gets the answer that RocketMQ has for a topic or group it does not know, or for a code it does not know.
"""

from __future__ import annotations

import socketserver
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import RESPONSE_FLAG, Command
from downrange.protocol.framing import MAX_FRAME, FrameDecoder, encode
from tests.support.golden import Row, scenarios
from tests.support.replay import decode

NAMING = ("topic", "consumerGroup", "clientId")


class Capture(NamedTuple):
    """A release: which captures are of it, the address that its broker had, and where its table of topics is."""

    directories: tuple[str, ...]
    broker: str
    topics: str = "frames.tar.xz"


CAPTURES = {
    "4.9.8": Capture(("498-json", "ha"), "10.0.0.1:40911"),
    "5.3.3": Capture(("533/",), "10.0.0.1:45911", "controller-533.tar.xz"),
}


def rows_of(capture: Capture) -> Iterator[tuple[Row, ...]]:
    for name, rows in scenarios().items():
        if name.startswith(capture.directories):
            yield rows
    for rows in scenarios(capture.topics).values():
        yield tuple(row for row in rows if row.code == RequestCode.GET_ALL_TOPIC_CONFIG or row.is_response)


def names_in(command: Command) -> tuple[str | None, ...]:
    fields = command.ext_fields
    return tuple(fields.get(name) for name in NAMING)


class Answers:
    """The captured answers of a release, by the code of the request."""

    def __init__(self, capture: Capture) -> None:
        self._broker = capture.broker
        self._known: defaultdict[int, list[tuple[tuple[str | None, ...], Command]]] = defaultdict(list)
        for rows in rows_of(capture):
            self._learn(rows)

    def _learn(self, rows: Iterable[Row]) -> None:
        waiting: dict[tuple[int, str, int], Row] = {}
        for row in rows:
            if not row.is_response:
                waiting[row.connection, row.sender, row.opaque] = row
            elif (asked := waiting.pop((row.connection, row.receiver, row.opaque), None)) is not None:
                self._known[asked.code].append((names_in(decode(asked.frame)), decode(row.frame)))

    def answer(self, request: Command, address: str) -> Command:
        found = [reply for names, reply in self._known.get(request.code, ()) if names == names_in(request)]
        if not found:
            return self._unknown(request)
        reply = max(found, key=lambda one: (one.code == ResponseCode.SUCCESS, len(one.body_bytes)))
        body = reply.body_bytes
        if request.code in (RequestCode.GET_BROKER_CLUSTER_INFO, RequestCode.GET_ROUTEINFO_BY_TOPIC):
            body = body.replace(self._broker.encode(), address.encode())
        return Command(reply.code, request.opaque, RESPONSE_FLAG, dict(reply.ext_fields), body, reply.remark)

    def _unknown(self, request: Command) -> Command:
        if self._known.get(request.code):
            text = f"nothing of these names was captured: {names_in(request)}"
            return Command(ResponseCode.SYSTEM_ERROR, request.opaque, RESPONSE_FLAG, remark=text)
        text = f" request type {request.code} not supported"
        return Command(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, request.opaque, RESPONSE_FLAG, remark=text)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    answers: Answers
    address: str


class _Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        decoder = FrameDecoder(max_header=MAX_FRAME)
        try:
            while data := self.request.recv(65536):
                for command in decoder.feed(data):
                    if not command.is_response and not command.is_oneway:
                        self.request.sendall(encode(self.server.answers.answer(command, self.server.address)))
        except OSError:
            return  # the client has gone


@contextmanager
def captured_server(release: str) -> Iterator[str]:
    """The address of a server of a release, for the length of a block."""
    with _Server(("127.0.0.1", 0), _Connection) as server:
        server.answers = Answers(CAPTURES[release])
        server.address = f"127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server.address
        finally:
            server.shutdown()
            thread.join(10)
