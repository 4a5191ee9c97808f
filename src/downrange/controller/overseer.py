"""Watches over the broker sets while this controller leads: elects when a master is dead, and tells brokers of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Hashable
from contextlib import suppress
from typing import Any, Final

from downrange.clock import Clock
from downrange.controller.broker_links import BrokerLinks
from downrange.controller.coordination import StoreUnavailable
from downrange.controller.election import Call, decide, is_due
from downrange.controller.liveness import Liveness, ReplicaKey
from downrange.controller.sets import BrokerSets
from downrange.controller.state import BrokerSet, Verdict
from downrange.protocol.codes import ResponseCode
from downrange.protocol.errors import BrokerError, NotLeader

log = logging.getLogger(__name__)

PROBE_AGAIN_SECONDS: Final = 0.1
STALL_SECONDS: Final = 0.5
MOST_AT_ONCE: Final = 16
_ELECTED: Final = frozenset({ResponseCode.SUCCESS, ResponseCode.MASTER_STILL_EXIST})


class Overseer:
    """Elections of all sets. `notifies` may be changed at any time."""

    def __init__(self, sets: BrokerSets, liveness: Liveness, links: BrokerLinks, clock: Clock) -> None:
        self._sets = sets
        self._liveness = liveness
        self.links = links
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._probed: set[ReplicaKey] = set()
        self._wake = asyncio.Event()
        self.unsafe: set[ReplicaKey] = set()
        """Replicas that acknowledge before all members of the sync-state set have a message."""
        self._looked_at: set[ReplicaKey] = set()
        """Replicas that were asked whether they do so."""
        self.notifies = True
        self.elections = 0
        self.failed_elections = 0

    def __repr__(self) -> str:
        return f"<Overseer elections={self.elections} probes={len(self._probed)}>"

    # --- elections ----------------------------------------------------------------------------------------------

    async def elect(self, broker_name: str, call: Call) -> tuple[Verdict, BrokerSet | None]:
        """Hold an election. Raises NotLeader and StoreUnavailable."""
        if call.is_unclean:
            log.error("unclean election asked for set=%s: acknowledged messages may be LOST", broker_name)

        def event(old: BrokerSet | None) -> Verdict:
            ids = () if old is None else old.replicas
            alive = self._liveness.alive(broker_name, ids, self._clock.monotonic())
            return decide(old, call, alive, self._liveness.standings(broker_name, ids))

        before = self._sets.get(broker_name)
        verdict, after = await self._sets.change(broker_name, event)
        self.failed_elections += verdict.code not in _ELECTED
        epoch = 0 if before is None else before.master_epoch
        # Also an election whose outcome was not known when it was held: nobody was told of it.
        if after is not None and after.master_epoch > epoch:
            self._log(before, after)
            if after.master is not None:
                self.elections += 1
                self.tell(after)
        return verdict, after

    def tell(self, broker_set: BrokerSet) -> None:
        """Tell all replicas of an election, beside what goes on."""
        if self.notifies:
            self.start(self.links.tell(broker_set))

    def _log(self, before: BrokerSet | None, after: BrokerSet) -> None:
        old = None if before is None else before.master
        log.warning(
            "election set=%s master=%s before=%s epoch=%d sync_state_set=%s",
            after.broker_name, after.master, old, after.master_epoch, sorted(after.sync_state_set),
        )  # fmt: skip

    # --- searching ----------------------------------------------------------------------------------------------

    async def scan(self) -> None:
        """Hold every election that is due."""
        now = self._clock.monotonic()
        at_once = asyncio.Semaphore(MOST_AT_ONCE)

        async def one(name: str) -> None:
            async with at_once:
                try:
                    await self.elect(name, Call())
                except (StoreUnavailable, BrokerError) as error:
                    log.warning("no election set=%s reason=%s", name, error)

        due = [broker_set.broker_name for broker_set in self._sets if self._is_due(broker_set, now)]
        await asyncio.gather(*map(one, due))

    def _is_due(self, broker_set: BrokerSet, now: float) -> bool:
        name = broker_set.broker_name
        alive = self._liveness.alive(name, broker_set.replicas, now)
        may_be_leased = not self._is_safe(broker_set) and now <= self._liveness.leased_until(name)
        return is_due(broker_set, alive, may_be_leased=may_be_leased)

    def _is_safe(self, broker_set: BrokerSet) -> bool:
        """Whether the master of a set acknowledges nothing that others in sync lack, as far as was found out."""
        keys = {ReplicaKey(broker_set.broker_name, id_) for id_ in broker_set.replicas}
        master = ReplicaKey(broker_set.broker_name, broker_set.master or 0)
        return master in self._looked_at and not keys & self.unsafe

    async def run(self, pause_seconds: Callable[[], float]) -> None:
        """Search until cancelled, at once when a probe found nobody; `pause_seconds` tells the longest pause."""
        last = self._clock.monotonic()
        while True:
            self._wake.clear()
            now = self._clock.monotonic()
            if now - last > pause_seconds() + STALL_SECONDS:
                log.warning("this process stood still seconds=%.1f", now - last)
                self._liveness.excuse(now)
            with suppress(NotLeader):
                self._sets.check_leading()
                await self.scan()
            last = self._clock.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_seconds()):
                    await self._wake.wait()

    # --- closed connections -------------------------------------------------------------------------------------

    def closed(self, connection: Hashable) -> None:
        """A connection was closed: look whether the brokers that sent heartbeats over it are still there."""
        for key in self._liveness.closed(connection):
            if key not in self._probed:
                self._probed.add(key)
                self.start(self._probe(key, connection))

    async def _probe(self, key: ReplicaKey, connection: Hashable) -> None:
        """Try to reach a broker until it was heard again, or is silent for too long, or cannot be reached."""
        try:
            while self._liveness.is_alive(key, self._clock.monotonic()) and self._is_suspected(key, connection):
                address = self._liveness.address(key)  # as its heartbeats told: a controller that follows looks, too
                if address is None:
                    return
                if not await self.links.is_there(address):
                    if self._liveness.not_found(key, connection):
                        log.warning("broker gone set=%s id=%d reason=connection closed", *key)
                        self._wake.set()
                    return
                await asyncio.sleep(PROBE_AGAIN_SECONDS)
        finally:
            self._probed.discard(key)

    def _is_suspected(self, key: ReplicaKey, connection: Hashable) -> bool:
        return key in self._liveness.closed(connection)

    # --- settings of brokers ------------------------------------------------------------------------------------

    def look_at_settings(self, key: ReplicaKey, address: str) -> None:
        """Find out beside what goes on whether a broker is safe."""

        async def look() -> None:
            await self.is_safe(key, address)

        self.start(look())

    async def is_safe(self, key: ReplicaKey, address: str) -> bool:
        """Whether a broker acknowledges only messages that all members of the sync-state set have, or does not say."""
        answer = await self.links.acknowledges_safely(address)
        if answer is None:  # what it said before still counts: a dead master may have been unsafe
            return key not in self.unsafe
        self._looked_at.add(key)
        if answer:
            self.unsafe.discard(key)
            return True
        self.unsafe.add(key)
        log.warning(
            "broker may lose acknowledged messages at a failover set=%s id=%d: set allAckInSyncStateSet=true", *key
        )
        return False

    # --- work beside ------------------------------------------------------------------------------------------------

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that nobody waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Give up what nobody waits for."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
