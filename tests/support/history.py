"""What clients did to a cluster, line by line, and whether the cluster kept its promises.

Each process appends events to a JSONL file: `invoke` before it asks, then `ok` or `fail` with the answer, or `info`
when no answer came. After `info` the request may or may not have been carried out, now or later. Times are of the
machine's monotonic clock, which all its processes share.

    op      phases              members besides time, process, op, phase
    send    invoke ok fail info topic, id, crc; ok: queue, offset; invoke of a delayed message: delay_nanos
    half    invoke ok fail info like send: a message that waits for its `decide`
    decide  invoke              id, outcome: "commit" or "rollback"
    read    ok                  topic, queue, offset, id, crc; of a group that is owed all messages: group
    keep    ok                  like read: a message in the result of a pipeline; time: when it was read
    plan    ok                  group, topic, queue, offset: a pipeline is going to read up to this message
    consume begin end           group, topic, queue, offset: an orderly callback is running
    commit  ok                  group, topic, queue, offset
    reset   ok                  group, topic, queue, offset
    replica ok                  queue: the master; offset and crc of the slave's log; other_offset: the end of the
                                master's log; other_crc: of as much of it as the slave has
    clock   ok                  a broker's clock was set forward by delay_nanos, or back
    process died stopped        of a broker: died, and with it what was not saved yet
    cut     ok                  the broker's machine lost power; window_nanos: so long may an acknowledged send be in
                                memory only (ASYNC_FLUSH); 0: never (SYNC_FLUSH); stuck_nanos: so long before the cut
                                the broker could not sync: it was stopped, or its disk failed
    end     ok                  topic, queue, offset: where a queue of a broker ended when it was back after a cut

The name of a queue is `broker/number`, or `broker/topic/number` if it is one of another topic, for retries.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec

SHOWN_FAULTS: Final = 20
CLOCK_NANOS: Final = 1_000_000
"""Messages carry times in whole milliseconds."""

SLAVE_NANOS: Final = 15_000_000_000
"""So long after its master is back a slave may still be asked: it stands in for 10 s, and a request takes its time."""


class Rule(StrEnum):
    """The promises, each by the word its faults are reported with."""

    LOST = "lost"
    """Every acknowledged send is read after a full drain."""
    INVENTED = "invented"
    """Nothing is read that was not sent, was refused, or was sent with another body."""
    SPLIT_OFFSET = "split offset"
    """One offset of a queue holds one message."""
    PRODUCER_ORDER = "producer order"
    """Messages a producer sent one after another keep their order within a queue."""
    REAL_TIME_ORDER = "real-time order"
    """An acknowledged send that ended before another began has the lower offset."""
    READ_ORDER = "read order"
    """Ordered consumers see a queue in its order, whatever happens to them."""
    COMMIT_BACKWARDS = "commit backwards"
    """Committed offsets go back only on reset."""
    EARLY = "early"
    """Delayed messages are not read before their time."""
    UNDECIDED = "undecided"
    """Half messages are read only after their commit."""
    GAP = "gap"
    """What a power cut may take from a queue are its last messages: none is missing in front of one that is there."""
    UNDELIVERED = "undelivered"
    """Every group gets every message after a full drain."""
    TWICE = "twice"
    """The result of a pipeline has no message twice."""
    OVERLAP = "overlap"
    """Of an orderly group one member at a time consumes a queue, and one callback at a time runs."""
    ORDERLY = "orderly"
    """An orderly group sees a queue in its order: it may go back, but leaves nothing out."""
    ORPHAN = "orphan"
    """After a full drain the owner of every acknowledged half message was asked, or has said, how it ends."""
    REPLICA = "replica"
    """A slave holds nothing that its master does not."""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One line of a history. The collector of cycles leaves it alone: there are millions, of plain values."""

    time: int
    process: str
    op: str
    phase: str
    topic: str = ""
    queue: str = ""
    id: str = ""
    offset: int = -1
    crc: int = 0
    group: str = ""
    delay_nanos: int = 0
    outcome: str = ""
    other_offset: int = -1
    other_crc: int = 0
    window_nanos: int = 0
    stuck_nanos: int = 0


class Fault(msgspec.Struct, frozen=True):
    rule: Rule
    text: str


@dataclass(slots=True)
class Report:
    """What the checker found. `duplicates` are reads beyond the first of a message: allowed, but to be kept few."""

    sends: int = 0
    unanswered: int = 0
    reads: int = 0
    duplicates: int = 0
    faults: list[Fault] = field(default_factory=list)

    def __str__(self) -> str:
        counts = Counter(fault.rule for fault in self.faults)
        lines = [
            f"{self.sends} sends acknowledged, {self.unanswered} unanswered, {self.reads} reads, "
            f"{self.duplicates} duplicates, {len(self.faults)} faults"
        ]
        lines += [f"  {rule}: {count}" for rule, count in counts.items()]
        lines += [f"  {fault.rule}: {fault.text}" for fault in self.faults[:SHOWN_FAULTS]]
        return "\n".join(lines)


class HistoryWriter:
    """Appends the events of one process. A line is written whole or not at all, also when the process is killed."""

    def __init__(self, path: Path, process: str) -> None:
        self.process = process
        self._encoder = msgspec.json.Encoder()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, op: str, phase: str, **members: Any) -> None:
        self.write_all([self.event(op, phase, **members)])

    def event(self, op: str, phase: str, **members: Any) -> Event:
        """An event of now, which `write_all` is to write."""
        return Event(time=time.monotonic_ns(), process=self.process, op=op, phase=phase, **members)

    def write_all(self, events: Sequence[Event]) -> None:
        os.write(self._file, self._encoder.encode_lines(events))

    def close(self) -> None:
        os.close(self._file)


def load(*paths: Path) -> list[Event]:
    """The events of all files in the order of time. A file may be growing: a line without its end is left out."""
    decoder = msgspec.json.Decoder(Event)
    events = [decoder.decode(line) for path in paths for line in path.read_bytes().split(b"\n")[:-1]]
    return sorted(events, key=lambda event: event.time)


@dataclass(slots=True)
class _Send:
    """One message from the first word about it to its answer."""

    invoke: Event
    answer: Event | None = None
    decided: Event | None = None

    @property
    def is_acknowledged(self) -> bool:
        return self.answer is not None and self.answer.phase == "ok"

    def is_acknowledged_at(self, place: Event) -> bool:
        """Whether the answer named this place. That of a delayed message or of a half names another one."""
        answer = self.answer
        return (
            answer is not None
            and answer.phase == "ok"
            and (answer.op, self.invoke.delay_nanos) == ("send", 0)
            and (answer.queue, answer.offset) == (place.queue, place.offset)
        )

    @property
    def is_refused(self) -> bool:
        return self.answer is not None and self.answer.phase == "fail"

    @property
    def is_visible(self) -> bool:
        """Whether readers are owed this message."""
        is_committed = self.decided is not None and self.decided.outcome == "commit"
        return self.is_acknowledged and (self.invoke.op == "send" or is_committed)


def check(events: Sequence[Event], *, drained: bool = True, ordered_reads: bool = False) -> Report:
    """Every broken promise in a history. `drained`: readers got to the end of every queue before it ended."""
    sends = _sends(events)
    reads = [event for event in events if event.op == "read"]
    cuts = _Cuts(events)
    kept = {name: send for name, send in sends.items() if not cuts.may_lose(send)}
    report = Report(
        sends=sum(send.is_acknowledged for send in sends.values()),
        unanswered=sum(send.answer is None or send.answer.phase == "info" for send in sends.values()),
        reads=len(reads),
        duplicates=len(reads) - len({(event.topic, event.id, event.group) for event in reads}),
    )
    if drained:
        report.faults += _lost(kept, reads)
        report.faults += _lost_too_long(sends, reads, cuts)
        readings = [event for event in events if event.op in ("read", "keep", "plan")]
        report.faults += _undelivered(sends, kept, readings, cuts)
        report.faults += _gaps(sends, reads, cuts)
        report.faults += _orphans(kept)
    keeps = [event for event in events if event.op == "keep"]
    report.faults += _twice(keeps, [event for event in events if event.op == "plan"], cuts)
    report.faults += _not_sent(sends, [*reads, *keeps], [event for event in events if event.op == "clock"])
    report.faults += _split_offsets(sends, reads, cuts)
    report.faults += _send_order(kept)
    if ordered_reads:
        report.faults += _read_order(reads)
    report.faults += _overlaps(events)
    report.faults += _orderly(events)
    report.faults += _commits_backwards(events)
    report.faults += _replicas(events)
    return report


class _Cuts:
    """The power cuts of brokers, and what each left of the queues."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._cuts: defaultdict[str, list[Event]] = defaultdict(list)
        self._ends: defaultdict[Event, dict[tuple[str, str], int]] = defaultdict(dict)
        self._back: dict[Event, int] = {}
        """When the broker had opened its store again; the time of the cut if nobody noted it."""
        for event in events:
            if event.op == "cut":
                self._cuts[event.process].append(event)
                self._back[event] = event.time
            elif event.op == "end":
                cut = self._cuts[event.process][-1]
                self._ends[cut][event.topic, event.queue] = event.offset
                self._back[cut] = event.time

    def may_lose(self, send: _Send) -> bool:
        """Whether an acknowledged message may be gone: no sync came between the answer and a cut."""
        return self.loss_of(send) is not None

    def loss_of(self, send: _Send) -> Event | None:
        """The cut that may have taken an acknowledged message."""
        answer = send.answer
        if answer is None or answer.phase != "ok":
            return None
        for cut in self._cuts[_broker(answer.queue)]:
            first = cut.time - cut.stuck_nanos - cut.window_nanos
            if cut.window_nanos and first <= answer.time <= cut.time:
                return cut
        return None

    def has_taken(self, send: _Send) -> bool:
        """Whether a queue ended in front of an acknowledged message after a cut; False if nobody noted the ends."""
        cut, answer = self.loss_of(send), send.answer
        if cut is None or answer is None or not self._ends[cut]:
            return False
        return self._end(cut, answer) <= answer.offset

    def between(self, queue: str, one: int, other: int) -> bool:
        """Whether a cut between two times may have taken a message of the queue, whose offset another one got then."""
        first, last = sorted((one, other))
        return any(first - cut.window_nanos <= cut.time <= last for cut in self._cuts[_broker(queue)])

    def made_vain(self, plan: Event, until: int) -> bool:
        """Whether a cut before `until` took a message that a pipeline had planned to read, or that a slave showed."""
        return any(
            cut.time <= until and self._end(cut, plan) <= plan.offset and plan.time <= self._back[cut] + SLAVE_NANOS
            for cut in self._cuts[_broker(plan.queue)]
        )

    def took(self, before: _Send, place: Event) -> bool:
        """Whether a cut may have taken a message from this place, or from one behind it, before the event there.

        Consumers may get the message still later: they have fetched it before, or a slave has it.
        """
        for cut in self._cuts[_broker(place.queue)]:
            is_between = before.invoke.time <= cut.time <= place.time
            may_go = not before.is_acknowledged_at(place) or self.loss_of(before) is cut
            if is_between and may_go and self._end(cut, place) <= place.offset:
                return True
        return False

    def _end(self, cut: Event, place: Event) -> int:
        """Where a queue ended after a cut; 0 if nobody noted the ends."""
        name = place.queue
        topic = place.topic if name.count("/") == 1 else ""
        return self._ends[cut].get((topic, name), 0)


def _sends(events: Iterable[Event]) -> dict[str, _Send]:
    sends: dict[str, _Send] = {}
    for event in events:
        if event.op not in ("send", "half", "decide"):
            continue
        if event.op == "decide":
            sends[event.id].decided = event
        elif event.phase == "invoke":
            if event.id in sends:
                raise ValueError(f"this history is no use: {event.id} is sent twice")
            sends[event.id] = _Send(event)
        else:
            sends[event.id].answer = event
    return sends


def _lost(sends: dict[str, _Send], reads: Iterable[Event]) -> Iterator[Fault]:
    seen = {event.id for event in reads}
    for message_id, send in sends.items():
        if send.is_visible and message_id not in seen:
            assert send.answer is not None
            yield Fault(Rule.LOST, f"{message_id} acknowledged at {_place(send.answer)} was never read")


def _lost_too_long(sends: dict[str, _Send], reads: Iterable[Event], cuts: _Cuts) -> Iterator[Fault]:
    """A message is synced within the window, or the sync fails and nothing more is acknowledged.

    So all acknowledged messages that a cut takes were acknowledged within one window, however long the disk failed.
    """
    seen = {event.id for event in reads}
    first: dict[Event, Event] = {}
    missing = [send for name, send in sends.items() if send.is_visible and name not in seen]
    for send in sorted(missing, key=lambda send: send.answer.time if send.answer else 0):
        cut = cuts.loss_of(send)
        if cut is None or send.answer is None:
            continue
        began = first.setdefault(cut, send.answer)
        seconds = (send.answer.time - began.time) / 1e9
        if send.answer.time - began.time > cut.window_nanos:
            text = f"{_place(send.answer)} was lost, acknowledged {seconds:.3f} s after {_place(began)}, which was lost"
            yield Fault(Rule.LOST, text)


def _undelivered(
    sends: dict[str, _Send], kept: dict[str, _Send], reads: Sequence[Event], cuts: _Cuts
) -> Iterator[Fault]:
    """A group that had read lost messages goes on behind them, and misses those that got their offsets."""
    seen: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    places: dict[str, Event] = {}
    for read in reads:
        if read.op == "plan":  # a pipeline goes on behind what it planned, whether it got it or not
            continue
        if read.group:
            seen[read.group, read.topic].add(read.id)
        place = places.get(read.id)
        is_retry = read.queue.count("/") > 1
        if place is None or (not is_retry and (place.queue, place.offset) != (read.queue, read.offset)):
            places[read.id] = read  # a delayed message that a cut took is delivered again, to another place
    for (group, topic), ids in seen.items():
        for message_id, send in kept.items():
            if send.invoke.topic == topic and send.is_visible and message_id not in ids:
                place = places.get(message_id)
                passed = (read for read in reads if read.group == group)
                if place is None or not any(_passes(read, place, sends, cuts) for read in passed):
                    yield Fault(Rule.UNDELIVERED, f"{group} never got {message_id} of {topic}")


def _passes(read: Event, place: Event, sends: dict[str, _Send], cuts: _Cuts) -> bool:
    """Whether a reader got as far as this place by messages that a power cut took before the message that is there."""
    if (read.topic, read.queue) != (place.topic, place.queue) or read.offset < place.offset:
        return False
    if read.time <= place.time and cuts.between(place.queue, read.time, place.time):
        return True
    return read.id in sends and cuts.took(sends[read.id], place)


def _twice(keeps: Iterable[Event], plans: Sequence[Event], cuts: _Cuts) -> Iterator[Fault]:
    """A pipeline that finds a queue shorter than it was takes it for a new one, and reads it again."""
    seen: dict[tuple[str, str, str, int, str], Event] = {}
    for kept in keeps:
        key = (kept.group, kept.topic, kept.queue, kept.offset, kept.id)
        before = seen.setdefault(key, kept)
        if before is kept or cuts.between(kept.queue, before.time, kept.time):
            continue
        own = [plan for plan in plans if (plan.group, plan.topic, plan.queue) == key[:3] and plan.time <= kept.time]
        began = max((plan.time for plan in own if plan.time <= before.time), default=before.time)
        if not any(cuts.made_vain(plan, kept.time) for plan in own if plan.time >= began):
            yield Fault(Rule.TWICE, f"{kept.group} has {kept.id} at {_place(kept)} twice")


def _gaps(sends: dict[str, _Send], reads: Iterable[Event], cuts: _Cuts) -> Iterator[Fault]:
    """Sends that a cut may have lost, and of which one is missing although a later one is there."""
    seen = {event.id for event in reads}
    queues: defaultdict[tuple[str, str], list[_Send]] = defaultdict(list)
    for send in sends.values():
        if send.is_visible and send.invoke.op == "send" and not send.invoke.delay_nanos and cuts.may_lose(send):
            assert send.answer is not None
            queues[send.answer.topic, send.answer.queue].append(send)
    for stored in queues.values():
        stored.sort(key=lambda send: send.answer.time if send.answer else 0)
        missing: _Send | None = None
        for send in stored:
            assert send.answer is not None
            if missing is not None and missing.answer is not None:
                is_later_run = cuts.between(send.answer.queue, missing.answer.time, send.invoke.time)
                is_there = send.invoke.id in seen and not cuts.has_taken(send)  # it may have been read before the cut
                if is_there and not is_later_run and send.answer.offset > missing.answer.offset:
                    place = _place(missing.answer)
                    yield Fault(Rule.GAP, f"{place} is lost, yet {send.answer.offset} behind it is there")
            if send.invoke.id not in seen:
                missing = send


def _orphans(sends: dict[str, _Send]) -> Iterator[Fault]:
    for message_id, send in sends.items():
        if send.invoke.op == "half" and send.is_acknowledged and send.decided is None:
            yield Fault(Rule.ORPHAN, f"nobody was asked how {message_id} ends")


def _not_sent(sends: dict[str, _Send], reads: Iterable[Event], steps: Sequence[Event]) -> Iterator[Fault]:
    for read in reads:
        send = sends.get(read.id)
        if send is None or send.invoke.topic != read.topic:
            yield Fault(Rule.INVENTED, f"{read.id} at {_place(read)} was read by {read.process} and never sent")
        elif read.time < send.invoke.time:
            yield Fault(Rule.INVENTED, f"{read.id} at {_place(read)} was read before it was sent")
        elif send.is_refused:
            yield Fault(Rule.INVENTED, f"{read.id} at {_place(read)} was read although its send was refused")
        elif send.invoke.crc != read.crc:
            yield Fault(Rule.INVENTED, f"{read.id} at {_place(read)}: the body read is not the body sent")
        else:
            yield from _too_soon(send, read, steps)


def _too_soon(send: _Send, read: Event, steps: Sequence[Event]) -> Iterator[Fault]:
    early = send.invoke.time + send.invoke.delay_nanos - read.time
    if early > 0:  # a clock that was set forward meanwhile has counted more time than passed
        early -= sum(max(0, step.delay_nanos) for step in steps if send.invoke.time <= step.time <= read.time)
    if send.invoke.delay_nanos and early >= CLOCK_NANOS:
        yield Fault(Rule.EARLY, f"{read.id} was read {early / 1e6:.1f} ms before its time")
    if send.invoke.op == "half":
        decided = send.decided
        if decided is None or decided.outcome != "commit" or read.time < decided.time:
            state = "undecided" if decided is None else decided.outcome
            yield Fault(Rule.UNDECIDED, f"{read.id} was read by {read.process} while it was {state}")


def _split_offsets(sends: dict[str, _Send], reads: Iterable[Event], cuts: _Cuts) -> Iterator[Fault]:
    # The offset of a half message is one of its own topic, not of the topic it is read from.
    stored = [send.answer for send in sends.values() if send.is_acknowledged and send.invoke.op == "send"]
    delayed = {send.invoke.id for send in sends.values() if send.invoke.delay_nanos}
    places: defaultdict[tuple[str, str, int], dict[str, Event]] = defaultdict(dict)
    seen = [*(answer for answer in stored if answer and answer.id not in delayed), *reads]
    for event in sorted(seen, key=lambda event: event.time):
        places[event.topic, event.queue, event.offset].setdefault(event.id, event)
    for holders in places.values():
        for one, other in pairwise(holders.values()):
            orders = ((one, other), (other, one))
            if not any(before.id in sends and cuts.took(sends[before.id], after) for before, after in orders):
                yield Fault(Rule.SPLIT_OFFSET, f"{_place(one)} holds both {one.id} and {other.id}")


def _send_order(sends: dict[str, _Send]) -> Iterator[Fault]:
    queues: defaultdict[tuple[str, str], list[_Send]] = defaultdict(list)
    for send in sends.values():
        if send.is_acknowledged and send.invoke.op == "send" and not send.invoke.delay_nanos:
            assert send.answer is not None
            queues[send.answer.topic, send.answer.queue].append(send)
    for stored in queues.values():
        stored.sort(key=lambda send: send.answer.offset if send.answer else -1)
        latest: _Send | None = None  # of those at lower offsets, the one that began last
        latest_of: dict[str, _Send] = {}
        for send in stored:
            assert send.answer is not None
            own = latest_of.get(send.invoke.process)
            if own is not None and send.answer.time < own.invoke.time:
                yield Fault(Rule.PRODUCER_ORDER, _swapped(send, own))
            elif latest is not None and send.answer.time < latest.invoke.time:
                yield Fault(Rule.REAL_TIME_ORDER, _swapped(send, latest))
            if latest is None or send.invoke.time > latest.invoke.time:
                latest = send
            if own is None or send.invoke.time > own.invoke.time:
                latest_of[send.invoke.process] = send


def _swapped(first: _Send, second: _Send) -> str:
    assert first.answer is not None
    assert second.answer is not None
    return (
        f"{first.invoke.id} ended before {second.invoke.id} began, yet lies behind it: "
        f"{_place(first.answer)} and {second.answer.offset}"
    )


def _read_order(reads: Iterable[Event]) -> Iterator[Fault]:
    """After a failure a message may come again, and then all that follow it; none is left out on the way."""
    last: dict[tuple[str, str], Event] = {}
    for read in reads:
        before = last.get((read.topic, read.queue))
        if before is not None and read.offset > before.offset + 1:
            yield Fault(
                Rule.READ_ORDER, f"{read.process} read {_place(read)} right after {before.process} read {before.offset}"
            )
        last[read.topic, read.queue] = read


def _overlaps(events: Iterable[Event]) -> Iterator[Fault]:
    """A process that died consumes no more; one that was stopped cannot know that its lock has run out."""
    running: dict[tuple[str, str, str], Event] = {}
    for event in events:
        if event.op == "process":
            for queue in [queue for queue, began in running.items() if began.process == event.process]:
                del running[queue]
        elif event.op == "consume":
            queue = (event.group, event.topic, event.queue)
            if event.phase == "end":
                began = running.get(queue)
                if began is not None and (began.process, began.offset) == (event.process, event.offset):
                    del running[queue]
                continue
            if (began := running.get(queue)) is not None:
                yield Fault(
                    Rule.OVERLAP,
                    f"{event.process} began {_place(event)} while {began.process} consumed {began.offset}",
                )
            running[queue] = event


def _orderly(events: Iterable[Event]) -> Iterator[Fault]:
    last: dict[tuple[str, str, str], Event] = {}
    for event in events:
        if event.op == "consume" and event.phase == "begin":
            queue = (event.group, event.topic, event.queue)
            before = last.get(queue)
            if event.offset > (before.offset if before is not None else -1) + 1:
                earlier = f"right after {before.offset}" if before is not None else "first"
                yield Fault(Rule.ORDERLY, f"{event.process} consumed {_place(event)} {earlier}")
            last[queue] = event


def _replicas(events: Iterable[Event]) -> Iterator[Fault]:
    for event in events:
        if event.op == "replica":
            if event.offset > event.other_offset:
                problem = f"has a log up to {event.offset}, {event.queue} only up to {event.other_offset}"
            elif event.crc != event.other_crc:
                problem = f"has other bytes before {event.offset} than {event.queue}"
            else:
                continue
            yield Fault(Rule.REPLICA, f"{event.process} {problem}")


def _commits_backwards(events: Iterable[Event]) -> Iterator[Fault]:
    """A member begins where the group is, and moves on from there: it never commits less than all that the group had
    committed since its own last commit. One that has lost a queue without knowing it may be behind another member.

    After a power cut a queue may be shorter than a member knows: the member goes back to its end, once."""
    committed: defaultdict[tuple[str, str, str], list[Event]] = defaultdict(list)
    cut: dict[str, set[tuple[str, str, str, str]]] = {}
    for event in events:
        if event.op == "cut":
            cut[event.process] = set()
        if event.op == "process" and event.phase == "died":  # of a broker: the offsets saved last are good again
            for queue in [one for one in committed if _broker(one[2]) == event.process]:
                del committed[queue]
        if event.op not in ("commit", "reset"):
            continue
        known = committed[event.group, event.topic, event.queue]
        own = next((at for at in reversed(range(len(known))) if known[at].process == event.process), None)
        if event.op == "reset":
            known.clear()
        elif own is not None:
            before = min(known[own:], key=lambda one: one.offset)
            member = (event.group, event.topic, event.queue, event.process)
            if event.offset < before.offset and member not in cut.get(_broker(event.queue), {member}):
                cut[_broker(event.queue)].add(member)
            elif event.offset < before.offset:
                yield Fault(
                    Rule.COMMIT_BACKWARDS,
                    f"{event.group} committed {_place(event)} by {event.process} after {before.offset} by "
                    f"{before.process}",
                )
        known.append(event)


def _place(event: Event) -> str:
    return f"{event.topic}/{event.queue}@{event.offset}"


def _broker(queue: str) -> str:
    return queue.partition("/")[0]
