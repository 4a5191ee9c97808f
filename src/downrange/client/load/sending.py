"""Sends: as many as go (closed loop), or as many as are due (open loop)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from downrange.client.load.frames import SendFrames
from downrange.client.load.histogram import Histogram
from downrange.client.load.links import Link, Links, open_socket
from downrange.client.load.plans import SendPlan
from downrange.client.load.replies import ReplyLayout, ReplyReader, learn_layout
from downrange.client.load.report import LoadReport, Moment
from downrange.client.load.target import Target
from downrange.protocol.codes import ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.errors import RemoteProtocolError, broker_error, code_name
from downrange.protocol.framing import MAX_FRAME, FrameDecoder
from downrange.transport.errors import ConnectionLost, RequestTimedOut

PATIENCE_SECONDS: Final = 10.0
"""A broker that answers nothing for so long is taken for dead."""
NOT_NOW: Final = frozenset(
    {
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.FLOW_CONTROL,
        ResponseCode.FLUSH_DISK_TIMEOUT,
        ResponseCode.FLUSH_SLAVE_TIMEOUT,
        ResponseCode.SLAVE_NOT_AVAILABLE,
        ResponseCode.SERVICE_NOT_AVAILABLE,
    }
)
"""Counted; any other code but success ends the load."""


class Sender:
    """Sends frames over all links and matches every reply to its request.

    Holds always: every frame sent is either in `outstanding` or was answered exactly once.
    """

    def __init__(self, plan: SendPlan, target: Target, links: Sequence[Link]) -> None:
        self.plan = plan
        self.frames = SendFrames(plan, target.topic, target.queues, target.broker_name)
        self._layout = first_reply(target.address, self.frames)
        self._keys = [self._layout.key(opaque) for opaque in self.frames.opaques]
        self._readers = {link: ReplyReader(self._layout) for link in links}
        self.outstanding: dict[bytes, int] = {}
        """The key of each request on its way, and when it was sent or due, in nanoseconds."""
        self.messages = 0
        self.refused: Counter[str] = Counter()
        self.latency = Histogram()

    def send(self, link: Link, count: int) -> None:
        """`count` frames, now."""
        while count:
            first, end = self._take(count)
            self.outstanding.update(dict.fromkeys(self._keys[first:end], time.monotonic_ns()))
            link.write(self.frames.slice(first, end))
            count -= end - first

    def send_due(self, link: Link, due: Sequence[int], note: Callable[[bytes, int], object] | None = None) -> None:
        """One frame for each moment of `due`; `note` is told the number that its body begins with."""
        while due:
            first, end = self._take(len(due))
            now_due, due = due[: end - first], due[end - first :]
            self.outstanding.update(zip(self._keys[first:end], now_due, strict=True))
            if note is not None:
                for frame, moment in zip(range(first, end), now_due, strict=True):
                    note(self.frames.body_number(frame), moment)
            link.write(self.frames.slice(first, end))

    def _take(self, count: int) -> tuple[int, int]:
        """Frames whose opaques are free: a reply may be so late that the ring has come round meanwhile."""
        while True:
            first, end = self.frames.take(count)
            if self.outstanding.keys().isdisjoint(self._keys[first:end]):
                return first, end
            count = max(1, count // 2)

    def receive(self, link: Link) -> int:
        """Read what is there; how many requests it answered."""
        succeeded, others = self._readers[link].feed(link.read())
        now = time.monotonic_ns()
        try:
            sent = list(map(self.outstanding.pop, succeeded))
        except KeyError as unknown:
            raise RemoteProtocolError(f"the broker answered a request that is not outstanding: {unknown}") from None
        if len(sent) == 1:  # as always with one outstanding: spares a table
            self.latency.record(now - sent[0])
        else:
            for moment, times in Counter(sent).items():
                self.latency.record(now - moment, times)
        self.messages += len(succeeded) * self.plan.batch
        for reply in others:
            self._refused(reply)
        return len(succeeded) + len(others)

    def _refused(self, reply: Command) -> None:
        if reply.code not in NOT_NOW:
            raise broker_error(reply.code, reply.remark)
        if self.outstanding.pop(self._layout.key(reply.opaque), None) is None:
            raise RemoteProtocolError(f"the broker refused a request that is not outstanding: {reply.opaque}")
        self.refused[code_name(reply.code)] += 1


def first_reply(address: str, frames: SendFrames) -> ReplyLayout:
    """Send one message and look at the answer; raises what the broker has against it."""
    with open_socket(address) as connected:
        connected.settimeout(PATIENCE_SECONDS)
        connected.sendall(frames.slice(*frames.take(1)))
        decoder = FrameDecoder(max_header=MAX_FRAME)
        received = b""
        commands: list[Command] = []
        while not commands:
            try:
                data = connected.recv(1 << 16)
            except TimeoutError:
                raise RequestTimedOut(f"{address} does not answer a send within {PATIENCE_SECONDS:g} s") from None
            except OSError as error:
                raise ConnectionLost(f"{address}: {error.strerror}") from None
            if not data:
                raise ConnectionLost(f"{address} closed the connection: is that a RocketMQ broker?")
            received += data
            commands = decoder.feed(data)
            if decoder.error is not None:
                raise decoder.error
    if commands[0].code != ResponseCode.SUCCESS and commands[0].code not in NOT_NOW:
        raise broker_error(commands[0].code, commands[0].remark)
    return learn_layout(received, commands[0])


def send_load(target: Target, plan: SendPlan) -> LoadReport:
    """Warm up, measure, wait for the last replies."""
    with Links(target.address, plan.connections) as links:
        sender = Sender(plan, target, links.all)
        return _closed_loop(sender, links, target) if plan.rate is None else _open_loop(sender, links, target)


def _closed_loop(sender: Sender, links: Links, target: Target) -> LoadReport:
    plan = sender.plan
    started = time.monotonic()
    measured = Measured(sender, target, started)
    for link in links.all:
        sender.send(link, plan.outstanding)
    last_answer = started
    while sender.outstanding:
        readable = links.wait(0.1)
        now = time.monotonic()
        measured.look(now)
        for link in readable:
            answered = sender.receive(link)
            if answered and measured.ended is None:
                sender.send(link, answered)
        last_answer = _check_alive(target.address, now if readable else last_answer, now)
    return measured.report("send")


def _open_loop(sender: Sender, links: Links, target: Target) -> LoadReport:
    started = time.monotonic()
    measured = Measured(sender, target, started)
    schedule = Schedule(sender.plan.rate or 1.0, started)
    last_answer = started
    turn = 0
    while measured.ended is None or sender.outstanding:
        now = time.monotonic()
        measured.look(now)
        wait = 0.1
        if measured.ended is None:
            room = sender.frames.most_outstanding - len(sender.outstanding)
            if due := schedule.due(now, room):
                sender.send_due(links.all[turn % len(links.all)], due)
                turn += 1
            if room > 0:  # else it is for the broker to make room
                wait = schedule.next_due - time.monotonic()
        readable = links.wait(min(wait, 0.1))
        for link in readable:
            sender.receive(link)
        last_answer = _check_alive(target.address, now if readable or not sender.outstanding else last_answer, now)
    return measured.report("send at a rate")


class Schedule:
    """When each message is due. One that could not be sent in time stays due since then: waiting counts as latency."""

    def __init__(self, rate: float, started: float) -> None:
        self._period = 1 / rate
        self._started = started
        self._sent = 0

    @property
    def next_due(self) -> float:
        return self._started + self._sent * self._period

    def due(self, now: float, most: int) -> list[int]:
        """The moments, in nanoseconds, of all messages due by now; no more than `most`, the rest later."""
        count = min(int((now - self._started) / self._period) + 1 - self._sent, most)
        if count <= 0:
            return []
        first = self._sent
        self._sent += count
        return [int((self._started + number * self._period) * 1e9) for number in range(first, self._sent)]


class Timed(Protocol):
    """Something that keeps latencies: a sender or a puller."""

    latency: Histogram
    refused: Counter[str]


class Measured:
    """The part of a load between warm-up and end."""

    def __init__(self, sender: Sender, target: Target, started: float, more: Mapping[str, Timed] | None = None) -> None:
        self._sender = sender
        self._timed: dict[str, Timed] = {"reply": sender, **(more or {})}
        self._server = target.server
        self._begin_at = started + sender.plan.warm_up_seconds
        self._end_at = self._begin_at + sender.plan.seconds
        self._begun: Moment | None = None
        self.ended: Moment | None = None

    def look(self, now: float) -> None:
        """Called all the time; acts when a part begins."""
        if self._begun is None and now >= self._begin_at:
            for timed in self._timed.values():
                timed.latency = Histogram()
                timed.refused.clear()
            self._begun = Moment.now(self._server, self._sender.messages)
        elif self._begun is not None and self.ended is None and now >= self._end_at and self._has_answers:
            self.ended = Moment.now(self._server, self._sender.messages)

    @property
    def _has_answers(self) -> bool:
        """A broker that has just stood still gets the time it needs: without any answer there is no measurement."""
        assert self._begun is not None
        return self._sender.messages > self._begun.messages or bool(self._sender.refused)

    def report(self, workload: str) -> LoadReport:
        assert self._begun is not None
        assert self.ended is not None
        latency = {name: timed.latency for name, timed in self._timed.items()}
        refused = sum((timed.refused for timed in self._timed.values()), Counter[str]())
        return LoadReport.between(workload, self._begun, self.ended, self._server, latency, refused)


def _check_alive(address: str, last_answer: float, now: float) -> float:
    if now - last_answer > PATIENCE_SECONDS:
        raise RequestTimedOut(f"{address} has answered nothing for {PATIENCE_SECONDS:g} s")
    return last_answer
