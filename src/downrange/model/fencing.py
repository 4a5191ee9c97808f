"""The rule by which no acknowledged message is lost when masters change. Pure: no clock, no socket, no file.

A master may say "stored" of a message only if, checked in this order right before it says so (`Mastership.verdict`),

- A1  it is master, and its lease has not run out;
- A2  there are at least `minInSyncReplicas` members that may be elected;
- A3  every member in sync other than itself reported an end of its log at or behind the end of the message, on a link
      whose handshake was made in this epoch.

The members in sync are those of the committed sync-state set and of every set that was proposed and whose fate is not
known for certain: an answer that was lost may have been "yes", and each member of that set may be elected next.

A replica

- R1  notes the newest epoch that it was told of on disk before it acts in it, acts in no older one (`may_enter`), and
      reports to the master of exactly that epoch (`may_report`);
- R2  closes every link when it is elected, then reads where its log ends, and keeps its log;
- R3  cuts its log to the common point of epoch lists without two equal starts (`store/epochs.py`), and the cut is on
      disk before the first report.

A controller, by transactions that fail when another controller leads,

- C1  elects only members of the committed sync-state set (`candidates`);
- C2  leaves nobody but the new master in that set (`set_after_election`);
- C3  gives a process of the master that started again a new epoch, because what the old process proposed is forgotten
      (`set_after_restart`), and that process leads in no epoch that its predecessor knew (`may_lead`);
- C4  elects another replica only when an operator asks for it in this one call (`candidates`).

Why this is enough: docs/formats/auto-switch.md; that each clause is needed: tests/property/test_failover_model.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

_MARGIN_SHARE: Final = 1 / 3
_LEAST_MARGIN_SECONDS: Final = 0.5
DEFINITE_REFUSALS: Final = frozenset((2000, 2001, 2002, 2003, 2006, 2013))
"""Answers to request 1001 after which the proposed set never comes into force."""


class Verdict(Enum):
    """What a sender may be told now about a message."""

    SAFE = "SAFE"
    NOT_YET = "NOT_YET"
    """Members in sync lack it, or are too few."""
    NOT_MASTER = "NOT_MASTER"
    """The lease ran out, or the role was given up."""


def lease_deadline(sent_at: float, lease_seconds: float) -> float:
    """The time until which a master trusts a lease whose renewal it sent at `sent_at` and the controller answered."""
    return sent_at + lease_seconds - max(lease_seconds * _MARGIN_SHARE, _LEAST_MARGIN_SECONDS)


@dataclass(frozen=True, slots=True)
class AckRules:
    """Settings of the rule: minInSyncReplicas, allAckInSyncStateSet, and inSyncReplicas for masters without the latter.

    Without `all_in_sync` any `replicas` members, the master among them, are enough: acknowledged messages may be lost.
    """

    least_in_sync: int = 1
    all_in_sync: bool = True
    replicas: int = 1


@dataclass(eq=False)
class Mastership:
    """One broker's term as master: what it knows in one epoch of members, proposals, reports and its lease.

    Holds always: `in_sync` contains every set that the controller may have committed in this epoch, as far as this
    master proposed it.
    """

    broker_id: int
    epoch: int
    start: int
    """Where the log ended when this term began."""
    committed: frozenset[int]
    committed_epoch: int
    rules: AckRules = AckRules()
    deadline: float | None = field(init=False, default=None)
    """The end of the lease; None before the first renewal was answered."""
    is_over: bool = field(init=False, default=False)
    reports: dict[int, int] = field(init=False, default_factory=dict)
    """The durable end of each member's log, as reported on its newest link of this epoch."""
    _proposals: dict[int, tuple[frozenset[int], int]] = field(init=False, default_factory=dict)
    _count: int = field(init=False, default=0)
    invited: set[int] = field(init=False, default_factory=set)
    """Members that are about to be proposed: acknowledgements wait for them already, so that they can catch up."""
    in_sync: frozenset[int] = field(init=False)
    _may_be_elected: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self._unite()

    def __repr__(self) -> str:
        return (
            f"<Mastership of {self.broker_id} epoch={self.epoch} committed={sorted(self.committed)} "
            f"set_epoch={self.committed_epoch} in_sync={sorted(self.in_sync)}>"
        )

    def _unite(self) -> None:
        self._may_be_elected = self.committed.union(*(members for members, _ in self._proposals.values()))
        self.in_sync = self._may_be_elected.union({self.broker_id}, self.invited)

    # --- the sync-state set -------------------------------------------------------------------------------------

    @property
    def unanswered(self) -> Mapping[int, tuple[frozenset[int], int]]:
        """The proposals that may be in force: each set, and the epoch of the set that it was to replace."""
        return self._proposals

    def invites(self, member: int) -> None:
        """Let acknowledgements wait for a member that is not in sync yet; `leaves_out` takes that back."""
        self.invited.add(member)
        self._unite()

    def leaves_out(self, member: int) -> None:
        self.invited.discard(member)
        self._unite()

    def proposes(self, members: Iterable[int]) -> int:
        """Note a set before it is proposed; the number by which to note the answer."""
        self._count += 1
        self._proposals[self._count] = (frozenset(members), self.committed_epoch)
        self._unite()
        return self._count

    def refused(self, number: int) -> None:
        """The controller said definitely that it will not commit this proposal."""
        self._proposals.pop(number, None)
        self._unite()

    def commits(self, members: frozenset[int], set_epoch: int) -> bool:
        """Note a committed set; False if an older one. Proposals to replace an older set than it are settled."""
        if set_epoch <= self.committed_epoch:
            return False
        self.committed, self.committed_epoch = members, set_epoch
        self._proposals = {key: value for key, value in self._proposals.items() if value[1] >= set_epoch}
        self.invited -= members
        self._unite()
        return True

    # --- reports ------------------------------------------------------------------------------------------------

    def linked(self, member: int) -> None:
        """A member made a new link: reports on older links count no more."""
        self.reports.pop(member, None)

    def reported(self, member: int, end: int) -> None:
        self.reports[member] = end

    def confirmed_end(self, own_end: int) -> int | None:
        """The end of the part of the log that all members in sync have; None while one of them has not reported."""
        if not self.rules.all_in_sync:
            return own_end
        end = own_end
        for member in self.in_sync:
            if member != self.broker_id:
                reported = self.reports.get(member)
                if reported is None:
                    return None
                end = min(end, reported)
        return end

    def may_join(self, member: int, confirm_offset: int) -> bool:
        """Whether a member that cannot be elected yet has everything that may have been acknowledged."""
        end = self.reports.get(member)
        return end is not None and member not in self._may_be_elected and end >= max(confirm_offset, self.start)

    # --- the lease and the verdict ------------------------------------------------------------------------------

    def renewed(self, sent_at: float, lease_seconds: float) -> None:
        deadline = lease_deadline(sent_at, lease_seconds)
        if not self.is_over:
            self.deadline = deadline if self.deadline is None else max(self.deadline, deadline)

    def leads(self, now: float) -> bool:
        """A1. Once it failed it fails for ever: only a new epoch brings the role back."""
        if self.deadline is None:
            return False
        if now >= self.deadline:
            self.is_over = True
        return not self.is_over

    @property
    def is_short(self) -> bool:
        """A2 does not hold. A member that is waited for, but was not proposed yet, cannot be elected: it is no help."""
        return self.electable < self.rules.least_in_sync

    @property
    def electable(self) -> int:
        """How many members may be elected next, this master among them."""
        return len(self._may_be_elected | {self.broker_id})

    def verdict(self, end: int, now: float) -> Verdict:
        """What the sender of a message that ends at `end` may be told at `now`."""
        if not self.leads(now):
            return Verdict.NOT_MASTER
        if self.is_short:
            return Verdict.NOT_YET
        return Verdict.SAFE if self._is_copied(end) else Verdict.NOT_YET

    def safe_end(self, own_end: int) -> int:
        """Messages that end at or before this offset satisfy A3; those behind it do not."""
        if self.rules.all_in_sync:
            confirmed = self.confirmed_end(own_end)
            return -1 if confirmed is None else confirmed
        ends = sorted((end for member, end in self.reports.items() if member != self.broker_id), reverse=True)
        wanted = self.rules.replicas - 1
        if wanted <= 0:
            return own_end
        return min(own_end, ends[wanted - 1]) if len(ends) >= wanted else -1

    def _is_copied(self, end: int) -> bool:
        return end <= self.safe_end(end)


# --- replicas ---------------------------------------------------------------------------------------------------------


def may_enter(epoch: int, seen: int) -> bool:
    """R1. Whether a replica may take a role in `epoch`, when `seen` is the newest epoch that it was told of."""
    return epoch >= seen


def may_report(epoch: int, seen: int) -> bool:
    """R1. Whether a replica may report to a master of `epoch`."""
    return epoch == seen


def may_lead(epoch: int, seen: int) -> bool:
    """C3. Whether a process without a role may be master in `epoch`: what was proposed in older ones is forgotten."""
    return epoch > seen


# --- controllers ------------------------------------------------------------------------------------------------------


def candidates(
    committed: Set[int], alive: Set[int], replicas: Set[int] = frozenset(), *, is_unclean: bool = False
) -> frozenset[int]:
    """C1, C4. Who may be elected: live members of the sync-state set; others only if an operator accepts a loss."""
    found = frozenset(committed & alive)
    return frozenset(replicas & alive) if is_unclean and not found else found


def set_after_election(winner: int) -> frozenset[int]:
    """C2. The sync-state set of a new master."""
    return frozenset((winner,))


def set_after_restart(committed: frozenset[int], master: int) -> frozenset[int]:
    """C3. The sync-state set in the new epoch of a master whose process started again."""
    return committed | {master}
