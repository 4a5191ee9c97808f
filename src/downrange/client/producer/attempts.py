"""The attempts of one send after the first: until the message is stored, or the time or the attempts are used up.

`retry.py` decides what follows an attempt. With the strategy `adaptive` a send does not fail because a broker has no
master at the moment: it waits for the new route, or the broker's return, within its own time-out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple

import msgspec
from msgspec import structs

from downrange.client.config import ProducerConfig
from downrange.client.errors import BrokerNotFound, FailedAttempt, SendFailed
from downrange.client.producer.fault import Outcome, QueueChooser
from downrange.client.producer.outgoing import Outgoing
from downrange.client.producer.publish_info import PublishInfo
from downrange.client.producer.publish_routes import PublishRoutes
from downrange.client.producer.retry import (
    Decision,
    SendKind,
    after_async_attempt,
    after_attempt,
    attempt_timeout,
    attempts_allowed,
    is_not_master,
    may_have_moved,
    outcome_of_error,
)
from downrange.client.producer.send_requests import SendRequests, results_of
from downrange.client.producer.send_result import SendResult, SendStatistics, SendStatus
from downrange.client.producer.started_send import StartedSend
from downrange.client.route_chase import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS
from downrange.client.session import Session
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue
from downrange.protocol.codes import ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError, NoPermission
from downrange.transport.errors import RequestTimedOut

LAST_ATTEMPT_SECONDS: Final = 0.1
"""A send that waits keeps so much of its time for the attempt after that."""
UNANSWERED: Final = frozenset({Outcome.TIMEOUT, Outcome.GIVEN_UP, Outcome.CONNECTION_LOST})
"""The message may be stored all the same."""

Reply = Command | SendResult | MQError | None
"""The end of an attempt: a reply, or an error; None for a one-way send."""


class Ended(NamedTuple):
    """One attempt that has ended, with its results or its error."""

    queue: MessageQueue
    outcome: Outcome
    results: Sequence[SendResult] = ()
    error: MQError | None = None


class OpenSend(msgspec.Struct):
    """A send between its first attempt and its end."""

    ready: Outgoing
    kind: SendKind
    info: PublishInfo
    begun: float
    deadline: float
    attempts: int = 0
    unanswered: int = 0
    waits: int = 0
    unsafe: Sequence[SendResult] = ()
    """Results that say stored, though not as safely as the broker's settings promise."""
    failures: list[FailedAttempt] = []


class Attempts:
    """Makes the attempts of all sends of one producer. Used on the session's event loop."""

    def __init__(
        self,
        session: Session,
        config: ProducerConfig,
        chooser: QueueChooser,
        routes: PublishRoutes,
        requests: SendRequests,
    ) -> None:
        self._session = session
        self._config = config
        self._chooser = chooser
        self._routes = routes
        self._requests = requests
        self._monotonic = session.clock.monotonic
        self._waits = routes.waits_for_masters
        self.statistics = SendStatistics()

    async def go_on(self, started: StartedSend, ready: Outgoing) -> Sequence[SendResult]:
        """Make the attempts after the first, which may have ended or not been made: one result for each message."""
        send = OpenSend(ready, started.kind, started.info, started.begun, started.deadline)
        queue = started.target.queue
        if started.ended is not None:
            longest = self._limits(send, queue.broker_name, started.begun)[1]
            ended = self._ended(send, queue, started.begun, started.seconds < 0.999 * longest, started.ended)
        else:
            if send.kind is not SendKind.SYNC and queue.broker_name not in send.info.addresses:
                send.info = await self._routes.refreshed(send.info, send.deadline)
            ended = await self._attempt(send, queue)
        while ended.outcome is not Outcome.OK:
            decision = self._decide(send, ended)
            if decision is Decision.RETURN:
                return _told(send.unsafe, send.unanswered)
            if decision is Decision.RAISE and not await self._may_go_on(send, ended.error):
                self.statistics.failed += 1
                cost_millis = (self._monotonic() - send.begun) * 1000
                raise SendFailed(ready.topic, tuple(send.failures), cost_millis) from ended.error
            send.info = self._routes.latest(ready.topic) or send.info
            if send.kind is SendKind.SYNC:
                queue = self._chooser.choose(send.info.queues, self._monotonic() * 1000, ended.queue.broker_name)
            self.statistics.further_attempts += 1
            ended = await self._attempt(send, queue)
        return _told(ended.results, send.unanswered)

    # --- one attempt ----------------------------------------------------------------------------------------------

    async def _attempt(self, send: OpenSend, queue: MessageQueue) -> Ended:
        begun = self._monotonic()
        seconds, longest = self._limits(send, queue.broker_name, begun)
        address = send.info.addresses.get(queue.broker_name)
        reply: Reply
        try:
            if address is None:
                raise BrokerNotFound(f"the route of {queue.topic} names no master of broker {queue.broker_name}")
            reply = await self._requests.ask(send.ready, send.kind, queue, address, seconds)
        except MQError as error:
            reply = error
        except asyncio.CancelledError:
            now = self._monotonic()
            self._chooser.attempt_ended(now * 1000, queue.broker_name, (now - begun) * 1000, Outcome.INTERRUPTED)
            self._requests.forget_given_up(address)
            raise
        return self._ended(send, queue, begun, seconds < longest, reply)

    def _limits(self, send: OpenSend, broker: str, begun: float) -> tuple[float, float]:
        """How many seconds an attempt may take, and how many if the strategy had learned no time-out."""
        per_attempt = self._config.attempt_timeout_seconds
        patience: float | None = None
        if send.kind is SendKind.SYNC and send.info.has_choice:
            patience = self._chooser.patience_millis(broker)
        if patience is None:
            seconds = attempt_timeout(begun, send.deadline, per_attempt)
            return seconds, seconds
        left = max(1, self._allowed(send.kind) - send.attempts)
        return (
            attempt_timeout(begun, send.deadline, per_attempt, patience / 1000, left),
            attempt_timeout(begun, send.deadline, per_attempt, inf, left),
        )

    def _ended(self, send: OpenSend, queue: MessageQueue, begun: float, is_early: bool, reply: Reply) -> Ended:
        """Take in the reply or error of an attempt, and tell the fault strategy."""
        results: Sequence[SendResult] = ()
        error = reply if isinstance(reply, MQError) else None
        if isinstance(reply, Command | SendResult):
            try:
                results = results_of(reply, send.ready, queue)
            except MQError as problem:
                error = problem
        outcome = self._outcome(results, error, is_early=is_early)
        now = self._monotonic()
        cost_millis = (now - begun) * 1000
        send.attempts += 1
        send.unanswered += outcome in UNANSWERED
        self.statistics.unanswered += outcome in UNANSWERED
        self.statistics.given_up += outcome is Outcome.GIVEN_UP
        send.unsafe = results or send.unsafe
        if send.kind is not SendKind.ONEWAY or error is not None:
            self._chooser.attempt_ended(now * 1000, queue.broker_name, cost_millis, outcome)
        if error is not None:
            send.failures.append(FailedAttempt(queue, cost_millis, error))
            self._session.refresh_soon(send.ready.topic)
        return Ended(queue, outcome, results, error)

    def _outcome(self, results: Sequence[SendResult], error: MQError | None, *, is_early: bool) -> Outcome:
        if error is None:
            return Outcome.OK if not results or results[0].status is SendStatus.SEND_OK else Outcome.NOT_STORE_OK
        if is_early and isinstance(error, RequestTimedOut):
            return Outcome.GIVEN_UP
        if self._waits and is_not_master(error):
            return Outcome.BROKER_ERROR
        return outcome_of_error(error)

    # --- what follows ---------------------------------------------------------------------------------------------

    def _allowed(self, kind: SendKind) -> int:
        config = self._config
        return attempts_allowed(kind, config.retry_times_when_send_failed, config.retry_times_when_send_async_failed)

    def _decide(self, send: OpenSend, ended: Ended) -> Decision:
        now = self._monotonic()
        allowed = self._allowed(send.kind)
        if send.kind is SendKind.ASYNC:
            return after_async_attempt(send.attempts, allowed, ended.outcome, now, send.deadline)
        code = ended.error.code if isinstance(ended.error, BrokerError) else None
        if self._waits and is_not_master(ended.error):
            code = int(ResponseCode.SERVICE_NOT_AVAILABLE)
        return after_attempt(
            send.attempts,
            allowed,
            ended.outcome,
            code,
            now,
            send.deadline,
            self._config.retry_another_broker_when_not_store_ok,
            has_result=bool(send.unsafe),
        )

    async def _may_go_on(self, send: OpenSend, error: MQError | None) -> bool:
        """Wait for another route or for the next try; whether one is worth it, because a new master may come."""
        if not self._waits or send.kind is SendKind.ONEWAY or not may_have_moved(error):
            return False
        topic, is_refusal = send.ready.topic, isinstance(error, NoPermission)
        while True:
            latest = self._routes.latest(topic)
            if latest is not None and latest is not send.info:
                return True
            pause = LONGEST_PAUSE_SECONDS if is_refusal else FIRST_PAUSE_SECONDS * 2**send.waits
            left = send.deadline - self._monotonic() - LAST_ATTEMPT_SECONDS
            if left <= 0:
                return False
            send.waits += 1
            self.statistics.waits += 1
            has_changed = await self._session.route_change(topic, min(pause, LONGEST_PAUSE_SECONDS, left))
            if is_refusal and not has_changed:
                return False  # it is meant for this sender or topic: no master would decide otherwise
            if self._routes.latest(topic) is not None:
                return True


def _told(results: Sequence[SendResult], unanswered: int) -> Sequence[SendResult]:
    """The results of a send, with the number of attempts that may be duplicates."""
    return [structs.replace(result, unanswered=unanswered) for result in results] if unanswered else results
