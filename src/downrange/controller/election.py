"""Who becomes master: pure. Only members of the sync-state set may: only they hold all that was acknowledged."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Final, NamedTuple

from downrange.controller.state import BrokerSet, Verdict, elect, without_master
from downrange.model.fencing import candidates
from downrange.protocol.bodies.controller import NO_BROKER_ID
from downrange.protocol.codes import ResponseCode

LOWEST_PRIORITY: Final = 0x7FFF_FFFF


class Standing(NamedTuple):
    """How far a replica is, as its last heartbeat told."""

    epoch: int = -1
    max_offset: int = -1
    election_priority: int = LOWEST_PRIORITY


class Call(NamedTuple):
    """A wish for an election: request 1002, or the controller itself (`broker_id` is `NO_BROKER_ID`)."""

    broker_id: int = NO_BROKER_ID
    is_designated: bool = False
    """Whether `broker_id` should be elected or nobody."""
    is_unclean: bool = False
    """Whether an operator accepts the loss of messages: then every live replica may be elected."""


UNKNOWN: Final = Standing()


def winner(old: BrokerSet, call: Call, alive: Set[int], standings: Mapping[int, Standing]) -> int | None:
    """The replica that should be master; the present one if it may stay, None if nobody can be."""
    if old.is_new:
        # Nothing was ever acknowledged: the first that asks wins, alive or not, as its heartbeats come later.
        if call.broker_id in old.replicas:
            return call.broker_id
        if not call.is_unclean:
            return None
    found = candidates(old.sync_state_set, alive, old.replicas.keys(), is_unclean=call.is_unclean)
    if call.is_designated:
        return call.broker_id if call.broker_id in found else None
    if old.master in found:
        return old.master

    def rank(id_: int) -> tuple[int, int, int, int]:
        standing = standings.get(id_, UNKNOWN)
        return -standing.epoch, -standing.max_offset, standing.election_priority, id_

    return min(found, key=rank, default=None)


def is_due(old: BrokerSet, alive: Set[int], *, may_be_leased: bool) -> bool:
    """Whether the controller should hold an election by itself.

    `may_be_leased`: the master acknowledges alone, and its lease may not have ended by its own clock: it has to.
    """
    if old.is_new:
        return False
    if old.master is None:
        return bool(candidates(old.sync_state_set, alive))
    return old.master not in alive and not may_be_leased


def decide(old: BrokerSet | None, call: Call, alive: Set[int], standings: Mapping[int, Standing]) -> Verdict:
    """The outcome of an election: a new master (0), the old one (2011), or nobody (2012; 2004 for the controller)."""
    if old is None or old.is_cleaned:
        return Verdict(ResponseCode.BROKER_NEED_TO_BE_REGISTERED, "Broker hasn't been registered")
    chosen = winner(old, call, alive, standings)
    if chosen is not None and chosen == old.master:
        return Verdict(
            ResponseCode.MASTER_STILL_EXIST,
            f"The old master {chosen} is still alive, not need to elect new master for broker {old.broker_name}",
        )
    if chosen is not None:
        return Verdict(ResponseCode.SUCCESS, after=elect(old, chosen))
    if call.broker_id != NO_BROKER_ID:
        return Verdict(ResponseCode.ELECT_MASTER_FAILED, "Failed to elect a new master")
    after = without_master(old)
    return Verdict(
        ResponseCode.MASTER_NOT_AVAILABLE,
        "Old master has down and failed to elect a new broker master",
        None if after is old else after,
    )
