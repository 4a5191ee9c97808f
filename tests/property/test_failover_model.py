"""No acknowledged message is lost, whatever crashes, hangs, or gets lost; and each clause of the rule is needed."""

from __future__ import annotations

from functools import partial

import pytest

from downrange.model.fencing import AckRules, Mastership, candidates
from tests.support.failover_model import BROKERS, Document, Rules, Violation, World

STEPS = 400
RUNS = 5000
ALL_RUNS = 30_000


def run_all(seeds: range) -> tuple[int, int]:
    """How many messages were acknowledged, and in how many epochs."""
    acknowledged = epochs = 0
    for seed in seeds:
        world = World(seed)
        try:
            world.run(STEPS)
        except Violation as violation:
            raise AssertionError(f"seed {seed}: {violation}") from violation
        acknowledged += world.acknowledgements
        epochs += world.document.epoch
    return acknowledged, epochs


def test_no_acknowledged_message_is_lost() -> None:
    acknowledged, epochs = run_all(range(RUNS))
    assert acknowledged > 5 * RUNS, "the model must do something"
    assert epochs > 2 * RUNS


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_no_acknowledged_message_is_lost_in_all_runs(part: int) -> None:
    size = ALL_RUNS // 5
    run_all(range(part * size, (part + 1) * size))


class WithoutUnion(Mastership):
    """A proposal that was not answered is forgotten."""

    def _unite(self) -> None:
        self.in_sync = self._may_be_elected = self.committed


class Majority(Mastership):
    """Two of three are enough."""

    def _is_copied(self, end: int) -> bool:
        have = sum(reported >= end for member, reported in self.reports.items() if member in self.in_sync)
        return 2 * (have + 1) > len(self.in_sync)


class Alone(Mastership):
    """The master's own disk is enough."""

    def _is_copied(self, end: int) -> bool:
        return True


class JoinsAnyhow(Mastership):
    """Members join without everything that may have been acknowledged."""

    def may_join(self, member: int, confirm_offset: int) -> bool:
        return member in self.reports and member not in self.in_sync


class InvitedCount(Mastership):
    """Members that cannot be elected are enough for minInSyncReplicas, or nobody is needed."""

    @property
    def is_short(self) -> bool:
        return False


class NoUnion(Rules):
    mastership = WithoutUnion


class ByMajority(Rules):
    mastership = Majority


class AckAlone(Rules):
    mastership = Alone


class JoinsEarly(Rules):
    mastership = JoinsAnyhow


class TwoCopies(Rules):
    """Not a mutant: minInSyncReplicas=2."""

    settings = AckRules(least_in_sync=2)


class TooFew(TwoCopies):
    mastership = InvitedCount


class ReportsToAnybody(Rules):
    may_report = staticmethod(lambda epoch, seen: True)


class ActsOnOldNews(Rules):
    may_enter = may_lead = staticmethod(lambda epoch, seen: True)


class EndsFirst(Rules):
    ends_before_closing = True


class CutsInMemory(Rules):
    cuts_in_memory = True


class EqualStart(Rules):
    refuses_equal_start = True


class ElectsAnybody(Rules):
    candidates = staticmethod(lambda committed, alive, replicas: replicas & alive)


class ElectsUnclean(Rules):
    candidates = staticmethod(partial(candidates, is_unclean=True))


class EverybodyIsInSync(Rules):
    set_after_election = staticmethod(lambda winner: frozenset(BROKERS))


class SameEpoch(Rules):
    """The process of a master that started again goes on in the epoch of its predecessor."""

    same_epoch_after_restart = True
    may_lead = staticmethod(lambda epoch, seen: True)


@pytest.mark.parametrize(
    "rules",
    [
        NoUnion, ByMajority, AckAlone, JoinsEarly, TooFew, ActsOnOldNews, EndsFirst, CutsInMemory, EqualStart,
        ElectsAnybody, ElectsUnclean, EverybodyIsInSync, SameEpoch,
    ],
)  # fmt: skip
def test_without_one_clause_something_is_lost(rules: type[Rules]) -> None:
    with pytest.raises(Violation):
        run_mutant(rules)


def test_each_acknowledged_message_has_as_many_copies_as_settings_ask_for() -> None:
    for seed in range(RUNS // 5):
        World(seed, TwoCopies).run(STEPS)


def test_a_slave_that_reports_to_an_older_master_may_lose_what_was_acknowledged() -> None:
    """Too rare for random runs: a slave that knows epoch 2 reaches the master of epoch 1 by an old address."""
    assert slave_reaches_an_older_master(Rules).acknowledgements == 1
    with pytest.raises(Violation):
        slave_reaches_an_older_master(ReportsToAnybody)


def slave_reaches_an_older_master(rules: type[Rules]) -> World:
    world = World(0, rules)
    older, newer, slave = world.brokers.values()
    world.random.random = lambda: 1.0  # type: ignore[method-assign]  # addresses are right
    for broker in world.brokers.values():
        world.told(broker, world.document)
    for step in (world.connect, world.answer_handshake, world.take_handshake, world.hear_report):
        step()
        step()
    for _ in range(2):
        world.expand()
        world.decide()
        world.hear_answer()
    assert world.document.members == frozenset(BROKERS)
    world.document = Document(newer.id, 2, frozenset((newer.id,)), world.document.set_epoch + 1)
    world.told(newer, world.document)
    world.told(slave, world.document)
    assert older.term is not None
    world.master = lambda: (newer, newer.term)  # type: ignore[method-assign,assignment,return-value]
    for step in (world.connect, world.answer_handshake, world.take_handshake, world.hear_report):
        step()
    world.expand()
    world.decide()
    world.hear_answer()
    world.send()
    while not slave.log:
        world.transfer()
        world.receive()
    while not world.acknowledgements:
        world.hear_report()
        world.acknowledge()
    slave.link = None
    world.random.random = lambda: 0.0  # type: ignore[method-assign]  # the address is old
    world.one = lambda: older  # type: ignore[method-assign]
    for step in (world.connect, world.answer_handshake, world.take_handshake):
        step()
    world.document = Document(slave.id, 3, frozenset((slave.id,)), world.document.set_epoch + 1)
    world.told(slave, world.document)
    return world


def run_mutant(rules: type[Rules]) -> None:
    for seed in range(6000):
        World(seed, rules).run(STEPS)
