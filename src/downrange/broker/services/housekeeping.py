"""Regular small duties: forget silent clients and old filters, save offsets, remove expired files, obey new rights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from downrange.auth.access_control import AccessControl
from downrange.broker.clients import Consumers, Producers
from downrange.broker.filter_data import ConsumerFilters
from downrange.broker.json_file import SavedTable
from downrange.broker.live_config import LiveConfig
from downrange.broker.waiting_pulls import WaitingPulls
from downrange.clock import Clock
from downrange.store.message_store import MessageStore
from downrange.store.retention import Retention

log = logging.getLogger(__name__)

_CLIENT_SCAN_SECONDS: Final = 10.0
_FILTER_SCAN_SECONDS: Final = 60.0
_FIRST_CLEAN_UP_SECONDS: Final = 60.0
_SAVE_SOON_SECONDS: Final = 0.05
_RIGHTS_SCAN_SECONDS: Final = 0.25


async def expire_clients(consumers: Consumers, producers: Producers, clock: Clock) -> None:
    """Close the connections of clients that stopped sending heartbeats."""
    while True:
        await clock.sleep(_CLIENT_SCAN_SECONDS)
        now = clock.now()
        for connection in {*consumers.expire(now), *producers.expire(now)}:
            connection.abort()


async def clean_filters(filters: ConsumerFilters, config: LiveConfig, clock: Clock) -> None:
    """Forget the filters of groups that have been gone for long."""
    while True:
        await clock.sleep(_FILTER_SCAN_SECONDS)
        filters.clean(config.broker.filter_data_clean_time_span)


async def answer_waiting_pulls(control: AccessControl, waiting: WaitingPulls, clock: Clock) -> None:
    """Answer all waiting pulls when rights changed: those who still may pull ask again, and are looked at again."""
    generation = control.generation
    while True:
        await clock.sleep(_RIGHTS_SCAN_SECONDS)
        if generation != control.generation:
            generation = control.generation
            waiting.notify_all()


async def save_every(
    table: SavedTable, seconds: Callable[[], float], clock: Clock, flushed: Callable[[], Awaitable[bool]] | None = None
) -> None:
    """Save a table that changes all the time at regular intervals.

    With `flushed`, which says whether the log up to now is on disk, the table never is ahead of the log there.
    """
    while True:
        await clock.sleep(seconds())
        await _save(table, flushed)


async def save_soon(table: SavedTable, clock: Clock) -> None:
    """Save a table that rarely changes right after each change, but less often if saving takes long."""
    changed = asyncio.Event()
    table.on_unsaved = changed.set
    while True:
        start = clock.monotonic()
        await _save(table)
        await clock.sleep(max(_SAVE_SOON_SECONDS, 10 * (clock.monotonic() - start)))
        await changed.wait()
        changed.clear()


async def _save(table: SavedTable, flushed: Callable[[], Awaitable[bool]] | None = None) -> None:
    write = table.prepare_save()
    if write is None:
        return
    try:
        if flushed is not None and not await flushed():
            table.mark_unsaved()
            return
        await asyncio.get_running_loop().run_in_executor(None, write)
    except asyncio.CancelledError:
        table.mark_unsaved()  # perhaps no thread had begun to save: then the broker saves the table when it stops
        raise
    except OSError as error:  # a full disk must not stop the broker: reads still work, and expired files will go
        log.error("cannot save %s, trying again reason=%s", type(table).__name__, error.strerror or error)
        table.mark_unsaved()


async def clean_up(retention: Retention, store: MessageStore, config: LiveConfig, clock: Clock) -> None:
    """Remove expired files. The store's own thread decides which; a worker thread deletes them."""
    loop = asyncio.get_running_loop()
    await clock.sleep(_FIRST_CLEAN_UP_SECONDS)
    while True:
        _, taken = retention.judge(clock.now())
        for number, path in enumerate(taken):
            if number:  # a burst of deletions would hold up senders on some file systems
                await clock.sleep(config.store.delete_commit_log_files_interval / 1000)
            await loop.run_in_executor(None, store.remove_files, [path])
        retention.clean_dependents()
        await clock.sleep(config.store.clean_resource_interval / 1000)
