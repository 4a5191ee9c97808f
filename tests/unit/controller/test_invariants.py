"""Seeded random events keep the invariants (i)-(v) of state.py, whatever their order."""

from __future__ import annotations

import random

import pytest

from downrange.controller.election import Call, Standing, decide
from downrange.controller.state import (
    BrokerSet,
    Verdict,
    alter_sync_state_set,
    apply_broker_id,
    clean,
    decode_set,
    encode_set,
    register,
)
from downrange.protocol.bodies.controller import SyncStateSet

IDS = range(7)
RUNS, STEPS = 400, 150


class History:
    """What happened to one set, checked after each event."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.state: BrokerSet | None = None
        self.masters: dict[int, int] = {}
        self.holders: dict[int, str] = {}
        self.elections = self.refusals = 0

    def step(self) -> None:
        name = self.chance.choice(("apply", "register", "elect", "alter", "alter", "clean"))
        before = self.state
        verdict: Verdict = getattr(self, name)()
        if verdict.after is None:
            self.refusals += 1
            return
        self.check(name, before, verdict.after)
        self.state = decode_set(encode_set(verdict.after))
        assert self.state == verdict.after

    def some(self) -> frozenset[int]:
        return frozenset(id_ for id_ in IDS if self.chance.random() < 0.6)

    def apply(self) -> Verdict:
        id_ = self.chance.choice(IDS)
        return apply_broker_id(self.state, "c", "b", id_, f"h:{id_};{self.chance.randrange(3)}")

    def register(self) -> Verdict:
        return register(self.state, "b", self.chance.choice(IDS), self.chance.choice(("h:1", "g:1")))

    def elect(self) -> Verdict:
        call = Call(self.chance.choice((-1, *IDS)), self.chance.random() < 0.3)
        standings = {id_: Standing(self.chance.randrange(3), self.chance.randrange(1 << 40)) for id_ in IDS}
        return decide(self.state, call, self.some(), standings)

    def alter(self) -> Verdict:
        known = self.state
        epoch = (known.master_epoch if known else 0) - (self.chance.random() < 0.2)
        set_epoch = (known.sync_state_set_epoch if known else 0) - (self.chance.random() < 0.2)
        master = known.master if known and known.master is not None and self.chance.random() < 0.8 else 1
        members = self.some() | ({master} if self.chance.random() < 0.8 else set())
        if known and self.chance.random() < 0.7:
            members &= known.replicas.keys()
        proposed = SyncStateSet(sync_state_set=frozenset(members), sync_state_set_epoch=set_epoch)
        return alter_sync_state_set(known, master, epoch, proposed, self.some() | members)

    def clean(self) -> Verdict:
        ids = None if self.chance.random() < 0.1 else frozenset({self.chance.choice(IDS)})
        return clean(self.state, ids, self.some(), is_clean_living_broker=self.chance.random() < 0.3)

    def check(self, event: str, old: BrokerSet | None, new: BrokerSet) -> None:
        assert new.master is None or new.master in new.sync_state_set  # (i)
        assert new.sync_state_set <= new.replicas.keys()
        for id_, replica in new.replicas.items():  # (v)
            assert self.holders.setdefault(id_, replica.check_code) == replica.check_code
            assert id_ < new.next_broker_id
        if new.master is not None:  # (iii)
            assert self.masters.setdefault(new.master_epoch, new.master) == new.master
        if old is None:
            return
        assert new.master_epoch >= old.master_epoch  # (ii)
        assert new.sync_state_set_epoch >= old.sync_state_set_epoch
        assert new.next_broker_id >= old.next_broker_id
        if new.sync_state_set != old.sync_state_set:  # (iv)
            assert new.sync_state_set_epoch == old.sync_state_set_epoch + 1
            match event:
                case "elect":
                    assert new.master_epoch == old.master_epoch + 1
                    assert new.sync_state_set == {new.master}
                    assert new.master in old.sync_state_set or old.is_new  # C1
                case "alter":
                    assert (new.master, new.master_epoch) == (old.master, old.master_epoch)
                case "clean":
                    assert new.sync_state_set < old.sync_state_set
                case _:
                    raise AssertionError(f"{event} changed the sync-state set")
        if event == "register" and new.master_epoch != old.master_epoch:  # C3
            assert (new.master, new.sync_state_set) == (old.master, old.sync_state_set)
        if new.master != old.master:
            assert new.master_epoch == old.master_epoch + 1
        self.elections += event == "elect"


@pytest.mark.parametrize("seed", range(8))
def test_random_events_keep_the_invariants(seed: int) -> None:
    chance = random.Random(seed)
    elections = refusals = 0
    for _ in range(RUNS // 8):
        history = History(chance)
        for _ in range(STEPS):
            history.step()
        elections += history.elections
        refusals += history.refusals
    assert elections > 100  # the runs are about something
    assert refusals > 100
