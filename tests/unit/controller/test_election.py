"""Who wins an election, and which code the asker gets."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from downrange.controller.election import Call, Standing, decide, winner
from downrange.controller.state import BrokerSet, Replica
from downrange.protocol.codes import ResponseCode as R

NOBODY: frozenset[int] = frozenset()


def a_set(**changes: object) -> BrokerSet:
    known = BrokerSet(
        cluster_name="c",
        broker_name="b",
        master_epoch=4,
        sync_state_set_epoch=7,
        master=1,
        sync_state_set=frozenset({1, 2, 3}),
        next_broker_id=5,
        replicas={id_: Replica(f"h:{id_}", f"h:{id_};17") for id_ in (1, 2, 3, 4)},
        is_new=False,
    )
    return replace(known, **changes)


def test_the_first_that_asks_wins_a_new_set_alive_or_not() -> None:
    new = a_set(master=None, master_epoch=0, sync_state_set=frozenset(), is_new=True)
    verdict = decide(new, Call(2), NOBODY, {})
    assert verdict.code == R.SUCCESS
    assert verdict.after is not None
    assert (verdict.after.master, verdict.after.master_epoch, verdict.after.sync_state_set) == (2, 1, frozenset({2}))
    assert decide(new, Call(9), {1, 2}, {}).code == R.ELECT_MASTER_FAILED  # 5.3.3 would elect a broker it never saw
    assert decide(new, Call(), {1, 2}, {}) == (R.MASTER_NOT_AVAILABLE, decide(new, Call(), {1}, {}).remark, None)


def test_a_live_master_stays() -> None:
    verdict = decide(a_set(), Call(2), {1, 2}, {2: Standing(9, 9, 0)})
    assert (verdict.code, verdict.after) == (R.MASTER_STILL_EXIST, None)
    assert verdict.remark == "The old master 1 is still alive, not need to elect new master for broker b"


def test_only_live_members_of_the_set_win() -> None:
    standings = {4: Standing(9, 9, 0)}
    assert winner(a_set(), Call(4), {2, 4}, standings) == 2
    assert winner(a_set(), Call(4), {4}, standings) is None


@pytest.mark.parametrize(
    ("second", "third", "expected"),
    [
        (Standing(4, 10), Standing(5, 1), 3),  # the epoch counts first
        (Standing(4, 10), Standing(4, 11), 3),  # then the length of the log
        (Standing(4, 10, 5), Standing(4, 10, 4), 3),  # then the priority, low first
        (Standing(4, 10), Standing(4, 10), 2),
        # A difference of more than 2 GiB: 5.3.3 compares 32 bits and elects the shorter log.
        (Standing(4, 0), Standing(4, 3 << 30), 3),
        (Standing(4, 3 << 30), Standing(4, 0), 2),
        (Standing(4, (1 << 62) + 1), Standing(4, 1 << 62), 2),
    ],
)
def test_the_replica_that_is_farthest_wins(second: Standing, third: Standing, expected: int) -> None:
    assert winner(a_set(), Call(), {2, 3}, {2: second, 3: third}) == expected


def test_a_replica_that_was_never_heard_of_wins_only_if_alone() -> None:
    assert winner(a_set(), Call(), {2, 3}, {3: Standing(0, 0)}) == 3
    assert winner(a_set(), Call(), {2}, {}) == 2


def test_a_designated_broker_or_nobody() -> None:
    assert winner(a_set(), Call(3, is_designated=True), {1, 2, 3}, {}) == 3
    for not_possible, alive in ((3, {1, 2}), (4, {1, 4}), (9, {1, 9})):
        verdict = decide(a_set(), Call(not_possible, is_designated=True), alive, {})
        assert (verdict.code, verdict.remark) == (R.ELECT_MASTER_FAILED, "Failed to elect a new master")
        assert verdict.after is None
    assert decide(a_set(), Call(1, is_designated=True), {1, 2}, {}).code == R.MASTER_STILL_EXIST


def test_when_nobody_can_win_only_the_controller_records_it() -> None:
    assert decide(a_set(), Call(2), NOBODY, {}).after is None
    verdict = decide(a_set(), Call(), {4}, {})
    assert verdict.code == R.MASTER_NOT_AVAILABLE
    assert verdict.after is not None
    assert (verdict.after.master, verdict.after.master_epoch) == (None, 5)
    assert decide(verdict.after, Call(), {4}, {}).after is None  # once is enough


def test_an_unclean_election_takes_others_only_if_no_member_lives() -> None:
    unclean = Call(4, is_unclean=True)
    assert winner(a_set(), unclean, {2, 4}, {}) == 2
    assert winner(a_set(), unclean, {4}, {}) == 4
    assert winner(a_set(), Call(4, is_designated=True, is_unclean=True), {4}, {}) == 4
    assert winner(a_set(), unclean, NOBODY, {}) is None


def test_an_unknown_set_must_register() -> None:
    assert decide(None, Call(1), {1}, {}).code == R.BROKER_NEED_TO_BE_REGISTERED
