"""Refuses requests that waited too long: an early refusal is better for a client than a late answer.

While the loop is busy, requests wait unseen in the socket. A tick that should come every few milliseconds shows how
long: the time since the last tick is the longest that any request of this turn can have waited. (RocketMQ measures the
wait in the queues of its thread pools.)
"""

from __future__ import annotations

import asyncio
from math import inf
from typing import Final

from downrange.broker.live_config import LiveConfig
from downrange.protocol.errors import SystemBusy
from downrange.store.message_store import MessageStore

TICK_SECONDS: Final = 0.01


class FlowControl:
    """Decides whether a request may still be served. `tick` must run for as long as the broker does."""

    def __init__(self, config: LiveConfig, store: MessageStore) -> None:
        self._config = config
        self._store = store
        self._loop = asyncio.get_running_loop()
        self.last_tick = self._loop.time()
        self._busy_tick: float | None = None
        self._has_transient_pool = store.transient_buffers_available is not None
        self.send_patience = self.pull_patience = 0.0
        """While the last tick is at most this many seconds ago, `check_send` and `check_pull` refuse nothing."""
        self._set_patience()

    async def tick(self) -> None:
        while True:
            self.last_tick = self._loop.time()
            self._set_patience()
            await asyncio.sleep(TICK_SECONDS)

    def _set_patience(self) -> None:
        broker = self._config.broker
        self.send_patience = self.pull_patience = inf
        if broker.broker_fast_failure_enable:
            self.send_patience = TICK_SECONDS + broker.wait_time_mills_in_send_queue / 1000
            self.pull_patience = TICK_SECONDS + broker.wait_time_mills_in_pull_queue / 1000
        if self._has_transient_pool:
            self.send_patience = -inf  # the pool must be asked for a free buffer at every send

    @property
    def waited_millis(self) -> float:
        """The longest time that a request handled now can have waited."""
        return max(0.0, (self._loop.time() - self.last_tick - TICK_SECONDS) * 1000)

    def appended(self, seconds: float) -> None:
        """Note how long a message took to be copied into the log: a long time means that the page cache is busy."""
        if seconds * 1000 > self._config.store.os_page_cache_busy_timeout_millis:
            self._busy_tick = self.last_tick
            if self._config.broker.broker_fast_failure_enable:
                self.send_patience = -inf

    def check_send(self) -> None:
        if self._busy_tick == self.last_tick and self._config.broker.broker_fast_failure_enable:
            # This send waited while the page cache was busy. In the next turn of the loop, sends are taken again.
            raise SystemBusy(
                "[PCBUSY_CLEAN_QUEUE]broker busy, start flow control for a while, "
                f"period in queue: {int(self.waited_millis)}ms, size of queue: 0"
            )
        if self._store.is_transient_pool_deficient:
            raise SystemBusy("[REJECTREQUEST]system busy, start flow control for a while")
        self._check_wait(self._config.broker.wait_time_mills_in_send_queue)

    def check_pull(self) -> None:
        self._check_wait(self._config.broker.wait_time_mills_in_pull_queue)

    def check_heartbeat(self) -> None:
        self._check_wait(self._config.broker.wait_time_mills_in_heartbeat_queue)

    def check_end_transaction(self) -> None:
        self._check_wait(self._config.broker.wait_time_mills_in_transaction_queue)

    def _check_wait(self, limit_millis: int) -> None:
        waited = (self._loop.time() - self.last_tick - TICK_SECONDS) * 1000
        if waited > limit_millis and self._config.broker.broker_fast_failure_enable:
            raise SystemBusy(
                "[TIMEOUT_CLEAN_QUEUE]broker busy, start flow control for a while, "
                f"period in queue: {int(waited)}ms, size of queue: 0"
            )
