"""Every check of every event of a broker set, in the order of the checks, with the code that a broker gets."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from downrange.controller.state import (
    BrokerSet,
    Replica,
    Verdict,
    alter_sync_state_set,
    apply_broker_id,
    clean,
    decode_set,
    elect,
    encode_set,
    register,
    without_master,
)
from downrange.protocol.bodies.controller import SyncStateSet
from downrange.protocol.codes import ResponseCode as R

ALL = frozenset({1, 2, 3})


def three() -> BrokerSet:
    """Master 1 in epoch 4 with 2 in the set; 3 is behind."""
    return BrokerSet(
        cluster_name="c",
        broker_name="b",
        master_epoch=4,
        sync_state_set_epoch=7,
        master=1,
        sync_state_set=frozenset({1, 2}),
        next_broker_id=4,
        replicas={id_: Replica(f"h:{id_}", f"h:{id_};17") for id_ in (1, 2, 3)},
        is_new=False,
    )


def after(verdict: Verdict) -> BrokerSet:
    assert verdict.code == R.SUCCESS, verdict.remark
    assert verdict.after is not None
    return verdict.after


def test_a_document_is_read_as_it_was_written() -> None:
    assert decode_set(encode_set(three())) == three()


# --- 1013 -------------------------------------------------------------------------------------------------------------


def test_the_first_id_of_a_set_is_1() -> None:
    assert apply_broker_id(None, "c", "b", 2, "h:1;17").code == R.BROKER_ID_INVALID
    new = after(apply_broker_id(None, "c", "b", 1, "h:1;17"))
    assert new.replicas == {1: Replica("h:1", "h:1;17")}
    assert (new.next_broker_id, new.master_epoch, new.sync_state_set_epoch, new.is_new) == (2, 0, 0, True)
    assert new.sync_state_set == frozenset()


def test_a_repeated_application_is_harmless_and_another_check_code_is_refused() -> None:
    assert apply_broker_id(three(), "c", "b", 2, "h:2;17") == Verdict(R.SUCCESS)
    assert apply_broker_id(three(), "c", "b", 2, "h:2;18").code == R.BROKER_ID_INVALID


def test_any_free_id_is_given_and_none_below_it_comes_twice() -> None:
    new = after(apply_broker_id(three(), "c", "b", 9, "h:9;17"))
    assert new.next_broker_id == 10
    for wrong in (0, -1):
        assert apply_broker_id(three(), "c", "b", wrong, "h:9;17").code == R.BROKER_ID_INVALID


@pytest.mark.parametrize(
    ("cluster", "name", "code"),
    [("", "b", "h:1;1"), ("c", "", "h:1;1"), ("c", "x" * 256, "h:1;1"), ("c", "b", ""), ("c", "b", ";17")],
)
def test_an_application_that_makes_no_sense_is_refused(cluster: str, name: str, code: str) -> None:
    assert apply_broker_id(None, cluster, name, 1, code).code == R.BROKER_ID_INVALID


def test_a_set_belongs_to_one_cluster() -> None:
    verdict = apply_broker_id(three(), "other", "b", 4, "h:4;17")
    assert verdict.code == R.BROKER_ID_INVALID
    assert "belongs to cluster c" in (verdict.remark or "")


# --- 1003 -------------------------------------------------------------------------------------------------------------


def test_only_known_ids_register() -> None:
    assert register(None, "b", 1, "h:1").code == R.BROKER_NEED_TO_BE_REGISTERED
    verdict = register(three(), "b", 4, "h:4")
    assert verdict.code == R.BROKER_NEED_TO_BE_REGISTERED
    assert verdict.remark == "BrokerId: 4 hasn't been registered in broker-set: b"
    assert register(three(), "b", 2, "").code == R.INVALID_REQUEST


def test_a_slave_registers_without_a_change_or_with_another_address() -> None:
    assert register(three(), "b", 2, "h:2") == Verdict(R.SUCCESS)
    moved = after(register(three(), "b", 2, "other:2"))
    assert moved.replicas[2] == Replica("other:2", "h:2;17")
    assert (moved.master_epoch, moved.sync_state_set_epoch) == (4, 7)


def test_a_master_that_starts_again_gets_a_new_epoch_with_all_members() -> None:
    again = after(register(three(), "b", 1, "h:1"))
    assert (again.master, again.master_epoch, again.sync_state_set_epoch) == (1, 5, 8)
    assert again.sync_state_set == {1, 2}


# --- 1002 -------------------------------------------------------------------------------------------------------------


def test_an_election_leaves_the_winner_alone_in_the_set() -> None:
    new = elect(three(), 2)
    assert (new.master, new.master_epoch, new.sync_state_set, new.sync_state_set_epoch) == (2, 5, frozenset({2}), 8)
    assert new.master_address == "h:2"


def test_no_master_is_an_epoch_of_its_own_that_keeps_the_set() -> None:
    new = without_master(three())
    assert (new.master, new.master_epoch, new.sync_state_set, new.sync_state_set_epoch) == (
        None,
        5,
        frozenset({1, 2}),
        7,
    )
    assert new.master_address is None
    assert without_master(new) is new


# --- 1001 -------------------------------------------------------------------------------------------------------------


def proposed(*ids: int, epoch: int = 7) -> SyncStateSet:
    return SyncStateSet(sync_state_set=frozenset(ids), sync_state_set_epoch=epoch)


def test_the_master_changes_the_set() -> None:
    new = after(alter_sync_state_set(three(), 1, 4, proposed(1, 2, 3), ALL))
    assert (new.sync_state_set, new.sync_state_set_epoch, new.master_epoch) == (frozenset({1, 2, 3}), 8, 4)
    assert after(alter_sync_state_set(three(), 1, 4, proposed(1), ALL)).sync_state_set == {1}


@pytest.mark.parametrize(
    ("master", "epoch", "new", "alive", "code"),
    [
        # Each row is wrong in all that the rows below it are wrong in: the first check decides.
        (2, 3, proposed(1, 2, epoch=6), {1}, R.ALTER_SYNC_STATE_SET_FAILED),
        (2, 3, proposed(2, 9, epoch=6), {1}, R.INVALID_MASTER),
        (1, 3, proposed(2, 9, epoch=6), {1}, R.FENCED_MASTER_EPOCH),
        (1, 4, proposed(2, 9, epoch=6), {1}, R.FENCED_SYNC_STATE_SET_EPOCH),
        (1, 4, proposed(2, 9), {1}, R.INVALID_REPLICAS),
        (1, 4, proposed(2, 3), {1, 3}, R.BROKER_NOT_ALIVE),
        (1, 4, proposed(2, 3), {1, 2, 3}, R.ALTER_SYNC_STATE_SET_FAILED),
    ],
)
def test_the_checks_of_a_proposal_have_an_order(
    master: int, epoch: int, new: SyncStateSet, alive: set[int], code: R
) -> None:
    verdict = alter_sync_state_set(three(), master, epoch, new, alive)
    assert (verdict.code, verdict.after) == (code, None)
    assert verdict.remark


def test_a_refusal_has_the_words_of_5_3_3() -> None:
    verdict = alter_sync_state_set(replace(three(), master=2), 1, 4, proposed(1), ALL)
    assert verdict.remark == "Rejecting alter syncStateSet request because the current leader is:{2}, not {1}"


def test_nobody_alters_a_set_that_is_not_known_or_has_no_master() -> None:
    assert alter_sync_state_set(None, 1, 1, proposed(1), ALL).code == R.ALTER_SYNC_STATE_SET_FAILED
    assert alter_sync_state_set(without_master(three()), 1, 5, proposed(1), ALL).code == R.INVALID_MASTER


# --- 1011 -------------------------------------------------------------------------------------------------------------


def test_living_replicas_and_sets_with_a_master_are_not_cleaned_by_mistake() -> None:
    for verdict in (
        clean(None, None, ALL, is_clean_living_broker=True),
        clean(three(), None, frozenset(), is_clean_living_broker=False),
        clean(three(), frozenset({3, 2}), frozenset({2}), is_clean_living_broker=False),
    ):
        assert (verdict.code, verdict.after) == (R.INVALID_CLEAN_BROKER_METADATA, None)
    assert clean(three(), frozenset({9}), ALL, is_clean_living_broker=False) == Verdict(R.SUCCESS)


def test_a_cleaned_id_is_not_given_to_another_broker() -> None:
    new = after(clean(three(), frozenset({3}), frozenset({1, 2}), is_clean_living_broker=False))
    assert new.replicas.keys() == {1, 2}
    assert (new.sync_state_set_epoch, new.master_epoch, new.next_broker_id) == (7, 4, 4)
    assert apply_broker_id(new, "c", "b", 3, "stranger:3;1").code == R.BROKER_ID_INVALID
    assert register(new, "b", 3, "h:3").code == R.BROKER_NEED_TO_BE_REGISTERED
    back = after(apply_broker_id(new, "c", "b", 3, "h:3;17"))
    assert back.replicas.keys() == {1, 2, 3}
    assert back.retired == {}


def test_a_cleaned_member_leaves_the_set_and_open_proposals_fail() -> None:
    new = after(clean(three(), frozenset({2}), frozenset({1}), is_clean_living_broker=False))
    assert (new.sync_state_set, new.sync_state_set_epoch) == (frozenset({1}), 8)
    assert alter_sync_state_set(new, 1, 4, proposed(1, 3), ALL).code == R.FENCED_SYNC_STATE_SET_EPOCH


def test_a_cleaned_master_is_no_master_any_more() -> None:
    new = after(clean(three(), frozenset({1}), ALL, is_clean_living_broker=True))
    assert (new.master, new.master_epoch, new.sync_state_set) == (None, 5, frozenset({2}))


def test_a_set_that_was_cleaned_comes_back_with_higher_epochs_and_ids() -> None:
    gone = after(clean(three(), None, ALL, is_clean_living_broker=True))
    assert gone.is_cleaned
    assert (gone.master_epoch, gone.sync_state_set_epoch) == (5, 8)
    assert register(gone, "b", 1, "h:1").code == R.BROKER_NEED_TO_BE_REGISTERED
    assert alter_sync_state_set(gone, 1, 5, proposed(1), ALL).code == R.ALTER_SYNC_STATE_SET_FAILED
    assert apply_broker_id(gone, "c", "b", 1, "stranger:1;1").code == R.BROKER_ID_INVALID
    back = after(apply_broker_id(gone, "c", "b", gone.next_broker_id, "h:9;99"))
    assert back.is_new
    first = elect(back, 4)
    assert (first.master_epoch, first.sync_state_set_epoch, first.sync_state_set) == (6, 9, frozenset({4}))
