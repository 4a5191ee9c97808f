"""Drains a backlog: pulls every queue from its first message to its last.

Queues are cut into stretches. A lane pulls one stretch after another, each pull beginning where the last one ended; a
connection has a lane for each pull that may be outstanding. In every reply the code, the opaque, the next offset and
the first record are checked; in every `_WALKED`th reply all records are counted. With a filter by tags the broker
decides how far a pull gets, and the records of every reply are counted.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from downrange.load.histogram import Histogram
from downrange.load.links import Link, Links
from downrange.load.outstanding import FIRST_OPAQUE
from downrange.load.plans import PullPlan
from downrange.load.pull_replies import (
    RECORD_START,
    PullReplies,
    count_records,
    expected_header,
    next_offset_in,
)
from downrange.load.pull_requests import PullRequests
from downrange.load.replies import ReplyLayout, decode_reply, learn_layout
from downrange.load.report import LoadReport, Moment
from downrange.load.sending import NOT_NOW, check_alive
from downrange.load.target import Target
from downrange.model.record import MAGIC_V1, MAGIC_V2
from downrange.protocol.bodies.pull import PullMessageResponse
from downrange.protocol.codes import ResponseCode, SerializeType
from downrange.protocol.errors import RemoteProtocolError, broker_error, code_name
from downrange.settings import ConfigError

_STRETCH: Final = 2048  # messages
_LONG_STRETCH: Final = 16_384  # with a filter, a pull looks at hundreds of messages and may pass the end of a stretch
_WALKED: Final = 16


@dataclass(slots=True)
class _Lane:
    """Makes one pull at a time. Only a reply with as many messages as asked for contains the bytes `usual`."""

    link: Link
    opaque: int
    queue_id: int = 0
    offset: int = 0
    end: int = 0
    sent_at: int = 0
    next_offset: int = 0
    usual: bytes = b""


def pull_load(target: Target, plan: PullPlan) -> LoadReport:
    backlog = sum(end - first for first, end in (target.ranges or {}).values())
    if not backlog:
        raise ConfigError(f"the topic {target.topic} is empty: send something first, with `downrange bench send`")
    with Links(target.address, plan.connections, tls=target.tls) as links:
        return _Drain(target, plan, links).run()


class _Drain:
    """All lanes of a load. Holds always: `messages` counts each offset of the backlog at most once."""

    def __init__(self, target: Target, plan: PullPlan, links: Links) -> None:
        self._target = target
        self._plan = plan
        self._links = links
        self._picks = plan.tags != "*"
        self._stretches = deque(stretches(target, _LONG_STRETCH if self._picks else _STRETCH))
        self._replies_of = {link: PullReplies() for link in links.all}
        self._requests = PullRequests(target.topic, plan.header, target.broker_name, tags=plan.tags)
        self._layout: ReplyLayout | None = None
        self._kind = plan.header
        self._lanes: dict[int, _Lane] = {}
        self._by_key: dict[bytes, _Lane] = {}
        self._messages = 0
        self._replies = 0
        self._latency = Histogram()
        self._refused: Counter[str] = Counter()

    def run(self) -> LoadReport:
        begun = Moment.now(self._target.server, 0)
        for number in range(self._plan.connections * self._plan.outstanding):
            lane = _Lane(self._links.all[number % self._plan.connections], FIRST_OPAQUE + number)
            if self._take_stretch(lane):
                self._lanes[lane.opaque] = lane
        for lane in self._lanes.values():
            lane.link.write(self._pull(lane, time.monotonic_ns()))
        last_answer = started = time.monotonic()
        while self._lanes:
            readable = self._links.wait(0.1)
            now = time.monotonic()
            if now - started > self._plan.seconds:
                break
            for link in readable:
                self._receive(link)
            last_answer = check_alive(self._target.address, now if readable else last_answer, now)
        ended = Moment.now(self._target.server, self._messages)
        return LoadReport.between("pull", begun, ended, self._target.server, {"pull": self._latency}, self._refused)

    def _take_stretch(self, lane: _Lane) -> bool:
        if not self._stretches:
            return False
        lane.queue_id, lane.offset, lane.end = self._stretches.popleft()
        return True

    def _pull(self, lane: _Lane, now: int) -> bytes:
        offset = lane.offset
        count = lane.end - offset
        if count > self._plan.max_messages or self._picks:
            count = self._plan.max_messages
        lane.sent_at = now
        lane.next_offset = next_offset = offset + count
        lane.usual = expected_header(self._kind, next_offset)
        return self._requests.frame(lane.opaque, lane.queue_id, offset, count)

    def _receive(self, link: Link) -> None:
        replies = self._replies_of[link]
        by_key = self._by_key
        pulls: list[bytes] = []
        places = replies.feed(link.read(), self._layout)
        data = replies.data
        now = time.monotonic_ns()
        sent: list[int] = []
        for key, at, body_at, stop in places:
            lane = by_key.get(key)
            if lane is not None and self._picks:
                self._picked(lane, next_offset_in(self._kind, data, at, body_at), data, body_at, stop)
            elif lane is not None and data.find(lane.usual, at, body_at) > 0:
                self._found(lane, lane.next_offset, data, body_at, stop)
            else:
                lane = self._unusual(data[at:stop])
                if lane is None:
                    continue
            sent.append(lane.sent_at)
            if lane.offset < lane.end or self._take_stretch(lane):
                pulls.append(self._pull(lane, now))
            else:
                self._end(lane)
        for moment, times in Counter(sent).items():
            self._latency.record(now - moment, times)
        if pulls:
            link.write(b"".join(pulls))

    def _unusual(self, frame: bytes) -> _Lane | None:
        """Decode a whole reply: the first one, a refusal, or one with fewer messages than asked for."""
        reply = decode_reply(frame)
        if not reply.is_response:
            return None
        lane = self._lanes.get(reply.opaque)
        if lane is None:
            raise RemoteProtocolError(f"the broker answered a pull that is not outstanding: {reply.opaque}")
        if reply.code == ResponseCode.SUCCESS:
            body_at = len(frame) - len(reply.body_bytes)
            found = self._picked if self._picks else self._found
            found(lane, reply.header(PullMessageResponse).next_begin_offset, frame, body_at, len(frame))
            if self._layout is None:
                self._layout = learn_layout(frame[:body_at], reply)
                self._kind = SerializeType.JSON if self._layout.is_json else SerializeType.ROCKETMQ
                self._by_key = {self._layout.key(opaque): lane for opaque, lane in self._lanes.items()}
        elif reply.code == ResponseCode.PULL_RETRY_IMMEDIATELY and self._picks:  # none of hundreds of messages matched
            lane.offset = max(lane.offset, reply.header(PullMessageResponse).next_begin_offset)
        elif reply.code in NOT_NOW or reply.code == ResponseCode.PULL_RETRY_IMMEDIATELY:
            self._refused[code_name(reply.code)] += 1
        else:
            raise broker_error(reply.code, reply.remark or f"queue {lane.queue_id} at {lane.offset}")
        return lane

    def _found(self, lane: _Lane, next_offset: int, data: bytes, at: int, stop: int) -> None:
        count = next_offset - lane.offset
        if count <= 0 or stop - at < RECORD_START.size:
            raise RemoteProtocolError(f"the broker found nothing in queue {lane.queue_id} at {lane.offset} and said so")
        magic, queue_id, queue_offset = RECORD_START.unpack_from(data, at)
        if queue_offset != lane.offset or queue_id != lane.queue_id or (magic != MAGIC_V1 and magic != MAGIC_V2):
            raise RemoteProtocolError(
                f"asked for queue {lane.queue_id} at {lane.offset}, got queue {queue_id} at {queue_offset}"
            )
        if self._replies % _WALKED == 0 and (held := count_records(data, at, stop)) != count:
            raise RemoteProtocolError(f"a pull reply says it has {count} messages and has {held}")
        self._replies += 1
        self._messages += count
        lane.offset = next_offset

    def _picked(self, lane: _Lane, next_offset: int, data: bytes, at: int, stop: int) -> None:
        """Count a reply to a pull with a filter; messages behind the stretch belong to another lane."""
        if stop - at < RECORD_START.size:
            raise RemoteProtocolError(f"the broker found nothing in queue {lane.queue_id} at {lane.offset} and said so")
        magic, queue_id, queue_offset = RECORD_START.unpack_from(data, at)
        is_ours = lane.offset <= queue_offset < next_offset and queue_id == lane.queue_id
        if not is_ours or (magic != MAGIC_V1 and magic != MAGIC_V2):
            raise RemoteProtocolError(
                f"asked for queue {lane.queue_id} at {lane.offset}, got queue {queue_id} at {queue_offset}"
            )
        self._messages += count_records(data, at, stop, lane.end)
        lane.offset = next_offset

    def _end(self, lane: _Lane) -> None:
        del self._lanes[lane.opaque]
        if self._layout is not None:
            del self._by_key[self._layout.key(lane.opaque)]


def stretches(target: Target, length: int) -> Iterator[tuple[int, int, int]]:
    """Yield stretches `(queue, first, end)` of the backlog, of all queues in turn."""
    reach = target.ranges or {}
    longest = max(end - first for first, end in reach.values())
    for past in range(0, longest, length):
        for queue_id, (first, end) in reach.items():
            if first + past < end:
                yield queue_id, first + past, min(first + past + length, end)
