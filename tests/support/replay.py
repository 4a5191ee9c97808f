"""Play what genuine clients once sent to a genuine broker to ours, and compare what both answer.

Rows are played in the order they were captured. A request goes out on the connection it came on, byte for byte unless
it names something that is different here (see `Replay._rewritten`). A captured reply is the moment to wait for ours.
What the broker pushes to a client is awaited the same way, and the client's captured reply to it goes back. The
broker's clock shows the time of the capture: it moves from row to row, so that what was due then is due now, without
waiting.
"""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from downrange.clock import ManualClock
from downrange.model.message import StoredMessage
from downrange.model.message_id import offset_message_id, pack_host, parse_offset_message_id
from downrange.model.properties import PUSH_REPLY_TIME, decode_properties
from downrange.model.record import decode_records
from downrange.protocol import java_json
from downrange.protocol.bodies.pull import PullSysFlag
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.framing import MAX_FRAME, FrameDecoder, encode
from tests.support.golden import Row, scenarios

SECONDS = 10.0
HELD_MILLIS = 300


def decode(frame: bytes) -> Command:
    (command,) = FrameDecoder(max_header=MAX_FRAME).feed(frame)
    return command


class Wire:
    """One client connection: frames out, and what came back, by opaque or by code."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._news = asyncio.Condition()
        self._replies: dict[int, Command] = {}
        self.pushed: list[Command] = []
        self.is_closed = False
        """Whether the broker closed the connection."""
        self._task = asyncio.create_task(self._read())

    @staticmethod
    async def open(port: int) -> Wire:
        return Wire(*await asyncio.open_connection("127.0.0.1", port))

    async def _read(self) -> None:
        decoder = FrameDecoder(max_header=MAX_FRAME)
        while data := await self._reader.read(65536):
            async with self._news:
                for command in decoder.feed(data):
                    if command.is_response:
                        self._replies[command.opaque] = command
                    else:
                        self.pushed.append(command)
                self._news.notify_all()
        async with self._news:
            self.is_closed = True
            self._news.notify_all()

    def write(self, frame: bytes) -> None:
        self._writer.write(frame)

    def has_reply_to(self, opaque: int) -> bool:
        return opaque in self._replies

    async def reply_to(self, opaque: int) -> Command | None:
        await self._wait(lambda: opaque in self._replies)
        return self._replies.pop(opaque, None)

    async def push_of(self, code: int) -> Command | None:
        """The oldest request the broker sent with this code."""
        await self._wait(lambda: any(command.code == code for command in self.pushed))
        found = next((command for command in self.pushed if command.code == code), None)
        if found is not None:
            self.pushed.remove(found)
        return found

    async def _wait(self, condition: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(SECONDS), self._news:
                await self._news.wait_for(lambda: condition() or self.is_closed)
        except TimeoutError:
            pass  # the caller finds nothing, and says what is missing

    async def close(self) -> None:
        self._writer.close()
        await self._task


@dataclass(frozen=True)
class Difference:
    """One thing our broker answered otherwise."""

    place: str
    request: int
    what: str
    golden: object
    ours: object

    def __str__(self) -> str:
        golden, ours = self.golden, self.ours
        if isinstance(golden, list | set) and isinstance(ours, list | set):
            golden, ours = (sorted(set(one) - set(other)) for one, other in ((golden, ours), (ours, golden)))
        return f"{self.place} request {self.request} {self.what}: golden {golden!r}, ours {ours!r}"


class Replay:
    """The state that goes through the scenarios of one capture: connections, and where captured messages lie here."""

    def __init__(self, port: int, vip_port: int, clock: ManualClock) -> None:
        self._port = port
        self._vip_port = vip_port
        self._clock = clock
        self._physical_offsets: dict[int, int] = {}
        self.archive = "frames.tar.xz"
        self.compared = 0
        self.before_push: dict[int, Callable[[], Awaitable[None]]] = {}
        """What makes the broker push a request of this code now, where it would at times of its own."""

    async def play(self, name: str, began: int | None = None) -> list[Difference]:
        """One scenario, which began at a time; what differs."""
        rows = [row for row in scenarios(self.archive)[name] if "namesrv" not in (row.sender, row.receiver)]
        answers = {(row.connection, row.opaque): row for row in rows if row.sender == "broker" and row.is_response}
        requests: dict[tuple[int, int], Command] = {}
        pushes: dict[tuple[int, int], int] = {}
        wires: dict[int, Wire] = {}
        found: list[Difference] = []
        began = begin_of(rows) if began is None else began
        last_of = {row.connection: row for row in rows}
        for row in rows:
            await self._clock.advance(max(0.0, (began + row.millis - self._clock.now()) / 1000))
            wire = wires.get(row.connection)
            if wire is None:
                port = self._vip_port if "over VIP port" in row.note and row.code == 310 else self._port
                wire = wires[row.connection] = await Wire.open(port)
            captured = decode(row.frame)
            key = (row.connection, row.opaque)
            if row.sender == "client" and row.is_response:
                if key in pushes:
                    wire.write(encode(captured, pushes[key]))
            elif row.sender == "client":
                requests[key] = captured
                answer = answers.get(key)
                wire.write(self._rewritten(row, captured, decode(answer.frame) if answer else None))
                if answer is not None:
                    await self._taken(wire, row)
            elif row.is_response:
                reply = await wire.reply_to(row.opaque)
                found += self._differences(row, requests[key], captured, reply)
            else:
                if row.code in self.before_push and not any(push.code == row.code for push in wire.pushed):
                    await self.before_push[row.code]()
                pushed = await wire.push_of(row.code)
                if pushed is not None:
                    pushes[key] = pushed.opaque
                found += self._differences(row, captured, captured, pushed)
            if row is last_of[row.connection]:
                await wire.close()
        return found

    async def _taken(self, wire: Wire, row: Row) -> None:
        """Wait, where the time of the capture must not go on before our broker has looked at the request."""

    # --- what is different here -----------------------------------------------------------------------------------

    def _rewritten(self, row: Row, command: Command, answer: Command | None) -> bytes:
        """The request's bytes, with other values only where the captured ones cannot mean the same here."""
        fields = dict(command.ext_fields)
        changed = dict(fields)
        if command.code in (RequestCode.VIEW_MESSAGE_BY_ID, RequestCode.CONSUMER_SEND_MSG_BACK):
            offset = int(fields["offset"])
            changed["offset"] = str(self._physical_offsets.get(offset, offset))
        if command.code == RequestCode.END_TRANSACTION:
            offset = int(fields["commitLogOffset"])
            changed["commitLogOffset"] = str(self._physical_offsets.get(offset, offset))
        if command.code == RequestCode.CONSUME_MESSAGE_DIRECTLY and len(fields["msgId"]) == OFFSET_ID_LENGTH:
            offset = parse_offset_message_id(fields["msgId"]).physical_offset
            here = pack_host("10.0.0.1", self._port)
            changed["msgId"] = offset_message_id(here, self._physical_offsets.get(offset, offset))
        if answer is not None and answer.code in WITHOUT_MESSAGE and is_held(command):
            changed["suspendTimeoutMillis"] = str(HELD_MILLIS)  # nothing comes while it waits: no need to wait long
        if changed == fields:
            return row.frame
        return encode(msgspec.structs.replace(command, raw_ext=changed))

    # --- comparing ------------------------------------------------------------------------------------------------

    def _differences(self, row: Row, request: Command, golden: Command, ours: Command | None) -> Iterator[Difference]:
        self.compared += 1
        if ours is None:
            yield Difference(row.place, request.code, "answer", golden.code, None)
            return

        def differs(what: str, theirs: object, our: object) -> Iterator[Difference]:
            if theirs != our:
                yield Difference(row.place, request.code, what, theirs, our)

        yield from differs("code", golden.code, ours.code)
        if golden.code != ours.code:
            return
        yield from differs("flag", golden.flag, ours.flag)
        yield from differs("header encoding", golden.serialize_type, ours.serialize_type)
        theirs, our = dict(golden.ext_fields), dict(ours.ext_fields)
        yield from differs("ext field names", sorted(theirs), sorted(our))
        for name in theirs.keys() & our.keys():
            yield from differs(f"ext field {name}", *self._comparable(name, theirs[name], our[name]))
        if golden.code != ResponseCode.SUCCESS and not quotes_java(golden.remark):
            yield from differs("remark", plain_remark(golden.remark), plain_remark(ours.remark))
        yield from self._body_differences(row, request, golden.body_bytes, ours.body_bytes)

    def _comparable(self, name: str, theirs: str, our: str) -> tuple[object, object]:
        if name in ("msgId", "offsetMsgId") and theirs != our:  # a recall answers with a unique id
            return theirs, theirs if self._are_same_ids(theirs, our) else our
        if name == "commitLogOffset":
            return theirs, theirs if self._same_place(int(theirs), int(our)) else our
        if name in VOLATILE:
            return kind_of(theirs), kind_of(our)
        if name == "properties":
            return self._plain_properties(theirs), self._plain_properties(our)
        return theirs, our

    def _plain_properties(self, text: str) -> dict[str, str]:
        return {name: value for name, value in decode_properties(text).items() if name != PUSH_REPLY_TIME}

    def _are_same_ids(self, theirs: str, our: str) -> bool:
        golden_ids, our_ids = theirs.split(","), our.split(",")
        return len(golden_ids) == len(our_ids) and all(map(self._same_id, golden_ids, our_ids))

    def _same_id(self, theirs: str, our: str) -> bool:
        golden, ours = parse_offset_message_id(theirs), parse_offset_message_id(our)
        return golden.store_host.host == ours.store_host.host and self._same_place(
            golden.physical_offset, ours.physical_offset
        )

    def _same_place(self, theirs: int, our: int) -> bool:
        """Is this the message that lay at `theirs`? The first answer that names a message says where it lies here."""
        if theirs not in self._physical_offsets and our in self._physical_offsets.values():
            return False
        return self._physical_offsets.setdefault(theirs, our) == our

    def _body_differences(self, row: Row, request: Command, theirs: bytes, our: bytes) -> Iterator[Difference]:
        def differs(what: str, golden: object, ours: object) -> Iterator[Difference]:
            if golden != ours:
                yield Difference(row.place, request.code, what, golden, ours)

        if request.code == RequestCode.GET_TIMER_CHECK_POINT:
            # Read time, end of the timer log, queue offset, the master's queue offset; then a version.
            yield from differs("checkpoint", *(struct.unpack(">4q", text[:32]) for text in (theirs, our)))
            yield from differs("body length", len(theirs), len(our))
        elif not theirs or not our:
            yield from differs("body length", len(theirs), len(our))
        elif theirs[:1] == b"\0":
            golden_records, our_records = list(decode_records(theirs)), list(decode_records(our))
            yield from differs("number of records", len(golden_records), len(our_records))
            for golden, ours in zip(golden_records, our_records, strict=False):
                if not self._same_place(golden.physical_offset, ours.physical_offset):
                    yield from differs("physical offset", golden.physical_offset, ours.physical_offset)
                yield from differs("record", self._plain(golden), self._plain(ours))
        elif request.code == RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT:
            yield from differs("body", theirs, our)
        elif request.code == RequestCode.GET_BROKER_CONFIG:
            keys = [{line.partition("=")[0] for line in text.decode().splitlines()} for text in (theirs, our)]
            yield from differs("missing keys", set(), keys[0] - keys[1])
        elif request.code == RequestCode.GET_BROKER_RUNTIME_INFO:
            yield from differs("keys", *(runtime_keys(text) for text in (theirs, our)))
        else:
            yield from differs("body", plain_json(theirs), plain_json(our))

    def _plain(self, message: StoredMessage) -> dict[str, object]:
        """What two records of the same message agree in."""
        properties = message.properties
        properties.pop("ORIGIN_MESSAGE_ID", None)
        return {
            "topic": message.topic,
            "queue": (message.queue_id, message.queue_offset),
            "body": message.body,
            "properties": properties,
            "flags": (message.flag, message.sys_flag),
            "born": message.born_timestamp,
            "store host": message.store_host.host,
            "attempts": message.reconsume_times,
            "size": message.store_size,
        }


OFFSET_ID_LENGTH = 32
# A held pull is answered so when its time is over, or was answered so then and is held here (see the test's table).
WITHOUT_MESSAGE = {
    ResponseCode.PULL_NOT_FOUND,
    ResponseCode.PULL_RETRY_IMMEDIATELY,
    ResponseCode.SUBSCRIPTION_NOT_LATEST,
}

# Members whose values are times, rates, addresses or positions of this very run: only their kind is compared.
VOLATILE = {
    *("counter", "timestamp", "version", "indexLastUpdatePhyoffset", "indexLastUpdateTimestamp"),
    *("lastUpdateTimestamp", "lastTimestamp", "minTimeStamp", "maxTimeStamp", "consumeTimeStamp", "delayTime"),
    *("consumeTps", "tps", "sum", "avgpt", "physicOffset"),
    *("clientAddr", "remoteIP", "brokerAddr", "bornHost", "storeHost", "storeTimestamp"),
}


def begin_of(rows: Sequence[Row]) -> int:
    """When a scenario began, in milliseconds since 1970: as late as the times named in its requests allow."""
    latest = 0
    for row in rows:
        if row.sender == "client" and not row.is_response:
            named = re.findall(rb"17[0-9]{11}(?![0-9])", row.frame)
            latest = max([latest, *(int(text) - row.millis for text in named)])
    return latest


def is_held(command: Command) -> bool:
    fields = command.ext_fields
    pulls = (RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)
    return command.code in pulls and bool(int(fields["sysFlag"]) & PullSysFlag.SUSPEND)


def quotes_java(remark: str | None) -> bool:
    """Texts of Java exceptions are Java's business."""
    return remark is not None and re.match(r"(java|com|org)\.[\w.]+(Exception|Error)", remark) is not None


def plain_remark(remark: str | None) -> str:
    """A remark without the socket address of a client."""
    return re.sub(r"\b(10\.0\.0\.9|127\.0\.0\.1):\d+", "CLIENT", remark or "").strip()


def runtime_keys(text: bytes) -> list[str]:
    """What a broker tells about itself, without the directory that is part of one key."""
    return sorted({re.sub("_/.*", "_DIRECTORY", key) for key in java_json.loads(text)["table"]})


def kind_of(value: object) -> str:
    """Whether something is there at all, and of which kind."""
    text = str(value)
    if text.lstrip("-").replace(".", "", 1).isdigit():
        return "number"
    return "JSON" if text.startswith("{") else "text"


def plain_json(text: bytes) -> object:
    """The value of a body, with times and the like replaced by their kind and lists in an order of their own."""
    return _plain_value(java_json.loads(text))


def _plain_value(value: Any, name: str = "") -> Any:
    if name in VOLATILE:
        return kind_of(value)
    if isinstance(value, dict):
        return {key: _plain_value(member, key) for key, member in value.items()}
    if isinstance(value, list):
        return sorted((_plain_value(member) for member in value), key=repr)
    return value
