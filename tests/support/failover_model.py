"""A model of a broker set under a controller: links, lost and late messages, crashes, a wrong failure detector.

The model runs the real rules (`model/fencing.py`, `EpochList`, `common_point`) against a world that is as nasty as the
proof allows. A record has length 1, so an offset is an index into the list of records. A mutant leaves one clause out.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from downrange.model import fencing
from downrange.model.fencing import AckRules, Mastership, Verdict
from downrange.store.epochs import Epoch, EpochList, common_point

BROKERS = (1, 2, 3)
FOR_EVER = 1e18


class Violation(AssertionError):
    """An acknowledged message is lost, or two logs differ where their epochs say that they do not."""


class Document(NamedTuple):
    """What the controller has committed for the broker set."""

    master: int
    epoch: int
    members: frozenset[int]
    set_epoch: int


class Rules:
    """The clauses of the rule; a mutant overrides one."""

    mastership: type[Mastership] = Mastership  # A1-A3
    settings = AckRules()
    may_enter = staticmethod(fencing.may_enter)  # R1
    may_report = staticmethod(fencing.may_report)  # R1, A3
    may_lead = staticmethod(fencing.may_lead)  # C3
    candidates: Callable[..., frozenset[int]] = staticmethod(fencing.candidates)  # C1, C4
    set_after_election = staticmethod(fencing.set_after_election)  # C2
    set_after_restart = staticmethod(fencing.set_after_restart)  # C3
    same_epoch_after_restart = False  # C3
    ends_before_closing = False  # R2: what comes in after the end was read is reported, and cut
    cuts_in_memory = False  # R3
    refuses_equal_start = False  # R3: the epoch rule of RocketMQ


@dataclass(eq=False)
class Link:
    """A connection; each side closes its own end. What was sent before may still arrive at the other one."""

    master: int
    slave: int
    epoch: int
    answer: tuple[EpochList, int] | None = None
    is_past_handshake: bool = False
    sent: int = 0
    down: deque[tuple[int, int, Epoch]] = field(default_factory=deque)
    up: deque[int] = field(default_factory=deque)


@dataclass(eq=False)
class Broker:
    """One replica: `log`, `epochs`, `seen` and `tail` survive a crash; the rest does not."""

    id: int
    log: list[int] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    """Records that were cut in memory only, and come back with a crash."""
    epochs: EpochList = field(default_factory=EpochList)
    seen: int = 0
    term: Mastership | None = None
    confirm: int = 0
    waiting: list[int] = field(default_factory=list)
    follows: int | None = None
    link: Link | None = None
    links: dict[int, Link] = field(default_factory=dict)
    is_new: bool = True
    """Started, and has not spoken with the controller yet."""


class World:
    """One run. `step` does one random thing; it raises Violation when the rule did not protect a message."""

    def __init__(self, seed: int, rules: type[Rules] = Rules) -> None:
        self.random = random.Random(seed)
        self.rules = rules
        self.brokers = {number: Broker(number) for number in BROKERS}
        self.document = Document(1, 1, frozenset((1,)), 1)
        self.news: list[tuple[int, Document]] = [(number, self.document) for number in BROKERS]
        self.proposals: list[tuple[Mastership, int, frozenset[int], int]] = []
        self.answers: list[tuple[Mastership, int, Document | None]] = []
        self.acknowledged: dict[int, tuple[int, int]] = {}  # offset: message, and the epoch of the master that said so
        self.messages = 0
        self.acknowledgements = 0
        steps = (
            (self.send, 14), (self.transfer, 18), (self.receive, 22), (self.hear_report, 22), (self.acknowledge, 14),
            (self.connect, 10), (self.answer_handshake, 10), (self.take_handshake, 12), (self.hear_news, 12),
            (self.expand, 8), (self.shrink, 2), (self.decide, 8), (self.hear_answer, 6), (self.read_document, 3),
            (self.elect, 3), (self.crash, 3), (self.lose, 2), (self.hang_up, 1), (self.register, 8), (self.poll, 2),
            (self.invite, 2),
        )  # fmt: skip
        self.steps = [step for step, weight in steps for _ in range(weight)]

    def run(self, steps: int) -> None:
        for step in self.random.choices(self.steps, k=steps):
            step()

    def one(self) -> Broker:
        return self.brokers[self.random.choice(BROKERS)]

    def master(self) -> tuple[Broker, Mastership] | None:
        """One that takes itself for the master."""
        found = [(broker, broker.term) for broker in self.brokers.values() if broker.term is not None]
        return self.random.choice(found) if found else None

    def link_of_master(self, wanted: Callable[[Link], object]) -> tuple[Broker, Mastership, Link] | None:
        found = [
            (broker, broker.term, link)
            for broker in self.brokers.values()
            if broker.term is not None
            for link in broker.links.values()
            if wanted(link)
        ]
        return self.random.choice(found) if found else None

    def link_of_slave(self, wanted: Callable[[Link], object]) -> tuple[Broker, Link] | None:
        links = [(broker, broker.link) for broker in self.brokers.values() if broker.link is not None]
        found = [(broker, link) for broker, link in links if wanted(link)]
        return self.random.choice(found) if found else None

    # --- the controller -----------------------------------------------------------------------------------------

    def elect(self) -> None:
        """The failure detector says, rightly or not, that the master and perhaps others are gone."""
        old = self.document
        alive = frozenset(number for number in BROKERS if self.random.random() < 0.8)
        candidates = sorted(self.rules.candidates(old.members, alive, frozenset(BROKERS)))
        if candidates:
            winner = self.random.choice(candidates)
            members = self.rules.set_after_election(winner)
            self.commit(Document(winner, old.epoch + 1, members, old.set_epoch + 1))

    def commit(self, document: Document) -> None:
        self.document = document
        self.news += [(number, document) for number in BROKERS]

    def decide(self) -> None:
        """A proposal reaches the controller."""
        if not self.proposals:
            return
        term, number, members, set_epoch = self.proposals.pop(self.random.randrange(len(self.proposals)))
        now = self.document
        if (now.master, now.epoch, now.set_epoch) != (term.broker_id, term.epoch, set_epoch):
            self.answers.append((term, number, None))
            return
        self.document = Document(now.master, now.epoch, members, set_epoch + 1)
        self.answers.append((term, number, self.document))

    def register(self) -> None:
        """A broker that started again tells the controller; a recorded master gets a new epoch."""
        found = [broker for broker in self.brokers.values() if broker.is_new]
        if not found:
            return
        broker = self.random.choice(found)
        broker.is_new = False
        now = self.document
        if now.master != broker.id:
            self.news.append((broker.id, now))
        elif self.rules.same_epoch_after_restart:
            self.told(broker, now)
        else:
            members = self.rules.set_after_restart(now.members, broker.id)
            self.commit(Document(broker.id, now.epoch + 1, members, now.set_epoch + 1))

    # --- roles --------------------------------------------------------------------------------------------------

    def hear_news(self) -> None:
        """A broker hears which master there is, or was a while ago."""
        if not self.news:
            return
        number, document = self.news.pop(self.random.randrange(len(self.news)))
        self.told(self.brokers[number], document)

    def poll(self) -> None:
        """A broker asks the controller which master there is."""
        found = [broker for broker in self.brokers.values() if broker.seen < self.document.epoch]
        if found:
            self.told(self.random.choice(found), self.document)

    def told(self, broker: Broker, document: Document) -> None:
        has_role = broker.term is not None or broker.follows is not None
        if not self.rules.may_enter(document.epoch, broker.seen) or (has_role and document.epoch == broker.seen):
            return
        if document.master != broker.id:
            self.follow(broker, document.master)
        elif self.rules.may_lead(document.epoch, broker.seen):
            self.lead(broker, document)
        else:
            return
        broker.is_new = False
        broker.seen = document.epoch

    def lead(self, broker: Broker, document: Document) -> None:
        start = len(broker.log)
        if self.rules.ends_before_closing and broker.link is not None:
            while broker.link is not None and broker.link.down:
                self.take_data(broker, broker.link)
            del broker.log[start:]
        self.close(broker)
        broker.follows = None
        last = broker.epochs.last
        begins_alike = last is not None and last.start >= start
        if not (self.rules.refuses_equal_start and begins_alike) and (last is None or last.epoch < document.epoch):
            broker.epochs = broker.epochs.appended(document.epoch, start)
        broker.term = self.rules.mastership(
            broker.id, document.epoch, start, document.members, document.set_epoch, self.rules.settings
        )
        broker.term.renewed(0, FOR_EVER)
        broker.confirm = start if document.members <= {broker.id} else min(broker.confirm, start)
        for offset, (message, epoch) in self.acknowledged.items():
            has_it = offset < len(broker.log) and broker.log[offset] == message
            if epoch < document.epoch and not has_it:  # news may be late: newer masters may have gone on
                raise Violation(f"lost: {message} at {offset} is not in the log of master {broker.id}")

    def follow(self, broker: Broker, master: int) -> None:
        self.close(broker)
        broker.term = None
        broker.follows = master

    def close(self, broker: Broker) -> None:
        broker.link = None
        broker.links.clear()
        broker.waiting.clear()

    def crash(self) -> None:
        broker = self.one()
        self.close(broker)
        broker.term = broker.follows = None
        broker.is_new = True
        broker.log += broker.tail
        broker.tail = []

    # --- links --------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        found = [one for one in self.brokers.values() if one.follows is not None and one.link is None]
        if not found:
            return
        broker = self.random.choice(found)
        assert broker.follows is not None
        address_is_old = self.random.random() < 0.2
        master = self.one() if address_is_old else self.brokers[broker.follows]
        if master.term is None or master is broker:
            return
        link = Link(master.id, broker.id, master.term.epoch)
        broker.link = master.links[broker.id] = link
        master.term.linked(broker.id)

    def answer_handshake(self) -> None:
        found = self.link_of_master(lambda link: link.answer is None)
        if found is not None:
            master, _, link = found
            link.answer = (master.epochs, len(master.log))

    def take_handshake(self) -> None:
        found = self.link_of_slave(lambda link: link.answer is not None and not link.is_past_handshake)
        if found is None:
            return
        broker, link = found
        assert link.answer is not None
        theirs, their_end = link.answer
        if not self.rules.may_report(link.epoch, broker.seen):
            broker.link = None
            return
        point = self.cut_to_common_point(broker, theirs, their_end)
        master = self.brokers[link.master]
        if master.links.get(broker.id) is link and broker.log != master.log[:point]:
            raise Violation(f"diverged: {broker.id} and its master {master.id} differ before {point}")
        announced = theirs.at(point)
        if announced is not None:
            self.take_epoch(broker, announced)
        link.is_past_handshake = True
        link.sent = point
        link.up.append(point)

    def cut_to_common_point(self, broker: Broker, theirs: EpochList, their_end: int) -> int:
        end = len(broker.log)
        point = common_point(broker.epochs, end, theirs, their_end) if end else 0
        if point is None:
            raise Violation(f"diverged: {broker.epochs} and {theirs} have nothing in common")
        if self.rules.cuts_in_memory:
            broker.tail = broker.log[point:]
        del broker.log[point:]
        broker.epochs = broker.epochs.before(point)
        return point

    def transfer(self) -> None:
        """A master sends the next record to one of its slaves."""
        found = self.link_of_master(lambda link: link.is_past_handshake)
        if found is None:
            return
        master, _, link = found
        if link.sent < len(master.log):
            entry = master.epochs.at(link.sent)
            assert entry is not None
            link.down.append((link.sent, master.log[link.sent], entry))
            link.sent += 1

    def receive(self) -> None:
        found = self.link_of_slave(lambda link: link.down)
        if found is not None:
            self.take_data(*found)

    def take_data(self, broker: Broker, link: Link) -> None:
        offset, message, entry = link.down.popleft()
        if offset != len(broker.log):
            broker.link = None
            return
        self.take_epoch(broker, entry)
        broker.log.append(message)
        broker.tail = broker.tail[1:]
        link.up.append(len(broker.log))

    def take_epoch(self, broker: Broker, entry: Epoch) -> None:
        last = broker.epochs.last
        if last != entry and not (self.rules.refuses_equal_start and last is not None and last.start >= entry.start):
            broker.epochs = broker.epochs.appended(*entry)

    def hear_report(self) -> None:
        found = self.link_of_master(lambda link: link.up)
        if found is not None:
            _, term, link = found
            term.reported(link.slave, link.up.popleft())

    def hang_up(self) -> None:
        broker = self.one()
        if self.random.random() < 0.5:
            broker.link = None
        elif broker.links:
            del broker.links[self.random.choice(list(broker.links))]

    # --- what a master does -------------------------------------------------------------------------------------

    def send(self) -> None:
        found = self.master()
        if found is not None:
            master, _ = found
            self.messages += 1
            master.log.append(self.messages)
            master.tail = []
            master.waiting.append(len(master.log) - 1)

    def acknowledge(self) -> None:
        found = self.master()
        if found is None:
            return
        master, term = found
        confirmed = term.confirmed_end(len(master.log))
        master.confirm = max(master.confirm, confirmed or 0)
        for offset in list(master.waiting):
            if term.verdict(offset + 1, 0) is Verdict.SAFE:
                master.waiting.remove(offset)
                self.told_safe(offset, master.log[offset], term.epoch)

    def told_safe(self, offset: int, message: int, epoch: int) -> None:
        self.acknowledgements += 1
        other, _ = self.acknowledged.setdefault(offset, (message, epoch))
        if other != message:
            raise Violation(f"lost: both {message} and {other} were acknowledged at {offset}")
        copies = sum(broker.log[offset : offset + 1] == [message] for broker in self.brokers.values())
        if copies < self.rules.settings.least_in_sync:
            raise Violation(f"few copies: {message} at {offset} was acknowledged with {copies}")
        leader = self.brokers[self.document.master]
        leads = leader.term is not None and leader.term.epoch == self.document.epoch
        if leads and (offset >= len(leader.log) or leader.log[offset] != message):
            raise Violation(f"lost: {message} at {offset} is not in the log of master {leader.id}")

    def expand(self) -> None:
        found = self.master()
        if found is None:
            return
        master, term = found
        for member in BROKERS:
            if member != master.id and term.may_join(member, master.confirm):
                self.propose(term, term.committed | {member})
                return

    def invite(self) -> None:
        found = self.master()
        if found is not None:
            master, term = found
            member = self.random.choice([one for one in BROKERS if one != master.id])
            (term.leaves_out if member in term.invited else term.invites)(member)

    def shrink(self) -> None:
        found = self.master()
        if found is None:
            return
        master, term = found
        others = sorted(term.committed - {master.id})
        if others:
            self.propose(term, term.committed - {self.random.choice(others)})

    def propose(self, term: Mastership, members: frozenset[int]) -> None:
        number = term.proposes(members)
        self.proposals.append((term, number, members, term.committed_epoch))

    def hear_answer(self) -> None:
        if not self.answers:
            return
        term, number, document = self.answers.pop(self.random.randrange(len(self.answers)))
        if document is None:
            term.refused(number)
        else:
            term.commits(document.members, document.set_epoch)

    def read_document(self) -> None:
        found = self.master()
        if found is not None and found[1].epoch == self.document.epoch:
            found[1].commits(self.document.members, self.document.set_epoch)

    def lose(self) -> None:
        """A message of the network is lost."""
        lossy: list[list[object]] = [self.proposals, self.answers, self.news]  # type: ignore[list-item]
        queue = self.random.choice(lossy)
        if queue:
            queue.pop(self.random.randrange(len(queue)))
