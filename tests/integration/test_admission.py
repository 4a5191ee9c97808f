"""No request gets around admission, whatever its code, the port it comes to, its header, and what comes beside it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from downrange.auth.gate import Refusal
from downrange.broker import request_path
from downrange.broker.admission import Admission
from downrange.broker.app import RunningBroker
from downrange.broker.handlers.sends import Sends
from downrange.broker.pulls import Pulls
from downrange.broker.request_path import RequestPath
from downrange.broker.routes import Commands
from downrange.compiled import steps
from downrange.protocol.bodies.fields import encode_fields
from downrange.protocol.bodies.pull import PullMessageRequest
from downrange.protocol.bodies.send import BatchEntry, SendMessageRequest, encode_batch, encode_send_v1
from downrange.protocol.codes import RequestCode, ResponseCode, SerializeType
from downrange.protocol.command import ONEWAY_FLAG, Command
from downrange.protocol.errors import BrokerError
from downrange.protocol.framing import Frame, FrameDecoder, encode
from downrange.transport.connection import Connection
from downrange.transport.serving import Endpoint
from tests.support.broker_client import client_of, standalone

CODES = sorted({*map(int, RequestCode), -32768, -1, 0, 9, 999, 9999, 32767})
V1, V2, BATCH = RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE
PULLS = (RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)
SEND = SendMessageRequest(producer_group="p", topic="orders", queue_id=0, born_timestamp=1, properties="TAGS\x01a")
PULL = PullMessageRequest(
    consumer_group="g", topic="orders", queue_id=0, queue_offset=0, max_msg_nums=1, sys_flag=4, commit_offset=0,
    suspend_timeout_millis=0, subscription="*", sub_version=0, expression_type="TAG",
)  # fmt: skip
HEADERS = ("json", "json, code last", "json with spaces", "json, code written with an escape", "binary")


def request_frame(code: int, opaque: int, header: str = "json", flag: int = 0) -> bytes:
    """A request that would be carried out, with a header of one of the forms that the protocol allows."""
    body = b""
    match code:
        case RequestCode.SEND_MESSAGE:
            fields, body = encode_send_v1(SEND), b"single"
        case RequestCode.SEND_MESSAGE_V2:
            fields, body = encode_fields(SEND), b"single"
        case RequestCode.SEND_BATCH_MESSAGE:
            fields, body = encode_fields(SEND), encode_batch([BatchEntry(0, b"one", ""), BatchEntry(0, b"two", "")])
        case _ if code in PULLS:
            fields = encode_fields(PULL)
        case _:
            fields = {"topic": "orders", "group": "g", "consumerGroup": "g", "offset": "0", "queueId": "0"}
    if header == "binary" and code > 32767:
        header = "json"  # a binary header has two bytes for the code
    kind = SerializeType.ROCKETMQ if header == "binary" else SerializeType.JSON
    frame = encode(Command(code, opaque, flag, fields, body, serialize_type=int(kind)))
    if header in ("json", "binary"):
        return frame
    ((_, text, _),) = FrameDecoder().frames(frame)
    members = json.loads(text)
    if header == "json, code last":
        text = json.dumps({"opaque": opaque, **members, "code": members.pop("code")}).encode()
        assert not text.startswith(b'{"code"')
    elif header == "json with spaces":
        text = json.dumps(members, indent=1, separators=(" , ", " : ")).encode()
    else:
        text = json.dumps(members).encode().replace(b'"code"', b'"\\u0063ode"')
    return (4 + len(text) + len(body)).to_bytes(4, "big") + len(text).to_bytes(4, "big") + text + body


class Peers:
    """Sockets to one port, on which a test writes before the broker reads any of them."""

    def __init__(self, port: int, count: int) -> None:
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
        self._decoders = [FrameDecoder() for _ in range(count)]

    async def ask(self, frames: Sequence[bytes], replies: int) -> list[Command]:
        """Write the frames in turn over all sockets; so many replies, by opaque."""
        for number, peer in enumerate(self._sockets):
            peer.sendall(b"".join(frames[number :: len(self._sockets)]))
        answers: list[Command] = []
        async with asyncio.timeout(30):
            while len(answers) < replies:
                for peer, decoder in zip(self._sockets, self._decoders, strict=True):
                    peer.setblocking(False)
                    try:
                        data = peer.recv(1 << 20)
                    except BlockingIOError:
                        continue
                    finally:
                        peer.setblocking(True)
                    assert data, "the broker must not close the connection"
                    answers += decoder.feed(data)
                await asyncio.sleep(0)
        return sorted(answers, key=lambda reply: reply.opaque)

    def close(self) -> None:
        for peer in self._sockets:
            peer.close()


def ports(running: RunningBroker) -> tuple[int, int]:
    """The main port and the VIP port."""
    return running.config.broker.listen_port, running.config.broker.listen_port - 2


def refuse_everything(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let admission refuse all requests; returns the names of what runs nevertheless, to be filled."""
    ran: list[str] = []
    refusal = Refusal(BrokerError("nobody may", 16))
    monkeypatch.setattr(Admission, "admitted", lambda self, frames, origins, at, stop: (at, refusal))
    for owner, name in ((Commands, "answer"), (Commands, "take"), (Sends, "take"), (Pulls, "take")):
        monkeypatch.setattr(owner, name, lambda self, *_, what=f"{owner.__name__}.{name}": ran.append(what))
    return ran


def is_refused(reply: Command) -> bool:
    return (reply.code, reply.remark, bool(reply.body)) == (ResponseCode.NO_PERMISSION, "nobody may", False)


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("port", ["main", "VIP"])
async def test_what_admission_refuses_is_refused_whatever_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: str, header: str
) -> None:
    async with standalone(tmp_path) as running, client_of(running) as client:
        await client.send("orders", b"so that the queue is there", queue_id=0)
        peers = Peers(ports(running)[port == "VIP"], 1)
        await peers.ask([request_frame(V2, 1), request_frame(V2, 2)], 2)  # this connection is known, and the topic
        end, topics = running.store.max_offset, running.topics.data_version
        ran = refuse_everything(monkeypatch)
        for number, code in enumerate(CODES):
            (reply,) = await peers.ask([request_frame(code, number, header)], 1)
            assert (reply.opaque, is_refused(reply)) == (number, True), code
        assert (running.store.max_offset, running.topics.data_version, ran) == (end, topics, [])
        peers.close()


@pytest.mark.parametrize("port", ["main", "VIP"])
async def test_what_admission_refuses_is_refused_among_others_of_many_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: str
) -> None:
    async with standalone(tmp_path) as running, client_of(running) as client:
        await client.send("orders", b"so that the queue is there", queue_id=0)
        peers = Peers(ports(running)[port == "VIP"], 5)
        await peers.ask([request_frame(V2, number) for number in range(10)], 10)
        end, topics = running.store.max_offset, running.topics.data_version
        ran = refuse_everything(monkeypatch)
        # Each code stands once beside its like and once beside others, with every header; every seventh wants no reply.
        codes = [code for code in CODES for _ in HEADERS] + CODES * len(HEADERS)
        flags = [ONEWAY_FLAG if number % 7 == 6 else 0 for number in range(len(codes))]
        frames = [
            request_frame(code, number, HEADERS[number % len(HEADERS)], flags[number])
            for number, code in enumerate(codes)
        ]
        wanted = [number for number, flag in enumerate(flags) if not flag]
        replies = await peers.ask(frames, len(wanted))
        assert [reply.opaque for reply in replies] == wanted
        assert all(map(is_refused, replies))
        assert (running.store.max_offset, running.topics.data_version, ran) == (end, topics, [])
        peers.close()


class Recorder:
    """What every list of frames that came went through, by position."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.came: list[list[Frame]] = []  # kept, so that no other list gets its id
        self.connections = 0  # the largest number whose frames came together
        self.admitted: dict[int, list[int]] = {}
        self.taken: dict[int, list[int]] = {}
        deliver, admitted = Endpoint.deliver, Admission.admitted

        def record_deliver(endpoint: Endpoint, frames: list[Frame], origins: list[Connection]) -> None:
            if isinstance(getattr(endpoint.serve, "__self__", None), RequestPath):
                self.came.append(frames)
                self.connections = max(self.connections, len(set(origins)))
            deliver(endpoint, frames, origins)

        def record_admitted(
            admission: Admission, frames: list[Frame], origins: list[Connection], at: int, stop: int
        ) -> tuple[int, Refusal | None]:
            passed, refusal = admitted(admission, frames, origins, at, stop)
            self.admitted.setdefault(id(frames), []).extend(range(at, passed))
            return passed, refusal

        monkeypatch.setattr(Endpoint, "deliver", record_deliver)
        monkeypatch.setattr(Admission, "admitted", record_admitted)
        for family in (Sends, Pulls, Commands):
            self._record_taken(monkeypatch, family)

    def _record_taken(self, monkeypatch: pytest.MonkeyPatch, family: Any) -> None:
        take = family.take

        def record(self_: Any, frames: list[Frame], origins: list[Connection], at: int, stop: int) -> None:
            assert set(range(at, stop)) <= set(self.admitted[id(frames)]), "nothing is taken that was not admitted"
            self.taken.setdefault(id(frames), []).extend(range(at, stop))
            take(self_, frames, origins, at, stop)

        monkeypatch.setattr(family, "take", record)


@pytest.mark.parametrize("port", ["main", "VIP"])
async def test_every_request_passes_admission_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    async with standalone(tmp_path) as running, client_of(running) as client:
        await client.send("orders", b"so that the queue is there", queue_id=0)
        # Not those that change the broker itself, nor those that answer later or close connections.
        codes = [V1, V2, V2, BATCH, *PULLS, 28, 30, 31, 35, 38, 9999, 36, 37, 14, 15]
        frames = [
            request_frame(code, number, HEADERS[number // len(codes) % len(HEADERS)])
            for number, code in enumerate(codes * 20)
        ]
        monkeypatch.setattr(request_path, "thread_time", lambda: 0.0)  # requests that wait for a turn would come twice
        recorder = Recorder(monkeypatch)
        peers = Peers(ports(running)[port == "VIP"], 5)
        replies = await peers.ask(frames, len(frames))
        assert [reply.opaque for reply in replies] == list(range(len(frames)))
        assert sum(map(len, recorder.came)) == len(frames)
        assert recorder.connections > 1 or steps is None, "the compiled step reads many sockets together"
        for frames_that_came in recorder.came:
            everyone = list(range(len(frames_that_came)))
            assert recorder.admitted[id(frames_that_came)] == everyone, "each once, in order"
            assert recorder.taken[id(frames_that_came)] == everyone
        peers.close()
