"""The load of sends: as many as possible (closed loop), or those that are due (open loop)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from downrange.compiled import steps as compiled
from downrange.load.frames import SendFrames
from downrange.load.histogram import Histogram
from downrange.load.links import PATIENCE_SECONDS, Links, WaitingLink, Wire, open_socket
from downrange.load.measured import Measured
from downrange.load.outstanding import FIRST_OPAQUE, Outstanding
from downrange.load.plans import SendPlan
from downrange.load.replies import ReplyLayout, ReplyReader, learn_layout
from downrange.load.report import LoadReport
from downrange.load.schedule import Schedule
from downrange.load.target import Target
from downrange.protocol.codes import ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.errors import broker_error, code_name
from downrange.protocol.framing import MAX_FRAME, FrameDecoder
from downrange.settings import ConfigError
from downrange.transport.errors import ConnectionLost, RequestTimedOut
from downrange.transport.tls import ClientTls

if TYPE_CHECKING:
    from downrange.load.crowd import Crowd

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
"""Response codes that are counted as refusals; any other code except success ends the load."""


class Sender:
    """Sends frames over all links and matches every reply to its request.

    Holds always: every frame sent is either in `outstanding` or was answered exactly once.
    """

    def __init__(self, plan: SendPlan, target: Target, links: Sequence[Wire]) -> None:
        self.plan = plan
        self.frames = SendFrames(plan, target.topic, target.queues, target.broker_name, target.topics, target.signer)
        self.outstanding = Outstanding(self.frames.count)
        layout = first_reply(target.address, self.frames, target.tls)
        self._readers = {link: ReplyReader(layout, self.outstanding) for link in links}
        self.messages = 0
        self.refused: Counter[str] = Counter()
        self.latency = Histogram()
        self.on_refused: Callable[[bytes], object] = lambda number: None
        """Called with the number at the beginning of the body of a message that was refused."""

    def send(self, link: Wire, count: int) -> None:
        """Send `count` frames now."""
        while count:
            first, end = self._take(count)
            frames = self.frames.slice(first, end)
            now = time.monotonic_ns()
            link.write(frames)
            self.outstanding.add(first, end, now)
            count -= end - first

    def send_due(
        self, link: Wire, due: Sequence[int], note: Callable[[Iterable[tuple[bytes, int]]], object] | None = None
    ) -> None:
        """Send one frame for each time in `due`; `note` gets the numbers at the beginning of their bodies."""
        while due:
            first, end = self._take(len(due))
            now_due, due = due[: end - first], due[end - first :]
            self.outstanding.add_each(first, now_due)
            if note is not None:
                note(zip(self.frames.body_numbers(first, end), now_due, strict=True))
            link.write(self.frames.slice(first, end))

    def _take(self, count: int) -> tuple[int, int]:
        """Take frames whose opaques are free: a reply may be so late that the ring was used up in the meantime."""
        while True:
            first, end = self.frames.take(count)
            if self.outstanding.is_free(first, end):
                return first, end
            count = max(1, count // 2)

    def receive(self, link: Wire) -> int:
        """Read the replies that have arrived; return the number of requests they answer."""
        received = link.read()
        now = time.monotonic_ns()
        moments, refused = self._readers[link].feed(received)
        for moment, times in Counter(moments).items():
            self.latency.record(now - moment, times)
        self.messages += len(moments) * self.plan.batch
        for reply in refused:
            if reply.code not in NOT_NOW:
                raise broker_error(reply.code, reply.remark)
            self.refused[code_name(reply.code)] += 1
            slot = reply.opaque - FIRST_OPAQUE
            self.on_refused(*self.frames.body_numbers(slot, slot + 1))
        return len(moments) + len(refused)


def first_reply(address: str, frames: SendFrames, tls: ClientTls | None = None) -> ReplyLayout:
    """Send one message and learn the layout of its reply; raises the error if the broker refuses it."""
    with open_socket(address, tls) as connected:
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
    if target.tls is not None and plan.polls:
        raise ConfigError("polling works on plain connections only: leave --poll out, or TLS")
    if plan.rate is None and plan.connections == plan.outstanding == 1:
        with WaitingLink(target.address, target.tls, polls=plan.polls) as link:
            return _one_at_a_time(Sender(plan, target, [link]), link, target)
    if plan.rate is None:
        with links_of(plan, target.address, target.tls) as links:
            return _closed_loop(Sender(plan, target, links.all), links, target)
    with Links(target.address, plan.connections, polls=plan.polls, tls=target.tls) as links:
        return _open_loop(Sender(plan, target, links.all), links, target)


def links_of(plan: SendPlan, address: str, tls: ClientTls | None = None) -> Links | Crowd:
    """The connections of a closed loop."""
    if plan.connections == 1 or plan.polls or plan.each_alone or tls is not None or not hasattr(compiled, "Sockets"):
        return Links(address, plan.connections, polls=plan.polls, tls=tls)
    from downrange.load.crowd import Crowd  # can be imported only with the compiled module

    return Crowd(address, plan.connections, plan.outstanding)


def _one_at_a_time(sender: Sender, link: WaitingLink, target: Target) -> LoadReport:
    """A closed loop without epoll, like a client that sends, waits, and sends again."""
    measured = Measured(sender, target, time.monotonic())
    while measured.ended is None:
        sender.send(link, 1)
        while not sender.receive(link):
            pass
        measured.look(time.monotonic())
    return measured.report("send")


def _closed_loop(sender: Sender, links: Links | Crowd, target: Target) -> LoadReport:
    plan = sender.plan
    started = time.monotonic()
    measured = Measured(sender, target, started)
    for link in links.all:
        sender.send(link, plan.connections * plan.outstanding // len(links.all))
    last_answer = started
    while sender.outstanding:
        readable = links.wait(0.1)
        now = time.monotonic()
        measured.look(now)
        for link in readable:
            answered = sender.receive(link)
            if answered and measured.ended is None:
                sender.send(link, answered)
        last_answer = check_alive(target.address, now if readable else last_answer, now)
    return measured.report("send")


def _open_loop(sender: Sender, links: Links, target: Target) -> LoadReport:
    started = time.monotonic()
    schedule = Schedule(sender.plan.rate or 1.0, started)
    measured = Measured(sender, target, started, more={"sent late": schedule})
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
            if room > 0:  # else the broker has to answer first
                wait = schedule.next_due - time.monotonic()
        readable = links.wait(min(wait, 0.1))
        for link in readable:
            sender.receive(link)
        last_answer = check_alive(target.address, now if readable or not sender.outstanding else last_answer, now)
    return measured.report("send at a rate")


def check_alive(address: str, last_answer: float, now: float) -> float:
    if now - last_answer > PATIENCE_SECONDS:
        raise RequestTimedOut(f"{address} has answered nothing for {PATIENCE_SECONDS:g} s")
    return last_answer
