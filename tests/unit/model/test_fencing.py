"""The rule by which a master acknowledges, clause by clause; test_failover_model.py has it as a whole."""

from __future__ import annotations

import pytest

from downrange.model.fencing import AckRules, Mastership, Verdict, lease_deadline

DEFAULT = AckRules()


def term(members: set[int], rules: AckRules = DEFAULT, start: int = 0) -> Mastership:
    made = Mastership(1, 5, start, frozenset(members), 7, rules)
    made.renewed(100.0, 3.0)
    return made


@pytest.mark.parametrize(("lease", "left"), [(3.0, 2.0), (1.0, 0.5), (6.0, 4.0)])
def test_a_lease_is_trusted_for_less_than_it_was_given_for(lease: float, left: float) -> None:
    assert lease_deadline(100.0, lease) == pytest.approx(100.0 + left)


def test_without_a_lease_there_is_no_acknowledgement() -> None:
    made = Mastership(1, 5, 0, frozenset((1,)), 7)
    assert made.verdict(10, 0.0) is Verdict.NOT_MASTER
    made.renewed(100.0, 3.0)
    assert made.verdict(10, 101.9) is Verdict.SAFE
    made.renewed(100.5, 3.0)
    made.renewed(99.0, 3.0)  # an answer that comes late takes nothing back
    assert made.verdict(10, 102.4) is Verdict.SAFE
    assert made.verdict(10, 102.5) is Verdict.NOT_MASTER


def test_a_lease_that_ran_out_never_comes_back() -> None:
    made = term({1})
    assert made.verdict(10, 200.0) is Verdict.NOT_MASTER
    made.renewed(200.0, 3.0)
    assert made.verdict(10, 200.1) is Verdict.NOT_MASTER


def test_all_members_must_have_reported_the_end() -> None:
    made = term({1, 2, 3})
    assert made.verdict(10, 101) is Verdict.NOT_YET
    made.reported(2, 10)
    made.reported(3, 9)
    assert made.verdict(10, 101) is Verdict.NOT_YET
    assert made.verdict(9, 101) is Verdict.SAFE
    made.reported(3, 10)
    assert made.verdict(10, 101) is Verdict.SAFE
    assert made.confirmed_end(50) == 10


def test_reports_of_strangers_and_of_older_links_do_not_count() -> None:
    made = term({1, 2})
    made.reported(9, 100)
    assert made.verdict(10, 101) is Verdict.NOT_YET
    made.reported(2, 100)
    made.linked(2)
    assert made.verdict(10, 101) is Verdict.NOT_YET
    assert made.confirmed_end(100) is None


def test_a_proposal_counts_until_its_fate_is_known() -> None:
    made = term({1})
    joining = made.proposes({1, 2})
    assert made.in_sync == {1, 2}
    assert made.verdict(10, 101) is Verdict.NOT_YET
    made.refused(joining)
    assert made.verdict(10, 101) is Verdict.SAFE
    made.proposes({1, 2})
    made.proposes({1, 3})
    assert made.in_sync == {1, 2, 3}
    assert not made.commits(frozenset((1,)), 7), "not newer than what is known"
    assert made.in_sync == {1, 2, 3}
    assert made.commits(frozenset((1, 3)), 8), "both were to replace set 7"
    assert made.in_sync == {1, 3}


def test_too_few_members_are_not_enough() -> None:
    made = term({1}, AckRules(least_in_sync=2))
    assert made.verdict(10, 101) is Verdict.NOT_YET
    made.commits(frozenset((1, 2)), 8)
    made.reported(2, 10)
    assert made.verdict(10, 101) is Verdict.SAFE


def test_a_member_that_cannot_be_elected_yet_is_not_one_of_the_least() -> None:
    made = term({1}, AckRules(least_in_sync=2))
    made.invites(2)
    made.reported(2, 10)
    assert (made.electable, made.verdict(10, 101)) == (1, Verdict.NOT_YET)
    made.proposes({1, 2})
    assert (made.electable, made.verdict(10, 101)) == (2, Verdict.SAFE)


def test_a_member_joins_with_everything_that_was_acknowledged() -> None:
    made = term({1}, start=50)
    assert not made.may_join(2, 60)
    made.reported(2, 49)
    assert not made.may_join(2, 10), "it lacks the beginning of this epoch"
    made.reported(2, 59)
    assert not made.may_join(2, 60)
    made.invites(2)
    made.reported(2, 60)
    assert made.may_join(2, 60)
    made.proposes({1, 2})
    assert not made.may_join(2, 60), "it is proposed already"
    made.leaves_out(2)
    assert made.in_sync == {1, 2}, "the proposal still counts"


@pytest.mark.parametrize(("replicas", "safe"), [(1, 100), (2, 80), (3, 40), (4, -1)])
def test_the_weaker_rule_counts_any_replicas(replicas: int, safe: int) -> None:
    made = term({1, 2, 3}, AckRules(all_in_sync=False, replicas=replicas))
    made.reported(2, 80)
    made.reported(3, 40)
    assert made.safe_end(100) == safe
    assert made.confirmed_end(100) == 100
