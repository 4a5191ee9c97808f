"""The state of one broker set, and every event that changes it, as pure functions from the old state to the new one.

These hold always, whatever the order of events (tests/unit/controller/test_invariants.py):

    (i)    while there is a master, it is in the sync-state set
    (ii)   both epochs only grow; cleaning a whole set keeps them
    (iii)  one master epoch has at most one master
    (iv)   the sync-state set changes by a request of the master that names both current epochs, by an election, or by
           an operator who takes members out
    (v)    a controller id belongs to one check code for ever

Every function returns a `Verdict`: a response code with its remark, and the state afterwards if it changed. Checks
stand in the order that RocketMQ has them in, because their order decides which code a broker gets.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from downrange.model.fencing import set_after_election, set_after_restart
from downrange.protocol.bodies.controller import SyncStateSet
from downrange.protocol.codes import ResponseCode

FIRST_ID: Final = 1
MOST_REPLICAS: Final = 100
MAX_NAME: Final = 255


class Replica(msgspec.Struct, frozen=True, rename="camel"):
    """One broker of a set. The check code says which application got the id."""

    address: str
    check_code: str


class BrokerSet(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """The document of one broker set, as it is stored."""

    cluster_name: str
    broker_name: str
    master_epoch: int = 0
    sync_state_set_epoch: int = 0
    master: int | None = None
    sync_state_set: frozenset[int] = frozenset()
    next_broker_id: int = FIRST_ID
    replicas: dict[int, Replica] = {}
    retired: dict[int, str] = {}
    """Check codes of ids that were cleaned: nobody else gets them."""
    is_new: bool = True
    """Whether no master was elected since the set was created, or since it was cleaned as a whole."""

    @property
    def is_cleaned(self) -> bool:
        """Whether the set was cleaned as a whole: only its epochs and ids are kept."""
        return not self.replicas

    @property
    def master_address(self) -> str | None:
        return None if self.master is None else self.replicas[self.master].address

    @property
    def members(self) -> SyncStateSet:
        """The sync-state set as it travels."""
        return SyncStateSet(sync_state_set=self.sync_state_set, sync_state_set_epoch=self.sync_state_set_epoch)


class Verdict(NamedTuple):
    """The answer to a request, and the state of the set after it; None when the request changes nothing."""

    code: int
    remark: str | None = None
    after: BrokerSet | None = None


_DONE: Final = Verdict(ResponseCode.SUCCESS)
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(BrokerSet, strict=False).decode


def encode_set(broker_set: BrokerSet) -> bytes:
    return _encode(broker_set)


def decode_set(data: bytes) -> BrokerSet:
    """The state of a document. Raises msgspec.MsgspecError."""
    return _decode(data)


# --- brokers get their ids --------------------------------------------------------------------------------------------


def apply_broker_id(
    old: BrokerSet | None, cluster_name: str, broker_name: str, broker_id: int, check_code: str
) -> Verdict:
    """Request 1013. An id that is free or has this very check code is given; the same application may come again."""
    problem = _problem_of_application(old, cluster_name, broker_name, broker_id, check_code)
    if problem is not None:
        return Verdict(ResponseCode.BROKER_ID_INVALID, problem)
    known = old or BrokerSet(cluster_name=cluster_name, broker_name=broker_name)
    if broker_id in known.replicas:
        return _DONE
    replica = Replica(check_code.partition(";")[0], check_code)
    retired = {id_: code for id_, code in known.retired.items() if id_ != broker_id}
    return Verdict(
        ResponseCode.SUCCESS,
        after=replace(
            known,
            replicas={**known.replicas, broker_id: replica},
            retired=retired,
            next_broker_id=max(known.next_broker_id, broker_id) + 1,
        ),
    )


def _problem_of_application(
    old: BrokerSet | None, cluster_name: str, broker_name: str, broker_id: int, check_code: str
) -> str | None:
    if not 0 < len(broker_name) <= MAX_NAME or not 0 < len(cluster_name) <= MAX_NAME:
        return f"a broker name and a cluster name have 1 to {MAX_NAME} characters"
    if not check_code.partition(";")[0] or len(check_code) > MAX_NAME:
        return f"registerCheckCode {check_code[:64]!r} is not '<broker address>;<milliseconds>'"
    if old is None:
        if broker_id != FIRST_ID:
            return f"Broker-set: {broker_name} hasn't been registered: its first brokerId is {FIRST_ID}"
        return None
    if old.cluster_name != cluster_name:
        return f"Broker-set: {broker_name} belongs to cluster {old.cluster_name}, not to {cluster_name}"
    if broker_id not in old.replicas and len(old.replicas) >= MOST_REPLICAS:
        return f"Broker-set: {broker_name} has {MOST_REPLICAS} replicas already"
    if broker_id < FIRST_ID:
        return f"BrokerId: {broker_id} is not an id: the first one is {FIRST_ID}"
    known = old.replicas.get(broker_id)
    holder = old.retired.get(broker_id) if known is None else known.check_code
    if holder is not None and holder != check_code:
        return f"Fail to apply brokerId: {broker_id} in broker-set: {broker_name}: another broker has it"
    return None


def register(old: BrokerSet | None, broker_name: str, broker_id: int, address: str) -> Verdict:
    """Request 1003, which a broker sends when it starts: its address is noted.

    A process that starts with the id of the master is a new process: what its predecessor proposed and did not learn
    the fate of is forgotten with it. It gets a new epoch, with all members of the set.
    """
    if old is None or old.is_cleaned:
        return Verdict(
            ResponseCode.BROKER_NEED_TO_BE_REGISTERED,
            f"Broker-set: {broker_name} hasn't been registered in controller",
        )
    known = old.replicas.get(broker_id)
    if known is None:
        return Verdict(
            ResponseCode.BROKER_NEED_TO_BE_REGISTERED,
            f"BrokerId: {broker_id} hasn't been registered in broker-set: {broker_name}",
        )
    if not address or len(address) > MAX_NAME:
        return Verdict(ResponseCode.INVALID_REQUEST, f"brokerAddress {address[:64]!r} is not host:port")
    after = old
    if known.address != address:
        after = replace(old, replicas={**old.replicas, broker_id: Replica(address, known.check_code)})
    if old.master == broker_id:
        after = _elected(after, broker_id, set_after_restart(after.sync_state_set, broker_id))
    return _DONE if after is old else Verdict(ResponseCode.SUCCESS, after=after)


# --- elections --------------------------------------------------------------------------------------------------------


def elect(old: BrokerSet, winner: int) -> BrokerSet:
    """A new master; its sync-state set has nobody else until others caught up with it."""
    return _elected(old, winner, set_after_election(winner))


def _elected(old: BrokerSet, winner: int, sync_state_set: frozenset[int]) -> BrokerSet:
    return replace(
        old,
        master=winner,
        master_epoch=old.master_epoch + 1,
        sync_state_set=sync_state_set,
        sync_state_set_epoch=old.sync_state_set_epoch + 1,
        is_new=False,
    )


def without_master(old: BrokerSet) -> BrokerSet:
    """Nobody can be elected. The sync-state set stays: only its members may be elected later."""
    if old.master is None:
        return old
    return replace(old, master=None, master_epoch=old.master_epoch + 1)


# --- the sync-state set -----------------------------------------------------------------------------------------------


def alter_sync_state_set(
    old: BrokerSet | None, master: int, master_epoch: int, proposed: SyncStateSet, alive: Set[int]
) -> Verdict:
    """Request 1001: a master of the current epoch changes the current sync-state set."""
    if old is None or old.is_cleaned:
        return Verdict(ResponseCode.ALTER_SYNC_STATE_SET_FAILED, "Broker metadata is not existed")
    new = proposed.sync_state_set
    refused = "Rejecting alter syncStateSet request because"
    if new == old.sync_state_set:
        return Verdict(
            ResponseCode.ALTER_SYNC_STATE_SET_FAILED,
            "The newSyncStateSet is equal with oldSyncStateSet, no needed to update syncStateSet",
        )
    if old.master != master:
        now = "null" if old.master is None else old.master
        return Verdict(ResponseCode.INVALID_MASTER, f"{refused} the current leader is:{{{now}}}, not {{{master}}}")
    if old.master_epoch != master_epoch:
        return Verdict(
            ResponseCode.FENCED_MASTER_EPOCH,
            f"{refused} the current master epoch is:{{{old.master_epoch}}}, not {{{master_epoch}}}",
        )
    if old.sync_state_set_epoch != proposed.sync_state_set_epoch:
        return Verdict(
            ResponseCode.FENCED_SYNC_STATE_SET_EPOCH,
            f"{refused} the current syncStateSet epoch is:{{{old.sync_state_set_epoch}}}, "
            f"not {{{proposed.sync_state_set_epoch}}}",
        )
    if unknown := sorted(new - old.replicas.keys()):
        return Verdict(ResponseCode.INVALID_REPLICAS, f"{refused} the replicas {unknown[:8]} don't exist")
    if dead := sorted(new - alive):
        return Verdict(ResponseCode.BROKER_NOT_ALIVE, f"{refused} the replicas {dead} don't alive")
    if master not in new:
        return Verdict(
            ResponseCode.ALTER_SYNC_STATE_SET_FAILED,
            f"{refused} the newSyncStateSet don't contains origin leader {{{master}}}",
        )
    after = replace(old, sync_state_set=new, sync_state_set_epoch=old.sync_state_set_epoch + 1)
    return Verdict(ResponseCode.SUCCESS, after=after)


# --- cleaning ---------------------------------------------------------------------------------------------------------


def clean(
    old: BrokerSet | None, ids: frozenset[int] | None, alive: Set[int], *, is_clean_living_broker: bool
) -> Verdict:
    """Request 1011: forget some ids, or with None the whole set. Epochs and ids are kept, so that none comes again."""
    wrong = ResponseCode.INVALID_CLEAN_BROKER_METADATA
    if old is None or old.is_cleaned:
        return Verdict(wrong, "this broker set is not known, clean broker data failed")
    if ids is None:
        if old.master is not None and not is_clean_living_broker:
            return Verdict(
                wrong, f"Broker {old.broker_name} is still alive, clean up failure: {old.master} is its master"
            )
        ids = frozenset(old.replicas)
    elif not is_clean_living_broker and (living := sorted(ids & alive & old.replicas.keys())):
        return Verdict(wrong, f"Broker [{living[0]}] is still alive, clean up failure")
    gone = ids & old.replicas.keys()
    if not gone:
        return _DONE
    after = without_master(old) if old.master in gone else old
    is_smaller = bool(after.sync_state_set & gone)
    replicas = {id_: replica for id_, replica in old.replicas.items() if id_ not in gone}
    after = replace(
        after,
        replicas=replicas,
        retired={**old.retired, **{id_: old.replicas[id_].check_code for id_ in gone}},
        sync_state_set=after.sync_state_set - gone,
        sync_state_set_epoch=after.sync_state_set_epoch + is_smaller,
        is_new=old.is_new or not replicas,
    )
    return Verdict(ResponseCode.SUCCESS, after=after)
