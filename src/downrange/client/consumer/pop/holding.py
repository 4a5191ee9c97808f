"""Leases of a push consumer: renewed while callbacks work, and ended with what callbacks say."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Final, NamedTuple

from downrange.client.consumer.pop.leases import Leases
from downrange.client.consumer.pop.messages import PoppedMessage
from downrange.client.consumer.pop.queue import PopQueue
from downrange.clock import Clock
from downrange.model.errors import MQError
from downrange.protocol.errors import BrokerError

log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 1.0
# The delays of RocketMQ's levels 3 to 18: how long a message stays away that failed for the first time, the second …
RETRY_SECONDS: Final = (10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
_LEVELS: Final = (1, 5, *RETRY_SECONDS)


def retry_seconds(reconsume_times: int, delay_level: int = 0) -> int:
    """How long a failed message stays away: as long as its level says, or longer each time if there is none."""
    if delay_level > 0:
        return _LEVELS[min(delay_level, len(_LEVELS)) - 1]
    return RETRY_SECONDS[min(reconsume_times, len(RETRY_SECONDS) - 1)]


class _Lease(NamedTuple):
    """Where a message came from, and when its lease is to be renewed by the monotonic clock."""

    queue: PopQueue
    renew_at: float


class Holding:
    """The messages that a push consumer holds. Used on its event loop.

    Holds always: a lease is renewed until its message is ended; no two requests about one message are under way, for a
    renewal replaces the handle that the next request must name. Acknowledgements of one broker that come while one is
    under way wait, and go together.
    """

    def __init__(self, leases: Leases, invisible_seconds: float, clock: Clock) -> None:
        self._leases = leases
        self._invisible_seconds = invisible_seconds
        self._clock = clock
        self._held: dict[PoppedMessage, _Lease] = {}
        self._renewals: dict[PoppedMessage, asyncio.Task[None]] = {}
        self._done: dict[str, list[PoppedMessage]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Holding messages={len(self._held)} ending={len(self._tasks)}>"

    def add(self, queue: PopQueue, messages: Iterable[PoppedMessage]) -> None:
        renew_at = self._renew_at()
        for message in messages:
            self._held[message] = _Lease(queue, renew_at)

    def _renew_at(self) -> float:
        """When half of a lease that begins now is over. By our clock: the broker's may be far from it."""
        return self._clock.monotonic() + self._invisible_seconds / 2

    # --- renewal --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Renew leases, for ever."""
        while True:
            await self._clock.sleep(_LOOK_SECONDS)
            self.renew()

    def renew(self) -> None:
        """Begin to renew the leases of which less than half is left."""
        now = self._clock.monotonic()
        for message, lease in self._held.items():
            if lease.renew_at <= now and message not in self._renewals:
                self._renewals[message] = self._spawn(self._renew(message))

    async def _renew(self, message: PoppedMessage) -> None:
        renew_at = self._renew_at()
        try:
            await self._leases.change_invisible_duration(message, self._invisible_seconds)
            if message in self._held:
                self._held[message] = self._held[message]._replace(renew_at=renew_at)
        except MQError as error:
            log.warning("lease not renewed message=%s reason=%s", message, error)
            if isinstance(error, BrokerError) and not error.retriable:
                self.forget(message)
        finally:
            del self._renewals[message]

    def forget(self, message: PoppedMessage) -> None:
        """Renew the lease of a message no more: it comes again, whatever its callback says."""
        lease = self._held.pop(message, None)
        if lease is not None:
            lease.queue.finish(message)

    # --- the end of leases ----------------------------------------------------------------------------------------

    def ack(self, messages: Iterable[PoppedMessage]) -> None:
        """Acknowledge messages, in the background."""
        for message in messages:
            self.forget(message)
            renewal = self._renewals.get(message)
            if renewal is None:
                self._ack(message)
            else:
                renewal.add_done_callback(partial(self._ack, message))

    def _ack(self, message: PoppedMessage, _: object = None) -> None:
        name = message.broker_name
        waiting = self._done.get(name)
        if waiting is None:
            waiting = self._done[name] = []
            self._spawn(self._ack_at(name))
        waiting.append(message)

    async def _ack_at(self, broker_name: str) -> None:
        """Acknowledge what there is of one broker, again and again until there is nothing left."""
        try:
            while messages := self._done[broker_name]:
                self._done[broker_name] = []
                failed = await self._leases.ack(messages, self._invisible_seconds / 2)
                for message, error in failed.items():
                    log.warning("message not acknowledged, it will come again message=%s reason=%s", message, error)
        finally:
            del self._done[broker_name]

    def fail(self, message: PoppedMessage, seconds: float) -> None:
        """Let a message come again after some seconds, in the background."""
        self._end(message, lambda: self._leases.change_invisible_duration(message, seconds), "will come again earlier")

    def bury(self, message: PoppedMessage) -> None:
        """Make a dead letter of a message, in the background."""
        self._end(message, lambda: self._leases.make_dead_letter(message), "is no dead letter, it will come again")

    def give_back(self, messages: Iterable[PoppedMessage]) -> None:
        """Let other consumers have messages at once, in the background."""
        for message in messages:
            self.fail(message, 0)

    def _end(self, message: PoppedMessage, end: Callable[[], Awaitable[None]], otherwise: str) -> None:
        self.forget(message)
        renewal = self._renewals.get(message)

        async def work() -> None:
            if renewal is not None:
                await asyncio.wait((renewal,))
            try:
                await end()
            except MQError as error:
                log.warning("message %s message=%s reason=%s", otherwise, message, error)

        self._spawn(work())

    # --- the end --------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait until brokers know what was said about messages so far."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name="downrange lease")
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("work on a lease failed", exc_info=error)

        task.add_done_callback(ended)
        return task
