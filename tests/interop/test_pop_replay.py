"""What genuine POP clients sent to a genuine 5.3.3 broker, sent to ours: the same answers, but for a named few."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from downrange.broker.app import RunningBroker, broker
from downrange.broker.config import BrokerConfig
from downrange.clock import ManualClock
from downrange.model import properties as names
from downrange.model.message import StoredMessage
from downrange.model.record import decode_records
from downrange.protocol.bodies.body import decode_body, encode_body
from downrange.protocol.bodies.pop import BatchAckMessageBody, ReceiptHandle, read_offset_info
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.framing import encode
from downrange.store.config import StoreConfig
from tests.support.golden import Row
from tests.support.replay import SECONDS, Difference, Replay, Wire

SCENARIOS = [
    *("pop_basic", "pop_batch_ack", "pop_change", "pop_notification", "pop_order", "pop_push_consumer", "pop_revive"),
    "pop_wrong",
]
ACK, BATCH, CHANGE, POP = (
    RequestCode.ACK_MESSAGE,
    RequestCode.BATCH_ACK_MESSAGE,
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME,
    RequestCode.POP_MESSAGE,
)
WAITING = (POP, RequestCode.NOTIFICATION)


class OnPurpose(NamedTuple):
    """A difference we want: to which request, in what, where the genuine answer looks so, and why."""

    request: int
    what: str
    golden: str
    because: str
    place: str = ""


ANY_REQUEST = 0
_SLOW = "the genuine broker took more than half a second; ours looks at the request in time, and finds what is wrong"
ON_PURPOSE = [
    OnPurpose(RequestCode.HEART_BEAT, "ext field names", "IS_SUB_CHANGE", "4.9 answers heartbeats without fields"),
    OnPurpose(RequestCode.PULL_MESSAGE, "ext field names", "groupSysFlag", "4.9 has no such fields"),
    OnPurpose(RequestCode.SEND_MESSAGE_V2, "ext field names", "transactionId", "4.9 names it for transactions only"),
    OnPurpose(POP, "code", "^210$", _SLOW, "pop_wrong"),
    OnPurpose(
        POP,
        "number of records|ext field msgOffsetInfo",
        "",
        "a handle whose lease was changed has no effect; RocketMQ delivers the message once for each of its changes",
        "pop_change",
    ),
    OnPurpose(ANY_REQUEST, "remark", "not exist|is illegal", "the page that 5.x names for help is another one"),
    OnPurpose(
        CHANGE, "ext field invisibleTime", "2446", "counted from the pop of this run, which was earlier", "pop_order"
    ),
    OnPurpose(
        RequestCode.QUERY_CONSUMER_OFFSET,
        "code",
        "^22$",
        "a group that is new begins with the first message of a young queue, as in 4.9.8",
        "pop_push_consumer",
    ),
    OnPurpose(CHANGE, "remark", "not set any response code", "RocketMQ forgot to say why"),
]


class PopReplay(Replay):
    """Handles name the time of a pop and its revive queue, which are others here."""

    def __init__(self, running: RunningBroker, clock: ManualClock) -> None:
        port = running.config.broker.listen_port
        super().__init__(port, port, clock)
        self._waiting = running.pop.state.waiting
        self.archive = "pop-533.tar.xz"
        self._pops: dict[int, tuple[int, int]] = {}
        """Time of a captured pop -> time and revive queue of ours."""

    async def _taken(self, wire: Wire, row: Row) -> None:
        async with asyncio.timeout(SECONDS):
            while not wire.has_reply_to(row.opaque) and not (row.code in WAITING and len(self._waiting)):
                await asyncio.sleep(0.001)

    def _rewritten(self, row: Row, command: Command, answer: Command | None) -> bytes:
        fields = dict(command.ext_fields)
        body = command.body_bytes
        if "extraInfo" in fields and fields["extraInfo"].count(" ") >= 7:
            fields["extraInfo"] = str(self._handle(ReceiptHandle.parse(fields["extraInfo"])))
        if command.code in WAITING and answer is not None and not _found(answer):
            fields["pollTime"] = "0"  # nothing comes while it waits: no need to wait
        if "bornTime" in fields and answer is not None and "too much" not in (answer.remark or ""):
            fields["bornTime"] = str(self._clock.now())  # rows are not as exact as the times they name
        if command.code == BATCH and body[:1] == b"{":
            batch = decode_body(BatchAckMessageBody, body)
            acks = []
            for ack in batch.acks:
                pop_time, revive_queue = self._pops.get(ack.pop_time, (ack.pop_time, ack.revive_queue_id))
                acks.append(msgspec.structs.replace(ack, pop_time=pop_time, revive_queue_id=revive_queue))
            body = encode_body(msgspec.structs.replace(batch, acks=tuple(acks)))
        if fields == command.ext_fields and body == command.body_bytes:
            return super()._rewritten(row, command, answer)
        return encode(msgspec.structs.replace(command, raw_ext=fields, body=body))

    def _handle(self, handle: ReceiptHandle) -> ReceiptHandle:
        pop_time, revive_queue = self._pops.get(handle.pop_time, (handle.pop_time, handle.revive_queue))
        return handle._replace(pop_time=pop_time, revive_queue=revive_queue)

    def _differences(self, row: Row, request: Command, golden: Command, ours: Command | None) -> Iterator[Difference]:
        if request.code in (POP, CHANGE) and ours is not None and ours.code == golden.code == 0:
            theirs, our = golden.ext_fields, ours.ext_fields
            self._pops[int(theirs["popTime"])] = int(our["popTime"]), int(our["reviveQid"])
        yield from super()._differences(row, request, golden, ours)

    def _comparable(self, name: str, theirs: str, our: str) -> tuple[object, object]:
        if name == "popTime":
            return theirs == "0", our == "0"
        if name == "reviveQid":
            return theirs == "999", our == "999"
        if name in ("startOffsetInfo", "msgOffsetInfo"):  # queues are looked at in a random order
            return sorted(read_offset_info(theirs)), sorted(read_offset_info(our))
        return super()._comparable(name, theirs, our)

    def _body_differences(self, row: Row, request: Command, theirs: bytes, our: bytes) -> Iterator[Difference]:
        if request.code == POP and theirs and our:
            golden, ours = (sorted(decode_records(part), key=_place) for part in (theirs, our))
            if len(golden) != len(ours):
                yield Difference(row.place, POP, "number of records", len(golden), len(ours))
            for one, other in zip(golden, ours, strict=False):
                left, right = self._plain(one), self._plain(other)
                if left != right:
                    yield Difference(row.place, POP, "record", left, right)
            return
        yield from super()._body_differences(row, request, theirs, our)

    def _plain(self, message: StoredMessage) -> dict[str, object]:
        found = super()._plain(message)
        properties = dict(message.properties)
        for name in (names.POP_CK, names.FIRST_POP_TIME):
            if name in properties:
                properties[name] = re.sub(r"17\d{11} (\d+) \d+", r"TIME \1", properties[name]).replace("17", "T", 1)[:1]
        # 5.x and ours keep other properties of a send; both are compared elsewhere.
        for name in (names.WAIT, names.MSG_REGION, names.TRACE_ON, names.CLUSTER):
            properties.pop(name, None)
        found["properties"] = properties
        del found["size"]
        return found


def _found(answer: Command) -> bool:
    return answer.code == ResponseCode.SUCCESS and answer.ext_fields.get("hasMsg") != "false"


def _place(message: StoredMessage) -> tuple[int, int]:
    return message.queue_id, message.queue_offset


def unexpected(found: list[Difference], scenario: str) -> list[str]:
    return [str(each) for each in found if not any(_is_on_purpose(each, rule, scenario) for rule in ON_PURPOSE)]


def _is_on_purpose(found: Difference, rule: OnPurpose, scenario: str) -> bool:
    return (
        rule.request in (ANY_REQUEST, found.request)
        and re.fullmatch(rule.what, found.what) is not None
        and re.search(rule.golden, str(found.golden)) is not None
        and rule.place in scenario
    )


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_captured_pops_get_the_same_answers(scenario: str, tmp_path: Path) -> None:
    clock = ManualClock(1_794_800_000_000)
    config = BrokerConfig(
        broker_name="broker-a", broker_ip1="127.0.0.1", listen_port=0, metrics_port=-1, busy_poll_micros=0
    )
    store = StoreConfig(
        store_path_root_dir=tmp_path / "store",
        mapped_file_size_commit_log=1 << 22,
        max_hash_slot_num=1000,
        max_index_num=4000,
    )
    async with broker(config, store, clock) as running:
        replay = PopReplay(running, clock)
        found = await replay.play(f"pop-533/{scenario}")
        assert unexpected(found, scenario) == []
        assert replay.compared > 10
        running.pop.state.check_invariants()
