"""The one door of a broker: every request passes `Admission` before anything looks at what the request asks for.

A broker sheds load early: refusing is kinder than answering too late. Requests wait unseen in their sockets while the
loop is busy with other things. A tick that should come every few milliseconds shows how long: the time since the last
one is the longest any request of this turn can have waited. (RocketMQ measures the same in its thread pools' queues.)
Time in which the machine gave the loop no processor is not held against a request: a broker that stood still has no
more to do than before, and a send that is refused is not sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from math import inf
from time import thread_time
from typing import Final

from downrange.auth.gate import Gate, Refusal
from downrange.broker.live_config import LiveConfig
from downrange.protocol.codes import RequestCode
from downrange.protocol.errors import BrokerError, SystemBusy
from downrange.protocol.framing import Frame, code_of
from downrange.store.message_store import MessageStore
from downrange.transport.connection import Connection

TICK_SECONDS: Final = 0.01


class FlowControl:
    """Decides whether a request may still be served. `tick` must run for as long as the broker does."""

    def __init__(self, config: LiveConfig, store: MessageStore) -> None:
        self._config = config
        self._store = store
        self._loop = asyncio.get_running_loop()
        self.last_tick = self._loop.time()
        self.worked_at_tick = thread_time()
        self._blocked_seconds = 0.0
        """For how long appends since the last tick had to wait, at most."""
        self._busy_tick: float | None = None
        self._has_transient_pool = store.transient_buffers_available is not None
        self.has_other_master: Callable[[], bool] = lambda: False
        """Whether another broker was elected master: producers are sent away so that they look for it."""
        self.calm_until = 0.0
        """Until this time of the loop all checks say yes."""
        self._set_patience()

    async def tick(self) -> None:
        while True:
            self.last_tick = self._loop.time()
            self.worked_at_tick = thread_time()
            self._blocked_seconds = 0.0
            self._set_patience()
            await asyncio.sleep(TICK_SECONDS)

    def _set_patience(self) -> None:
        broker = self._config.broker
        self.calm_until = inf
        if broker.broker_fast_failure_enable:
            shortest = min(
                broker.wait_time_mills_in_send_queue,
                broker.wait_time_mills_in_pull_queue,
                broker.wait_time_mills_in_heartbeat_queue,
                broker.wait_time_mills_in_transaction_queue,
            )
            self.calm_until = self.last_tick + TICK_SECONDS + shortest / 1000
        if self._has_transient_pool or self.has_other_master():
            self.calm_until = -inf  # whether a send can be taken must be asked each time

    @property
    def waited_millis(self) -> float:
        """The longest a request handled now can have waited."""
        return max(0.0, (self._loop.time() - self.last_tick - TICK_SECONDS) * 1000)

    def appended(self, seconds: float) -> None:
        """A message took so long to be copied into the log: the kernel made us wait for the page cache."""
        self._blocked_seconds += seconds
        if seconds * 1000 > self._config.store.os_page_cache_busy_timeout_millis:
            self._busy_tick = self.last_tick
            if self._config.broker.broker_fast_failure_enable:
                self.calm_until = -inf

    def check_send(self) -> None:
        if self._busy_tick == self.last_tick and self._config.broker.broker_fast_failure_enable:
            # This send was waiting while the page cache was busy; the next turn of the loop tries again.
            raise SystemBusy(
                "[PCBUSY_CLEAN_QUEUE]broker busy, start flow control for a while, "
                f"period in queue: {int(self.waited_millis)}ms, size of queue: 0"
            )
        if self._store.is_transient_pool_deficient or self.has_other_master():
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
        if waited <= limit_millis or not self._config.broker.broker_fast_failure_enable:
            return
        busy = (thread_time() - self.worked_at_tick + self._blocked_seconds) * 1000
        if busy > limit_millis:
            raise SystemBusy(
                "[TIMEOUT_CLEAN_QUEUE]broker busy, start flow control for a while, "
                f"period in queue: {int(waited)}ms, size of queue: 0"
            )


class Admission:
    """Decides which requests are carried out.

    Neither the broker nor the connection may have too much to do already; with access control the `Gate` must agree.
    """

    def __init__(self, flow: FlowControl, gate: Gate | None = None) -> None:
        self._flow = flow
        self._gate = gate
        self._time = asyncio.get_running_loop().time
        send, pull = flow.check_send, flow.check_pull
        self._checks: Mapping[int, Callable[[], None]] = {
            int(RequestCode.SEND_MESSAGE): send,
            int(RequestCode.SEND_MESSAGE_V2): send,
            int(RequestCode.SEND_BATCH_MESSAGE): send,
            int(RequestCode.PULL_MESSAGE): pull,
            int(RequestCode.LITE_PULL_MESSAGE): pull,
            int(RequestCode.END_TRANSACTION): flow.check_end_transaction,
            int(RequestCode.HEART_BEAT): flow.check_heartbeat,
        }

    def admitted(
        self, frames: list[Frame], origins: list[Connection], at: int, stop: int
    ) -> tuple[int, Refusal | None]:
        """The position of the first request of `frames[at:stop]` that is refused, and why; `stop` and None for none."""
        first = origins[at]  # all connections of a server share its usage and its limits
        # While all connections together wait for fewer replies than one may, none of them waits for too many.
        is_idle = first.usage.requests < first.limits.max_requests_per_connection
        if is_idle and self._time() <= self._flow.calm_until:
            return (stop, None) if self._gate is None else self._gate.admitted(frames, origins, at, stop)
        for position in range(at, stop):
            error = self._overload(frames[position], origins[position])
            refusal = None if error is None else Refusal(error)
            if refusal is None and self._gate is not None:
                refusal = self._gate.admitted(frames, origins, position, position + 1)[1]
            if refusal is not None:
                return position, refusal
        return stop, None

    def _overload(self, frame: Frame, origin: Connection) -> BrokerError | None:
        """Why there is too much to do already for a request; None when there is not."""
        if origin.is_overloaded:
            return SystemBusy("[OVERLOAD]system busy, start flow control for a while")
        check = self._checks.get(code_of(frame))
        try:
            if check is not None:
                check()
        except BrokerError as error:
            return error
        return None
