"""Drain a backlog: every queue from its first message to its last.

Queues are cut into stretches. A lane takes a stretch and pulls it, each pull where the last one ended; a connection has
as many lanes as it may have pulls outstanding. Of every reply the header is decoded whole and the first record looked
at; of every `_WALKED`th, all records are counted.
"""

from __future__ import annotations

import struct
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from downrange.client.load.histogram import Histogram
from downrange.client.load.links import Link, Links
from downrange.client.load.plans import PullPlan
from downrange.client.load.report import LoadReport, Moment
from downrange.client.load.sending import NOT_NOW, PATIENCE_SECONDS
from downrange.client.load.target import Target
from downrange.model.record import MAGIC_V1, MAGIC_V2
from downrange.protocol.bodies.fields import encode_fields
from downrange.protocol.bodies.pull import PullMessageRequest, PullMessageResponse, PullSysFlag
from downrange.protocol.codes import VERSION_4_9_8, RequestCode, ResponseCode, SerializeType
from downrange.protocol.command import Command
from downrange.protocol.errors import RemoteProtocolError, broker_error, code_name
from downrange.protocol.framing import MAX_FRAME, FrameDecoder, encode
from downrange.settings import ConfigError
from downrange.transport.errors import RequestTimedOut

GROUP: Final = "downrange-bench"
_STRETCH: Final = 2048  # messages
_WALKED: Final = 16
# A record up to its queue offset: size, magic, CRC, queue id, flag, queue offset. See docs/formats/record.md.
RECORD_START: Final = struct.Struct(">iIIiiq")


@dataclass(slots=True)
class _Lane:
    """One pull at a time."""

    link: Link
    opaque: int
    queue_id: int = 0
    offset: int = 0
    end: int = 0
    sent_at: int = 0


def pull_load(target: Target, plan: PullPlan) -> LoadReport:
    backlog = sum(end - first for first, end in (target.ranges or {}).values())
    if not backlog:
        raise ConfigError(f"the topic {target.topic} is empty: send something first, with `downrange bench send`")
    with Links(target.address, plan.connections) as links:
        return _Drain(target, plan, links).run()


class _Drain:
    """All lanes of a load. Holds always: `messages` counts each offset of the backlog at most once."""

    def __init__(self, target: Target, plan: PullPlan, links: Links) -> None:
        self._target = target
        self._plan = plan
        self._links = links
        self._stretches = deque(stretches(target))
        self._decoders = {link: FrameDecoder(max_header=MAX_FRAME) for link in links.all}
        self._template = PullTemplate(target.topic, plan.header, target.broker_name)
        self._lanes: dict[int, _Lane] = {}
        self._messages = 0
        self._replies = 0
        self._latency = Histogram()
        self._refused: Counter[str] = Counter()

    def run(self) -> LoadReport:
        begun = Moment.now(self._target.server, 0)
        for number in range(self._plan.connections * self._plan.outstanding):
            lane = _Lane(self._links.all[number % self._plan.connections], number + 1)
            if self._take_stretch(lane):
                self._lanes[lane.opaque] = lane
        for lane in self._lanes.values():
            lane.link.write(self._pull(lane))
        last_answer = started = time.monotonic()
        while self._lanes:
            readable = self._links.wait(0.1)
            now = time.monotonic()
            if now - started > self._plan.seconds:
                break
            for link in readable:
                self._receive(link)
            last_answer = now if readable else last_answer
            if now - last_answer > PATIENCE_SECONDS:
                raise RequestTimedOut(f"{self._target.address} has answered nothing for {PATIENCE_SECONDS:g} s")
        ended = Moment.now(self._target.server, self._messages)
        return LoadReport.between("pull", begun, ended, self._target.server, {"pull": self._latency}, self._refused)

    def _take_stretch(self, lane: _Lane) -> bool:
        if not self._stretches:
            return False
        lane.queue_id, lane.offset, lane.end = self._stretches.popleft()
        return True

    def _pull(self, lane: _Lane) -> bytes:
        lane.sent_at = time.monotonic_ns()
        count = min(self._plan.max_messages, lane.end - lane.offset)
        return self._template.fill(lane.opaque, lane.queue_id, lane.offset, count)

    def _receive(self, link: Link) -> None:
        decoder = self._decoders[link]
        pulls: list[bytes] = []
        replies = decoder.feed(link.read())
        now = time.monotonic_ns()
        for reply in replies:
            if not reply.is_response:
                continue
            lane = self._lanes.get(reply.opaque)
            if lane is None:
                raise RemoteProtocolError(f"the broker answered a pull that is not outstanding: {reply.opaque}")
            self._latency.record(now - lane.sent_at)
            if reply.code == ResponseCode.SUCCESS:
                self._found(lane, reply)
            elif reply.code in NOT_NOW or reply.code == ResponseCode.PULL_RETRY_IMMEDIATELY:
                self._refused[code_name(reply.code)] += 1
            else:
                raise broker_error(reply.code, reply.remark or f"queue {lane.queue_id} at {lane.offset}")
            if lane.offset < lane.end or self._take_stretch(lane):
                pulls.append(self._pull(lane))
            else:
                del self._lanes[lane.opaque]
        if decoder.error is not None:
            raise decoder.error
        if pulls:
            link.write(b"".join(pulls))

    def _found(self, lane: _Lane, reply: Command) -> None:
        body = reply.body_bytes
        next_offset = reply.header(PullMessageResponse).next_begin_offset
        count = next_offset - lane.offset
        if count <= 0 or len(body) < RECORD_START.size:
            raise RemoteProtocolError(f"the broker found nothing in queue {lane.queue_id} at {lane.offset} and said so")
        _, magic, _, queue_id, _, queue_offset = RECORD_START.unpack_from(body)
        if magic not in (MAGIC_V1, MAGIC_V2) or (queue_id, queue_offset) != (lane.queue_id, lane.offset):
            raise RemoteProtocolError(
                f"asked for queue {lane.queue_id} at {lane.offset}, got queue {queue_id} at {queue_offset}"
            )
        if self._replies % _WALKED == 0 and (held := count_records(body)) != count:
            raise RemoteProtocolError(f"a pull reply says it has {count} messages and has {held}")
        self._replies += 1
        self._messages += count
        lane.offset = next_offset


def stretches(target: Target) -> Iterator[tuple[int, int, int]]:
    """`(queue, first, end)` pieces of the backlog, of all queues in turn."""
    reach = target.ranges or {}
    longest = max(end - first for first, end in reach.values())
    for past in range(0, longest, _STRETCH):
        for queue_id, (first, end) in reach.items():
            if first + past < end:
                yield queue_id, first + past, min(first + past + _STRETCH, end)


def count_records(body: bytes) -> int:
    at = count = 0
    while at < len(body):
        at += int.from_bytes(body[at : at + 4], "big")
        count += 1
    return count


class PullTemplate:
    """Pull requests of one group for one topic; what changes from pull to pull is filled in."""

    def __init__(self, topic: str, header: SerializeType, broker_name: str = "", *, hold_millis: int = 0) -> None:
        self._header = header
        flags = PullSysFlag.SUBSCRIPTION | (PullSysFlag.SUSPEND if hold_millis else PullSysFlag(0))
        self._fields = encode_fields(
            PullMessageRequest(
                consumer_group=GROUP,
                topic=topic,
                queue_id=0,
                queue_offset=0,
                max_msg_nums=0,
                sys_flag=int(flags),
                commit_offset=0,
                suspend_timeout_millis=hold_millis,
                subscription="*",
                sub_version=0,
                expression_type="TAG",
                bname=broker_name or None,
            )
        )
        same = {
            name: value for name, value in self._fields.items() if name not in ("queueId", "queueOffset", "maxMsgNums")
        }
        changing = b'{"queueId":"%d","queueOffset":"%d","maxMsgNums":"%d",'
        start = b'{"code":%d,"extFields":' % RequestCode.PULL_MESSAGE
        text = msgspec.json.encode(same).replace(b"%", b"%%")  # a topic's name may hold one
        end = (
            b',"flag":0,"language":"PYTHON","opaque":%%d,"serializeTypeCurrentRPC":"JSON","version":%d}' % VERSION_4_9_8
        )
        self._json = start + changing + text[1:] + end

    def fill(self, opaque: int, queue_id: int, offset: int, count: int) -> bytes:
        if self._header is SerializeType.JSON:
            header = self._json % (queue_id, offset, count, opaque)
            return (len(header) + 4).to_bytes(4, "big") + len(header).to_bytes(4, "big") + header
        self._fields["queueId"] = str(queue_id)
        self._fields["queueOffset"] = str(offset)
        self._fields["maxMsgNums"] = str(count)
        return encode(Command(RequestCode.PULL_MESSAGE, opaque, raw_ext=self._fields, serialize_type=int(self._header)))
