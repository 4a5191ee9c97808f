"""Which controller leads: the one whose address is in the leader key, which disappears with that controller's lease.

    grant a lease ─▶ create the key if it is absent ─▶ leading: renew every third of the lease
                              │ somebody else's                    │ the lease is gone
                              ▼                                    ▼
                     following: wait until the key changes ◀───────┘
                                or remove the key of a leader whose process is gone

A leader stops by its own clock one second before its lease can end at etcd. That is not what keeps state safe: every
change is a transaction that compares the key's create revision, so a leader that was replaced commits nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import msgspec

from downrange.clock import Clock
from downrange.controller.coordination import (
    Compare,
    Coordination,
    Delete,
    Found,
    Lease,
    Put,
    StoreUnavailable,
    Target,
)

log = logging.getLogger(__name__)

# The shortest that etcd grants with its usual settings. When the machines of a master and of this controller die
# together, nobody is elected before it has ended; when etcd is away for longer than it, nobody leads until it is back.
LEASE_SECONDS: Final = 2
MARGIN_SECONDS: Final = 0.5
RENEW_SECONDS: Final = 0.5
RETRY_SECONDS: Final = 0.25
RENEW_AGAIN_SECONDS: Final = 0.1


class Peer(msgspec.Struct, frozen=True):
    """A controller: the value of the leader key."""

    id: str
    address: str


class Term(NamedTuple):
    """One time in office. `guard` is a condition of every transaction: the leader key is still the one of this term."""

    create_revision: int
    guard: Compare


class Leadership:
    """Tries to lead for as long as `run` runs. `term` is what callers ask before they do anything as leader."""

    def __init__(
        self,
        store: Coordination,
        key: str,
        me: Peer,
        clock: Clock,
        take_office: Callable[[Term], Awaitable[None]],
        gone: Callable[[str], Awaitable[None]],
    ) -> None:
        """`take_office` runs before this controller answers as leader; if it raises StoreUnavailable, the term ends.

        `gone` returns when the process of a leader at an address is gone.
        """
        self._store = store
        self._key = key
        self.me = me
        self._clock = clock
        self._take_office = take_office
        self._gone = gone
        self._term: Term | None = None
        self._valid_until = float("-inf")
        self.leader: Peer | None = None
        """The leader as this controller last heard, itself included."""
        self.elections = 0
        """How often this controller began to lead."""

    def __repr__(self) -> str:
        return f"<Leadership {self.me.id} leader={self.leader} term={self._term}>"

    @property
    def term(self) -> Term | None:
        """The present term; None unless this controller leads and its lease is certain."""
        return self._term if self._clock.monotonic() <= self._valid_until else None

    @property
    def seconds_left(self) -> float:
        """How long this controller leads if its lease is not renewed; 0 if it does not lead."""
        return 0.0 if self.term is None else self._valid_until - self._clock.monotonic()

    def lost(self, term: Term) -> None:
        """A transaction showed that a term is over."""
        if self._term == term:
            log.warning("leadership lost controller=%s reason=another controller leads", self.me.id)
            self._end()

    async def run(self) -> None:
        """Lead or follow, for ever."""
        try:
            while True:
                try:
                    if not await self._lead():
                        await self._follow()
                except StoreUnavailable as error:
                    log.warning("no leader can be found reason=%s", error)
                    self._end()
                    await self._clock.sleep(RETRY_SECONDS)
        finally:
            await self._resign()

    # --- leading ------------------------------------------------------------------------------------------------

    async def _lead(self) -> bool:
        """Lead until the lease is lost; False if another controller leads."""
        sent = self._clock.monotonic()
        lease = await self._store.lease_grant(LEASE_SECONDS)
        absent = Compare(self._key, Target.CREATED, 0)
        value = msgspec.json.encode(self.me)
        committed = await self._store.txn([absent], [Put(self._key, value, lease.id)])
        if not committed.is_done:
            return False
        term = Term(committed.revision, Compare(self._key, Target.CREATED, committed.revision))
        # The lease counts from the moment it was asked for; what etcd adds to it is not relied on.
        self._valid_until = sent + LEASE_SECONDS - MARGIN_SECONDS
        await self._take_office(term)
        self._term = term
        self.leader = self.me
        self.elections += 1
        log.info("leading controller=%s term=%d", self.me.id, term.create_revision)
        await self._renew(lease, term)
        return True

    async def _renew(self, lease: Lease, term: Term) -> None:
        while self._term is not None:
            await self._clock.sleep(max(0.0, self._sent_last + RENEW_SECONDS - self._clock.monotonic()))
            sent = self._clock.monotonic()
            try:
                if not await self._store.lease_keepalive(lease.id, RENEW_SECONDS):
                    log.warning("leadership lost controller=%s reason=etcd ended the lease", self.me.id)
                    break
                if not (await self._store.txn([term.guard], [])).is_done:
                    log.warning("leadership lost controller=%s reason=another removed the leader key", self.me.id)
                    break
                # The lease lives and the key is that of this term, so nobody else can have led, even after a pause.
                self._valid_until = sent + LEASE_SECONDS - MARGIN_SECONDS
                self.leader = self.me
            except StoreUnavailable as error:
                if self.term is None and self.leader is not None:
                    log.warning("not leading for now controller=%s reason=%s", self.me.id, error)
                    self.leader = None
                await self._clock.sleep(RENEW_AGAIN_SECONDS)
        self._end()

    @property
    def _sent_last(self) -> float:
        """When the last renewal that succeeded was sent."""
        return self._valid_until - LEASE_SECONDS + MARGIN_SECONDS

    def _end(self) -> None:
        if self._term is not None:
            self.leader = None
        self._term = None
        self._valid_until = float("-inf")

    async def _resign(self) -> None:
        """Give the office away, so that others need not wait for the end of the lease."""
        term, self._term = self._term, None
        if term is not None:
            try:
                await self._store.txn([term.guard], [Delete(self._key)])
            except StoreUnavailable as error:
                log.info("the leader key is left to its lease reason=%s", error)

    # --- following ----------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Wait until the leader key is gone."""
        while True:
            found = await self._store.range(self._key)
            self.leader = _peer(found)
            if not found.items:
                return
            if await self._outlives(self.leader, found.revision):
                log.warning("leader gone controller=%s reason=nobody listens at its address", self.leader)
                same = Compare(self._key, Target.CREATED, found.items[0].create_revision)
                await self._store.txn([same], [Delete(self._key)])

    async def _outlives(self, leader: Peer | None, revision: int) -> bool:
        """Wait until the leader key may have changed; True if the process of the leader was gone before."""
        if leader is None or leader == self.me:
            await self._store.watch(self._key, revision + 1, LEASE_SECONDS)
            return False
        watching = asyncio.ensure_future(self._store.watch(self._key, revision + 1, LEASE_SECONDS))
        listening = asyncio.ensure_future(self._gone(leader.address))
        try:
            await asyncio.wait({watching, listening}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
                return False
            listening.result()
            return True
        finally:
            watching.cancel()
            listening.cancel()
            await asyncio.gather(watching, listening, return_exceptions=True)


def _peer(found: Found) -> Peer | None:
    try:
        return msgspec.json.decode(found.items[0].value, type=Peer) if found.items else None
    except msgspec.MsgspecError:
        return None
