"""Writes the store to the disk, in worker threads unless the disk is quicker than a switch of threads.

The store's `FlushPolicy` decides when to flush, its `GroupCommit` which senders are told, its `QuickSyncs` in which
thread. This module has the threads and the waiting. Under SYNC_FLUSH all waiting senders share the next fsync; a sender
that waits alone gets its fsync at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Final, TypeVar, cast

from downrange.broker.live_config import LiveConfig
from downrange.clock import Clock
from downrange.store.config import FlushDiskType
from downrange.store.errors import FlushFailed, StoreError
from downrange.store.group_commit import (
    FlushOutcome,
    FlushPolicy,
    FlushTimes,
    GroupCommit,
    LoneSender,
    QuickSyncs,
    Settled,
)
from downrange.store.message_store import MessageStore

log = logging.getLogger(__name__)

EXPIRE_SECONDS: Final = 0.1
_GATHER_SECONDS: Final = 0.001
_PAUSE_SECONDS: Final = 0.1
_MOST_PAUSES: Final = 20

Result = TypeVar("Result")


class Flusher:
    """Flushes one store. Called in the loop's thread; `run` must run as long as the broker does.

    Holds always: a sender is told FLUSHED only after the success of an fsync that began when its bytes were in the log.
    """

    def __init__(self, store: MessageStore, config: LiveConfig, clock: Clock) -> None:
        self._store = store
        self._config = config
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._waiting: GroupCommit[Callable[[FlushOutcome], None]] = GroupCommit(config.store.sync_flush_timeout)
        self._quick = QuickSyncs()
        self._lone = LoneSender()
        self._is_in_thread = False
        self._wanted = asyncio.Event()
        self._room_used = asyncio.Event()
        store.commit_log.on_room_used = self._room_used.set
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="flush")
        self._queue_worker = ThreadPoolExecutor(1, thread_name_prefix="flush-queues")
        self._preparer = ThreadPoolExecutor(1, thread_name_prefix="prepare")
        self._in_threads: set[asyncio.Future[object]] = set()
        self._may_work = asyncio.Event()
        self._may_work.set()

    @asynccontextmanager
    async def at_rest(self) -> AsyncIterator[None]:
        """No thread works on the files of the store until the block ends, which must not wait for anything itself."""
        self._may_work.clear()
        try:
            while self._in_threads:
                await asyncio.wait(self._in_threads)
            yield
        finally:
            self._may_work.set()

    async def _in_thread(self, worker: ThreadPoolExecutor, work: Callable[..., Result], *arguments: object) -> Result:
        await self._may_work.wait()
        running = self._loop.run_in_executor(worker, work, *arguments)
        noted = cast("asyncio.Future[object]", running)
        self._in_threads.add(noted)
        running.add_done_callback(lambda _: self._in_threads.discard(noted))
        return await running

    @property
    def is_sync(self) -> bool:
        return self._config.store.flush_disk_type is FlushDiskType.SYNC_FLUSH

    def tell_when_flushed(
        self, end_offset: int, tell: Callable[[FlushOutcome], None], *, may_block: bool = True
    ) -> None:
        """Call `tell` with how the wait ended until the log is on disk up to `end_offset`; `tell` must not raise.

        If this `may_block`, `tell` is perhaps called before this returns.
        """
        is_busy = self._waiting or self._is_in_thread or self._quick.is_away
        is_alone = may_block and not is_busy and self._lone.is_here()
        self._waiting.wait_for(end_offset, tell, self._clock.now())
        if is_alone:
            self._loop.call_soon(self._lone.turn_over)
            self._flush_here()
        else:
            self._wanted.set()

    async def flushed(self) -> bool:
        """Write the log up to now to the disk; False when that failed."""
        store = self._store
        end_offset = store.commit_log.wrote_offset
        for _ in range(_MOST_PAUSES):  # until the transient pool is written
            if store.max_offset >= end_offset:
                break
            await self._clock.sleep(_PAUSE_SECONDS)
        if store.flushed_offset < end_offset:
            await self._flush_log(0)
        return store.flushed_offset >= end_offset

    async def run(self, on_committed: Callable[[], object]) -> None:
        """Flush log and queues, and prepare files. `on_committed` makes records of the log readable that are not yet:
        called when the transient pool was written, and after queues could not be."""
        async with asyncio.TaskGroup() as tasks:
            if self.is_sync:
                tasks.create_task(self._flush_for_senders())
                tasks.create_task(self._expire_senders())
            else:
                tasks.create_task(self._flush_by_time())
            tasks.create_task(self._flush_queues(on_committed))
            tasks.create_task(self._prepare_files())
            if self._config.store.uses_transient_pool:
                tasks.create_task(self._commit_pool(on_committed))

    def close(self) -> None:
        """Wait for the worker threads, and tell senders that still wait that the flush failed."""
        self._worker.shutdown()
        self._queue_worker.shutdown()
        self._preparer.shutdown()
        self._tell(self._waiting.fail())

    async def _flush_for_senders(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            if self._quick.is_next_here():
                await self._gather()
                self._flush_here()
            else:
                await self._flush_log(0)

    def _flush_here(self) -> None:
        began = self._clock.monotonic()
        try:
            flushed = self._store.flush_commit_log()
        except FlushFailed as error:
            self._failed(error)
        else:
            self._quick.took(self._clock.monotonic() - began)
            self._settle(flushed)

    async def _gather(self) -> None:
        """Let senders join whose requests have arrived already: one sync takes as long for one as for all of them."""
        until = self._clock.monotonic() + _GATHER_SECONDS
        seen = 0
        while seen != len(self._waiting) and self._clock.monotonic() < until:
            seen = len(self._waiting)
            await asyncio.sleep(0)

    async def _flush_by_time(self) -> None:
        config = self._config.store
        policy = FlushPolicy(FlushTimes.of_commit_log(config), self._millis())
        while True:
            await self._until(policy)
            flush = policy.due(self._millis())
            if flush is not None and (self._waiting or self._store.log_needs_flush(flush.least_pages)):
                await self._flush_log(flush.least_pages)
            if self._config.store is not config:  # changed while running
                config = self._config.store
                policy = FlushPolicy(FlushTimes.of_commit_log(config), self._millis())

    async def _flush_log(self, least_pages: int) -> None:
        self._is_in_thread = True
        try:
            flushed = await self._in_thread(self._worker, self._store.flush_commit_log, least_pages)
        except FlushFailed as error:
            self._failed(error)
            await self._clock.sleep(1)
        else:
            self._settle(flushed)
        finally:
            self._is_in_thread = False

    def _settle(self, flushed: int) -> None:
        settled = self._waiting.settle(flushed)
        self._lone.served(len(settled))
        self._tell(settled)

    def _failed(self, error: FlushFailed) -> None:
        log.error("flush failed, the store takes no more messages: %s", error)
        self._tell(self._waiting.fail())

    async def _expire_senders(self) -> None:
        while True:
            await self._clock.sleep(EXPIRE_SECONDS)
            if len(self._waiting):
                self._tell(self._waiting.expire(self._clock.now()))
            elif self._store.is_writable and self._store.flushed_offset < self._store.max_offset:
                self._wanted.set()  # messages for which no sender waits must reach the disk, too

    async def _flush_queues(self, dispatch: Callable[[], object]) -> None:
        policy = FlushPolicy(FlushTimes.of_consume_queues(self._config.store), self._millis())
        while True:
            await self._until(policy)
            flush = policy.due(self._millis())
            if flush is None:
                continue
            if "dispatch" in self._store.refusals:  # the disk was full, say: it may have room again
                dispatch()
            try:
                for _ in self._store.write_pending_in_slices(least_pages=flush.least_pages):
                    await asyncio.sleep(0)
                if flush.is_thorough or self._store.queues_need_flush(flush.least_pages):
                    await self._in_thread(self._queue_worker, self._sync_queues, flush.least_pages)
            except StoreError as error:
                log.error("cannot write consume queues, trying again: %s", error)
                continue
            if flush.is_thorough:
                for _ in self._store.release_idle_in_slices():
                    await asyncio.sleep(0)

    def _sync_queues(self, least_pages: int) -> None:
        self._store.flush_queues(least_pages, thorough=least_pages == 0)

    async def _commit_pool(self, on_committed: Callable[[], object]) -> None:
        policy = FlushPolicy(FlushTimes.of_transient_pool(self._config.store), self._millis())
        while True:
            await self._until(policy)
            commit = policy.due(self._millis())
            if commit is None:
                continue
            try:
                if await self._in_thread(self._worker, self._store.commit, commit.least_pages):
                    on_committed()
            except StoreError as error:
                log.error("cannot write the transient pool, trying again: %s", error)

    async def _prepare_files(self) -> None:
        """Keep the next stretch and the next file of the log ready, so that no send has to wait for them."""
        store = self._store
        while True:
            try:
                stretch = store.next_stretch()
                if stretch is not None:
                    await self._in_thread(self._preparer, store.prepare_stretch, stretch)
                elif store.needs_next_file:
                    await self._in_thread(self._preparer, store.prepare_next_file)
                else:
                    await self._room_used.wait()
                    self._room_used.clear()
            except StoreError as error:
                log.error("cannot prepare more of the commit log, trying again: %s", error)
                await self._clock.sleep(1)

    async def _until(self, policy: FlushPolicy) -> None:
        await self._clock.sleep(max(1, policy.next_due - self._millis()) / 1000)

    def _millis(self) -> int:
        """Not the time of day: a clock that is set back must not put off a flush."""
        return int(self._clock.monotonic() * 1000)

    @staticmethod
    def _tell(settled: list[Settled[Callable[[FlushOutcome], None]]]) -> None:
        for tell, outcome in settled:
            tell(outcome)
