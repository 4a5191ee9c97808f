"""No acknowledged message is lost, whatever crashes, hangs, or gets lost; and each clause of the rule is needed."""

from __future__ import annotations

import pytest

from downrange.broker.replication.acknowledgement import Mastership
from tests.support.failover_model import Rules, Violation, World

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


class NoUnion(Rules):
    mastership = WithoutUnion


class ByMajority(Rules):
    mastership = Majority


class AckAlone(Rules):
    mastership = Alone


class JoinsEarly(Rules):
    mastership = JoinsAnyhow


class ElectsOutside(Rules):
    elects_outside = True


class EverybodyIsInSync(Rules):
    everybody_is_in_sync = True


class SameEpoch(Rules):
    same_epoch_after_restart = True


class ActsOnOldNews(Rules):
    acts_on_old_news = True


class EndsFirst(Rules):
    ends_before_closing = True


class CutsInMemory(Rules):
    cuts_in_memory = True


class EqualStart(Rules):
    refuses_equal_start = True


@pytest.mark.parametrize(
    "rules",
    [
        NoUnion, ByMajority, AckAlone, JoinsEarly, ElectsOutside, EverybodyIsInSync, SameEpoch, ActsOnOldNews,
        EndsFirst, CutsInMemory, EqualStart,
    ],
)  # fmt: skip
def test_without_one_clause_something_is_lost(rules: type[Rules]) -> None:
    with pytest.raises(Violation):
        run_mutant(rules)


def run_mutant(rules: type[Rules]) -> None:
    for seed in range(6000):
        World(seed, rules).run(STEPS)
