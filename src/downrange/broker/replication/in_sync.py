"""A master's slaves under a controller: which of them are in sync, and which messages all of them have.

The rule itself is in `model/fencing.py`; this module has the links, the senders that wait, and the proposals.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from downrange.broker.live_config import LiveConfig
from downrange.broker.replication.auto_switch_wire import (
    MasterHandshake,
    SlaveFrames,
    SlaveHandshake,
    TransferHeader,
)
from downrange.broker.replication.errors import ReplicationError
from downrange.broker.replication.master import SlaveLink, Slaves
from downrange.broker.replication.waiting import Tell
from downrange.clock import Clock
from downrange.model.errors import MQError
from downrange.model.fencing import DEFINITE_REFUSALS, Mastership, Verdict
from downrange.store.epoch_file import EpochFile
from downrange.store.epochs import Epoch, EpochList
from downrange.store.group_commit import FlushOutcome, GroupCommit, Settled
from downrange.store.message_store import MessageStore
from downrange.store.new_message import PutMessageStatus

log = logging.getLogger(__name__)

# A slave that lags by no more than this is waited for, so that it can catch up with a master under load.
_CLOSE_BYTES: Final = 1 << 20
_PROPOSAL_PAUSE_SECONDS: Final = 0.5
_STATUS: Final = {
    FlushOutcome.FLUSHED: PutMessageStatus.PUT_OK,
    FlushOutcome.TIMED_OUT: PutMessageStatus.FLUSH_SLAVE_TIMEOUT,
    FlushOutcome.FAILED: PutMessageStatus.SERVICE_NOT_AVAILABLE,
}


def boot_seconds() -> float:
    """Seconds since the machine started, those included in which it slept: the clock of leases."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ProposalAnswer(NamedTuple):
    """The definite answer of the controller to a proposed sync-state set.

    `code` 0: `sync_state_set` is in force with `sync_state_set_epoch`. Else the proposal was refused (2000-2003, 2006,
    2013) and never comes into force. An answer that is not definite (time-out, 2007, closed connection) is no
    ProposalAnswer: `propose` raises MQError or OSError, and the proposal counts as perhaps in force.
    """

    code: int
    sync_state_set: frozenset[int] = frozenset()
    sync_state_set_epoch: int = 0


Propose = Callable[[frozenset[int], int], Awaitable[ProposalAnswer]]
"""Called by a master with the new set and the epoch of the set that it replaces, for request 1001."""


class InSyncLink(SlaveLink):
    """The connection to one slave, which begins with a handshake.

    Holds always: a packet has bytes of one epoch. All reports of a link belong to the epoch of its handshake.
    """

    def __init__(self, slaves: InSyncSlaves, store: MessageStore, config: LiveConfig, clock: Clock) -> None:
        super().__init__(slaves, store, config, clock)
        self._owner = slaves
        self._frames = SlaveFrames()
        self._pushed_end = 0
        self._pushed_at = self.caught_up_at = clock.monotonic()
        self._sent_confirm = 0
        self.handshake: SlaveHandshake | None = None

    def _received(self, data: bytes) -> None:
        for frame in self._frames.feed(data):
            if isinstance(frame, SlaveHandshake):
                self._shake(frame)
            elif self.handshake is None:
                raise ReplicationError("it reported before its handshake: it does not know of a controller")
            else:
                self._take_report(frame)

    def _shake(self, handshake: SlaveHandshake) -> None:
        if self.reported_offset is not None:
            raise ReplicationError("a handshake in the middle of its reports")
        if self.broker_id not in (None, handshake.broker_id):
            raise ReplicationError(f"it logged in as {self.broker_id} and calls itself {handshake.broker_id}")
        self._heard_at = self._clock.monotonic()
        self.handshake = handshake
        self._owner.shaken(self, handshake.broker_id)
        if self._transport is not None:
            self._transport.write(MasterHandshake(self._store.max_offset, self._owner.epochs).encode())

    def _take_report(self, offset: int) -> None:
        now = self._clock.monotonic()
        if offset >= self._store.max_offset:
            self.caught_up_at = now
        elif offset >= self._pushed_end:
            self.caught_up_at = self._pushed_at
        super()._take_report(offset)

    def push(self) -> None:
        if self.reported_offset is None:
            return
        if self.sent_offset < 0:
            self.sent_offset = self._beginning()
            if self.sent_offset < 0:  # nothing is stored yet
                return
        if self.sent_offset >= self._store.max_offset:
            return
        self._pushed_end, self._pushed_at = self._store.max_offset, self._clock.monotonic()
        super().push()

    def tick(self) -> None:
        if self.reported_offset is not None and self.reported_offset >= self._store.max_offset:
            self.caught_up_at = self._clock.monotonic()
        super().tick()
        is_idle = self.reported_offset is not None and self.sent_offset >= self._store.max_offset
        if is_idle and self._sent_confirm != self._owner.confirm_offset and not self._is_paused:
            self._write_heartbeat()

    def _header(self, offset: int, length: int) -> bytes:
        epochs = self._owner.epochs
        entry = epochs.at(offset) or (epochs.entries[0] if epochs.entries else Epoch(0, 0))
        following = epochs.following(entry)
        if length and following is not None and offset + length >= following.start:
            entry = following
        self._sent_confirm = self._owner.confirm_offset
        return TransferHeader(length, offset, entry, self._sent_confirm).encode()

    def _most_from(self, offset: int, most: int) -> int:
        entry = self._owner.epochs.at(offset)
        following = self._owner.epochs.following(entry) if entry is not None else None
        return most if following is None else min(most, following.start - offset)

    def _beginning(self) -> int:
        if self.handshake is not None and self.handshake.from_last_file and self._store.max_offset:
            return self._beginning_of_last_file()
        return self._store.min_offset


class InSyncSlaves(Slaves):
    """The slaves of a master under a controller, and the senders that wait for those in sync. For the loop's thread.

    Holds always: a sender is told PUT_OK only when `Mastership.verdict` says so, right before; no record that ends
    behind `confirm_offset` is in a queue. Without a `term` every slave and every sender is refused.
    """

    def __init__(self, store: MessageStore, config: LiveConfig, clock: Clock) -> None:
        super().__init__(store, config, clock)
        self.term: Mastership | None = None
        self.confirm_offset = 0
        self.now: Callable[[], float] = boot_seconds
        self.propose: Propose | None = None
        self.on_confirmed: Callable[[], object] = lambda: None
        """Called when records may be read that could not be read before."""
        self.on_lease_lost: Callable[[], object] = lambda: None
        self._epoch_file: EpochFile | None = None
        self._waiting: GroupCommit[Tell] = GroupCommit(config.store.slave_timeout)
        self._by_id: dict[int, InSyncLink] = {}
        self._left: set[int] = set()
        """Members whose link of this term was closed and not made again."""
        self._began_at = 0.0
        self._set_changes = asyncio.Event()

    def __repr__(self) -> str:
        return f"<InSyncSlaves {self.term} links={sorted(self._by_id)} waiting={len(self._waiting)}>"

    @property
    def epochs(self) -> EpochList:
        return self._epoch_file.epochs if self._epoch_file is not None else EpochList()

    @property
    def makes_senders_wait(self) -> bool:
        return True

    @property
    def lags(self) -> dict[int, int]:
        """The number of log bytes that each slave has not reported yet, by controller id."""
        links = self._by_id.items()
        return {number: self._store.max_offset - (link.reported_offset or 0) for number, link in links}

    def in_sync_links(self) -> list[tuple[InSyncLink, bool]]:
        """The slaves that follow, and whether each is in sync."""
        members = self.term.in_sync if self.term is not None else frozenset[int]()
        return [(link, number in members) for number, link in sorted(self._by_id.items())]

    # --- the role -----------------------------------------------------------------------------------------------

    def lead(self, term: Mastership, epoch_file: EpochFile) -> None:
        """Begin a term as master."""
        self.resign()
        self.term, self._epoch_file = term, epoch_file
        self._began_at = self._clock.monotonic()
        self.advance()

    def resign(self) -> None:
        """End the term: senders that wait are told that there is no master here, links are closed."""
        if self.term is not None:
            self.term.is_over = True
        self.term = None
        self.close_links()
        self._by_id.clear()
        self._left.clear()
        _tell(self._waiting.fail())

    def renewed(self, sent_at: float, lease_seconds: float) -> None:
        if self.term is not None:
            self.term.renewed(sent_at, lease_seconds)
            self.advance()

    def committed(self, members: frozenset[int], set_epoch: int) -> None:
        """The controller committed a sync-state set."""
        if self.term is not None and self.term.commits(members, set_epoch):
            log.info("sync-state set %s epoch=%d", sorted(members), set_epoch)
            self.advance()

    # --- senders ------------------------------------------------------------------------------------------------

    def tell_when_copied(self, end_offset: int, tell: Tell) -> None:
        """Call `tell`, which must not raise, when all members in sync have the log up to `end_offset`, or will not in
        time; perhaps at once."""
        verdict = self._verdict(end_offset)
        if verdict is Verdict.NOT_YET:
            self._waiting.wait_for(end_offset, tell, self._millis())
        else:
            is_safe = verdict is Verdict.SAFE
            tell(PutMessageStatus.PUT_OK if is_safe else PutMessageStatus.SERVICE_NOT_AVAILABLE)

    def _verdict(self, end_offset: int) -> Verdict:
        """The verdict now. A master whose lease ran out gives up its role."""
        term = self.term
        if term is None:
            return Verdict.NOT_MASTER
        verdict = term.verdict(end_offset, self.now())
        if verdict is Verdict.NOT_MASTER and term.is_over:
            self.on_lease_lost()
        return verdict

    def advance(self) -> None:
        """Something changed: confirm and acknowledge what all members in sync have."""
        term, store = self.term, self._store
        if term is None:
            return
        store.set_fence(self._fence(term))
        self._confirm(term)
        if len(self._waiting):
            safe = term.safe_end(store.max_offset)
            if self._verdict(safe) is Verdict.SAFE:
                _tell(self._waiting.settle(safe))

    @staticmethod
    def _fence(term: Mastership) -> str | None:
        if term.deadline is None:
            return "this broker was elected and waits for its lease"
        if term.is_short:
            return f"in-sync replicas not enough: {term.electable} of minInSyncReplicas={term.rules.least_in_sync}"
        return None

    def _confirm(self, term: Mastership) -> None:
        """Let records be read that all members in sync have; a master that is alone needs no limit."""
        store = self._store
        was_limited = not store.follower.at_once
        if not was_limited:
            self.confirm_offset = store.max_offset
        confirmed = term.confirmed_end(store.max_offset)
        if confirmed is not None:
            self.confirm_offset = max(self.confirm_offset, confirmed)
        is_alone = not term.rules.all_in_sync or len(term.in_sync) == 1
        store.set_confirm_offset(None if is_alone else self.confirm_offset)
        if was_limited:
            self.on_confirmed()

    # --- links --------------------------------------------------------------------------------------------------

    def _make_link(self) -> InSyncLink:
        return InSyncLink(self, self._store, self._config, self._clock)

    def opened(self, link: SlaveLink, *, is_known: bool) -> None:
        if self.term is None:
            link.abort()  # whoever is master now, it is not this broker
        else:
            super().opened(link, is_known=is_known)

    def shaken(self, link: InSyncLink, broker_id: int) -> None:
        """A slave made its handshake: its reports on older links count no more. Raises ReplicationError."""
        term = self.term
        if term is None:
            raise ReplicationError("this broker is not the master")
        if broker_id == term.broker_id:
            raise ReplicationError(f"it calls itself {broker_id}, as this master does")
        older = self._by_id.get(broker_id)
        self._by_id[broker_id] = link
        self._left.discard(broker_id)
        if older is not link:
            term.linked(broker_id)
            if older is not None:
                log.warning("slave replaced address=%s by=%s brokerId=%d", older.address, link.address, broker_id)
                older.abort()

    def reported(self, link: SlaveLink, offset: int) -> None:
        self._has_news.set()
        assert isinstance(link, InSyncLink)
        handshake, term = link.handshake, self.term
        if (
            term is None
            or handshake is None
            or handshake.is_learner
            or self._by_id.get(handshake.broker_id) is not link
        ):
            return
        member = handshake.broker_id
        term.reported(member, offset)
        if member not in term.in_sync and self._store.max_offset - offset <= _CLOSE_BYTES and offset >= term.start:
            term.invites(member)
        self.advance()
        if term.may_join(member, self.confirm_offset):
            self._set_changes.set()

    def closed(self, link: SlaveLink, error: Exception | None) -> None:
        super().closed(link, error)
        assert isinstance(link, InSyncLink)
        member = link.handshake.broker_id if link.handshake is not None else None
        if self.term is not None and member is not None and self._by_id.get(member) is link:
            del self._by_id[member]
            self._left.add(member)
            self.term.leaves_out(member)
            self.advance()
            self._set_changes.set()

    def tick(self) -> None:
        _tell(self._waiting.expire(self._millis()))
        super().tick()
        term = self.term
        if term is None:
            return
        if term.deadline is not None and not term.leads(self.now()):
            self.on_lease_lost()
        elif self._desired(term) != term.committed:
            self._set_changes.set()

    # --- the sync-state set -------------------------------------------------------------------------------------

    async def keep_sync_state_set(self) -> None:
        """Propose members that caught up, and to drop members that lag or are gone, for ever."""
        while True:
            await self._set_changes.wait()
            self._set_changes.clear()
            term, propose = self.term, self.propose
            if term is not None and propose is not None:
                desired = self._desired(term)
                if desired != term.committed and not await self._proposed(term, propose, desired):
                    await self._clock.sleep(_PROPOSAL_PAUSE_SECONDS)

    def _desired(self, term: Mastership) -> frozenset[int]:
        """The sync-state set as it should be."""
        now, limit = self._clock.monotonic(), self._config.store.ha_max_time_slave_not_catchup / 1000

        def lags(member: int) -> bool:
            link = self._by_id.get(member)
            if link is None:
                return member in self._left or now - self._began_at > limit
            return now - max(link.caught_up_at, self._began_at) > limit

        stay = {member for member in term.committed if member == term.broker_id or not lags(member)}
        join = {member for member in self._by_id if term.may_join(member, self.confirm_offset)}
        return frozenset(stay | join)

    async def _proposed(self, term: Mastership, propose: Propose, desired: frozenset[int]) -> bool:
        """Propose a set; whether the controller said yes.

        Every request is a proposal of its own: if an answer is lost, that request may have been granted, whatever is
        answered to the next one.
        """
        number = term.proposes(desired)
        try:
            answer = await propose(desired, term.committed_epoch)
        except (MQError, OSError, TimeoutError) as error:
            log.warning("sync-state set proposed, no answer set=%s reason=%s", sorted(desired), error)
            return False
        if answer.code in DEFINITE_REFUSALS:
            log.warning("sync-state set refused set=%s code=%d", sorted(desired), answer.code)
            term.refused(number)
        elif answer.code == 0 and term is self.term:
            self.committed(answer.sync_state_set, answer.sync_state_set_epoch)
        if term is self.term:
            self.advance()
        return answer.code == 0

    def _millis(self) -> int:
        return int(self._clock.monotonic() * 1000)


def _tell(settled: list[Settled[Tell]]) -> None:
    for tell, outcome in settled:
        tell(_STATUS[outcome])
