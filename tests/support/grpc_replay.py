"""Captured conversations of gRPC clients, played again against our server by a client of another project (grpcio).

Calls are opened, written to and ended in the order of the capture. What depends on the run is translated: receipt
handles, recall handles, delivery times. Answers are compared after `normal`, which drops places, times and handles.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import tarfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import grpc.aio

from downrange.proxy.times import millis, put
from downrange.proxy.wire import messages
from tests.support.golden import GOLDEN

_SECONDS: Final = 40
_PREFIX: Final = "org.apache.rocketmq.proxy.common.ProxyException: "
_FAQ: Final = "\nFor more information, please visit the url, https://rocketmq.apache.org/docs/bestPractice/06FAQ"
# Properties of the system that the genuine proxy shows as the user's.
LEAKED: Final = frozenset(
    {
        "__SHARDINGKEY", "TRACE_CONTEXT", "__transactionId__", "TRANSACTION_CHECK_TIMES",
        "CHECK_IMMUNITY_TIME_IN_SECONDS",
    }
)  # fmt: skip
_PLACES: Final = ("store_timestamp", "store_host", "receipt_handle", "queue_offset", "queue_id", "delivery_timestamp")


@dataclass(frozen=True)
class GrpcRow:
    call: int
    method: str
    event: str
    note: str
    data: bytes
    type: str
    members: dict[str, Any]


@cache
def conversations() -> dict[str, tuple[GrpcRow, ...]]:
    """Scenario -> its rows."""
    found = {}
    with tarfile.open(GOLDEN / "grpc-533.tar.xz") as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            name = member.name.removeprefix("grpc/").removesuffix(".jsonl")
            found[name] = tuple(_row(json.loads(line)) for line in file.read().decode().splitlines())
    return found


def seconds_of(scenario: str) -> float:
    """How long a conversation took."""
    rows = conversations()[scenario]
    taken: int = rows[-1].members["t_ms"] - rows[0].members["t_ms"]
    return taken / 1000


def _row(row: dict[str, Any]) -> GrpcRow:
    data = base64.b64decode(row["b64"]) if "b64" in row else b""
    if "b64z" in row:
        data = zlib.decompress(base64.b64decode(row["b64z"]))
    kind = (row.get("type") or "").rpartition(".")[2]
    return GrpcRow(row["call"], row["method"], row["event"], row.get("note", ""), data, kind, row)


@dataclass
class Outcome:
    """What one call was answered with, captured and ours: messages by their type, and the end of the call."""

    note: str
    method: str
    captured: list[Any] = field(default_factory=list)
    ours: list[Any] = field(default_factory=list)
    captured_end: tuple[int, str] = (0, "")
    our_end: tuple[int, str] | None = None

    def code(self) -> int:
        """The code of our answer."""
        status: int = self.ours[0].status.code if self.ours else 0
        return status

    def differences(self) -> list[str]:
        """Where ours is not what was captured."""
        captured, ours = ([normal(one) for one in each] for each in (self.captured, self.ours))
        # Which queue is read first is chance, and so is which transaction is asked about first.
        captured, ours = (sorted(each, key=_message_id) for each in (captured, ours))
        found = [
            f"captured {one}\n    ours {other}" for one, other in zip(captured, ours, strict=False) if one != other
        ]
        if len(captured) != len(ours):
            found.append(f"{len(captured)} messages captured, {len(ours)} ours: {ours}")
        if self.our_end is not None and self.our_end != self.captured_end:
            found.append(f"ends with {self.captured_end}, ours with {self.our_end}")
        return found


def normal(message: Any) -> dict[str, Any]:
    """The members of an answer that do not depend on the run."""
    found = _dict(message)
    _clean(found)
    return found


def _dict(message: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry:
            found[descriptor.name] = dict(value)
        elif descriptor.message_type is None:
            found[descriptor.name] = list(value) if isinstance(value, list) or hasattr(value, "append") else value
        elif hasattr(value, "add"):
            found[descriptor.name] = [_dict(one) for one in value]
        else:
            found[descriptor.name] = _dict(value)
    return found


def _clean(found: dict[str, Any]) -> None:
    if "message" in found and isinstance(found["message"], str):
        found["message"] = found["message"].removeprefix(_PREFIX).removesuffix(_FAQ)
    if "user_properties" in found:
        kept = {name: value for name, value in found["user_properties"].items() if name not in LEAKED}
        found["user_properties"] = kept
        if not kept:
            del found["user_properties"]
    for name in (*_PLACES, "offset", "recall_handle"):
        found.pop(name, None)
    for value in found.values():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict):
                _clean(one)


def _message_id(found: dict[str, Any]) -> str:
    if "recover_orphaned_transaction_command" in found:
        return f"1 {found['recover_orphaned_transaction_command']['transaction_id']}"
    system = found.get("message", {}).get("system_properties", {}) if isinstance(found.get("message"), dict) else {}
    return f"1 {system.get('message_id')}" if system else "0" if "status" in found else "2"


class Replay:
    """One conversation against one server."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.aio.insecure_channel(target)
        self._calls: dict[int, Any] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._translated: dict[str, str] = {}
        self._of_message: dict[str, str] = {}
        """The ids of messages by their captured handles."""
        self._newest: dict[str, str] = {}
        """Our newest handle of each message, for messages that came with another call than in the capture."""

    async def play(self, rows: tuple[GrpcRow, ...], *, with_pauses: bool = False) -> list[Outcome]:
        """`with_pauses`: no call is opened earlier after the first one than it was then."""
        began = time.monotonic()
        try:
            for row in rows:
                if with_pauses and row.event == "open":
                    millis_later = row.members["t_ms"] - rows[0].members["t_ms"]
                    await asyncio.sleep(max(0.0, began + millis_later / 1000 - time.monotonic()))
                await self._step(row)
            return list(self._outcomes.values())
        finally:
            for call in self._calls.values():
                call.cancel()
            await self._channel.close()

    async def _step(self, row: GrpcRow) -> None:
        outcome = self._outcomes.get(row.call)
        call = self._calls.get(row.call)
        if row.event == "open":
            metadata = [(key, value) for key, value in row.members["metadata"] if key.startswith(("x-mq", "auth"))]
            left = row.members["timeout_ms"]
            opened = self._channel.stream_stream(row.members["path"])(
                metadata=metadata, timeout=None if left is None else max(left, 100) / 1000
            )
            self._calls[row.call] = opened
            self._outcomes[row.call] = Outcome(row.note, row.method)
            return
        assert call is not None
        assert outcome is not None
        if row.event == "c2s":
            with contextlib.suppress(grpc.aio.AioRpcError):  # the call has ended: its end says why
                await call.write(self._ours(row, outcome))
        elif row.event == "half_close":
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call.done_writing()
        elif row.event == "s2c":
            expected = getattr(messages, row.type).FromString(row.data)
            outcome.captured.append(expected)
            if row.method != "ReceiveMessage":
                await self._read(call, outcome, expected)
        elif row.event == "close":
            if row.method == "ReceiveMessage":
                await self._read_all(call, outcome)
            elif row.method == "Telemetry":
                await self._read_rest(call, outcome)
            outcome.captured_end = (row.members["status_code"], row.members["details"] or "")
            async with asyncio.timeout(_SECONDS):
                outcome.our_end = ((await call.code()).value[0], await call.details() or "")
        elif row.event == "cancelled_by_client":
            call.cancel()

    async def _read(self, call: Any, outcome: Outcome, expected: Any) -> None:
        kind = type(expected)
        while True:
            async with asyncio.timeout(_SECONDS):
                data = await call.read()
            if not isinstance(data, bytes):
                return  # the call has ended: the number of messages says so
            got = kind.FromString(data)
            # Settings are sent a second time after a second, for clients that need that.
            if row_is_repeated(outcome, got) and normal(got) != normal(expected):
                continue
            outcome.ours.append(got)
            self._learn(expected, got)
            return

    async def _read_all(self, call: Any, outcome: Outcome) -> None:
        async with asyncio.timeout(_SECONDS):
            while isinstance(data := await call.read(), bytes):
                outcome.ours.append(messages.ReceiveMessageResponse.FromString(data))
        captured = {one.message.system_properties.message_id: one.message for one in outcome.captured}
        for one in outcome.captured:
            system = one.message.system_properties
            self._of_message[system.receipt_handle] = system.message_id
        for one in outcome.ours:
            system = one.message.system_properties
            self._newest[system.message_id] = system.receipt_handle
            if system.message_id in captured:
                before = captured[system.message_id].system_properties.receipt_handle
                self._translated[before] = system.receipt_handle

    async def _read_rest(self, call: Any, outcome: Outcome) -> None:
        """The end of a stream comes behind its last message: what was sent before, once more, or a difference."""
        async with asyncio.timeout(_SECONDS):
            while isinstance(data := await _read(call), bytes):
                got = messages.TelemetryCommand.FromString(data)
                if normal(got) not in [normal(one) for one in outcome.ours]:
                    outcome.ours.append(got)

    def _learn(self, captured: Any, ours: Any) -> None:
        for name in ("receipt_handle", "recall_handle"):
            if getattr(captured, name, ""):
                self._translated[getattr(captured, name)] = getattr(ours, name)
        if isinstance(captured, messages.SendMessageResponse):
            for one, other in zip(captured.entries, ours.entries, strict=False):
                self._learn(one, other)

    def _ours(self, row: GrpcRow, outcome: Outcome) -> bytes:
        if not row.type or not hasattr(messages, row.type):
            return row.data
        try:
            message = getattr(messages, row.type).FromString(row.data)
        except Exception:  # bytes that are no message
            return row.data
        outcome.note = row.note
        for holder in (message, *getattr(message, "entries", ())):
            for name in ("receipt_handle", "recall_handle"):
                value = getattr(holder, name, "")
                if value:
                    newest = self._newest.get(self._of_message.get(value, ""), value)
                    setattr(holder, name, self._translated.get(value, newest))
        for one in getattr(message, "messages", ()):
            system = one.system_properties
            if system.HasField("delivery_timestamp"):
                ahead = millis(system.delivery_timestamp) - millis(system.born_timestamp)
                put(system.delivery_timestamp, int(time.time() * 1000) + ahead)
        data: bytes = message.SerializeToString()
        return data


async def _read(call: Any) -> Any:
    """The next message of a call, or None at its end, be it a failure."""
    try:
        return await call.read()
    except grpc.aio.AioRpcError:
        return None


def row_is_repeated(outcome: Outcome, got: Any) -> bool:
    return outcome.method == "Telemetry" and bool(outcome.ours) and normal(outcome.ours[-1]) == normal(got)


def topics_of(rows: tuple[GrpcRow, ...]) -> Iterator[str]:
    """The topics that a conversation names."""
    for row in rows:
        if row.event == "c2s":
            yield from _names(row.members.get("json"), "topic")


def queues_of(rows: tuple[GrpcRow, ...], topic: str) -> int:
    """How many queues a topic had, as the routes of a conversation tell; 2 if they do not."""
    routes = (messages.QueryRouteResponse.FromString(row.data) for row in rows if row.type == "QueryRouteResponse")
    found = ([one for one in route.message_queues if one.topic.name == topic] for route in routes)
    return max(map(len, found), default=0) or 2


def groups_of(rows: tuple[GrpcRow, ...]) -> Iterator[str]:
    for row in rows:
        if row.event == "c2s":
            yield from _names(row.members.get("json"), "group")


def _names(value: Any, wanted: str, under: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        if under == wanted and "name" in value:
            yield value["name"]
        for name, member in value.items():
            yield from _names(member, wanted, name)
    elif isinstance(value, list):
        for one in value:
            yield from _names(one, wanted, under)
