"""Measures the time from when a message is due until a puller has it, with one producer and one long-polling puller.

Latency counts from when a message was due, not from when it could be sent: if a broker stands still for a while, the
delay of all messages that were due in this time counts.
"""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Iterable
from typing import Final

from downrange.load.frames import NUMBER_WIDTH
from downrange.load.histogram import Histogram
from downrange.load.links import PATIENCE_SECONDS, Link, Links
from downrange.load.measured import Measured
from downrange.load.plans import SendPlan
from downrange.load.pull_requests import PullRequests
from downrange.load.report import LoadReport
from downrange.load.schedule import Schedule
from downrange.load.sending import NOT_NOW, Sender
from downrange.load.target import Target
from downrange.model.message import SysFlag
from downrange.protocol.bodies.pull import PullMessageResponse
from downrange.protocol.codes import ResponseCode
from downrange.protocol.errors import broker_error, code_name
from downrange.protocol.framing import MAX_FRAME, FrameDecoder
from downrange.settings import ConfigError
from downrange.transport.errors import RequestTimedOut

_HOLD_MILLIS: Final = 15_000
_PULLED_AT_ONCE: Final = 32
_LONG_HOSTS: Final = int(SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6)
# A record with IPv4 hosts: its size, the last byte of sysFlag, the number at the beginning of its body.
_RECORD: Final = struct.Struct(f">i35xB48x{NUMBER_WIDTH}s")
_LONG_HOST: Final = 12
_NOTHING_YET: Final = frozenset(
    {ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY, ResponseCode.PULL_OFFSET_MOVED}
)


class Puller:
    """One waiting pull for each queue, on one connection. `due` has the awaited numbers and when they were due."""

    def __init__(self, target: Target, plan: SendPlan, link: Link) -> None:
        self._link = link
        self._requests = PullRequests(target.topic, plan.header, target.broker_name, hold_millis=_HOLD_MILLIS)
        self._decoder = FrameDecoder(max_header=MAX_FRAME)
        ranges = target.ranges or {}
        self._offsets = {
            queue_id: ranges[queue_id][1] if queue_id in ranges else 0 for queue_id in range(target.queues)
        }
        self.due: dict[bytes, int] = {}
        self.latency = Histogram()
        self.messages = 0
        self.refused: Counter[str] = Counter()
        self._pull(self._offsets)

    def forget(self, number: bytes) -> None:
        """Do not wait for this message any more; if it arrives nevertheless, it does not count."""
        self.due.pop(number, None)

    def receive(self) -> None:
        answered: list[int] = []
        for reply in self._decoder.feed(self._link.read()):
            if not reply.is_response:
                continue
            queue_id = reply.opaque - 1
            if reply.code == ResponseCode.SUCCESS:
                self._found(reply.body_bytes)
            elif reply.code in NOT_NOW:
                self.refused[code_name(reply.code)] += 1
            elif reply.code not in _NOTHING_YET:
                raise broker_error(reply.code, reply.remark)
            if reply.code not in NOT_NOW:
                self._offsets[queue_id] = reply.header(PullMessageResponse).next_begin_offset
            answered.append(queue_id)
        if self._decoder.error is not None:
            raise self._decoder.error
        if answered:
            self._pull(answered)

    def _pull(self, queue_ids: Iterable[int]) -> None:
        """Send the pulls of these queues in one write, as clients do after replies that arrive together."""
        frame, offsets = self._requests.frame, self._offsets
        self._link.write(
            b"".join(frame(queue_id + 1, queue_id, offsets[queue_id], _PULLED_AT_ONCE) for queue_id in queue_ids)
        )

    def _found(self, body: bytes) -> None:
        now = time.monotonic_ns()
        at = 0
        take, read = self.due.pop, _RECORD.unpack_from
        while len(body) - at >= _RECORD.size:  # no record of this load is shorter
            size, flags, number = read(body, at)
            if flags & _LONG_HOSTS:
                start = at + _RECORD.size + _LONG_HOST * (flags & _LONG_HOSTS).bit_count()
                number = body[start - NUMBER_WIDTH : start]
            moment = take(number, None)
            if moment is not None:  # None for the first message, which only tests the connection, and for strange ones
                self.latency.record(now - moment)
                self.messages += 1
            at += size


def end_to_end(target: Target, plan: SendPlan) -> LoadReport:
    """Send at `plan.rate` and receive; returns when every message sent has arrived."""
    if plan.batch > 1:
        raise ConfigError("end to end is measured for single messages: leave --batch out")
    with Links(target.address, 2, polls=plan.polls, tls=target.tls) as links:
        producing, pulling = links.all
        sender = Sender(plan, target, [producing])
        puller = Puller(target, plan, pulling)
        sender.on_refused = puller.forget
        started = time.monotonic()
        schedule = Schedule(plan.rate or 500.0, started)
        measured = Measured(sender, target, started, more={"end to end": puller, "sent late": schedule})
        last_progress = started
        while measured.ended is None or sender.outstanding or puller.due:
            now = time.monotonic()
            measured.look(now)
            wait = 0.1
            if measured.ended is None:
                room = sender.frames.most_outstanding - max(len(sender.outstanding), len(puller.due))
                sender.send_due(producing, schedule.due(now, room), puller.due.update)
                if room > 0:  # else the broker has to answer first
                    wait = schedule.next_due - time.monotonic()
            seen = sender.messages + puller.messages
            for link in links.wait(min(wait, 0.1)):
                if link is pulling:
                    puller.receive()
                else:
                    sender.receive(link)
            if sender.messages + puller.messages > seen or not puller.due:
                last_progress = now
            elif now - last_progress > PATIENCE_SECONDS:
                raise RequestTimedOut(
                    f"{target.address}: {len(puller.due)} messages have not arrived within {PATIENCE_SECONDS:g} s"
                )
        return measured.report("end to end")
