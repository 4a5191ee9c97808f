"""All attempts of one send: the first without detours, the others as `client/producer/retry.py` decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from downrange.client.config import ProducerConfig
from downrange.client.errors import BrokerNotFound, FailedAttempt, SendFailed
from downrange.client.producer.exchange import Exchange, results_of
from downrange.client.producer.fault import Outcome, QueueChooser
from downrange.client.producer.first_attempt import FirstAttempt
from downrange.client.producer.messages import Outgoing
from downrange.client.producer.plain_sends import PlainSends
from downrange.client.producer.preparation import Preparation
from downrange.client.producer.publish_info import PublishInfo
from downrange.client.producer.publish_routes import PublishRoutes
from downrange.client.producer.retry import (
    Decision,
    SendKind,
    after_async_attempt,
    after_attempt,
    attempt_timeout,
    attempts_allowed,
    outcome_of_error,
)
from downrange.client.producer.send_result import SendResult, SendStatus
from downrange.client.session import Session
from downrange.clock import SystemClock
from downrange.compiled import steps
from downrange.model.errors import MQError
from downrange.model.hashing import java_hash
from downrange.model.message import Message, MessageQueue
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError
from downrange.transport.outstanding import Waiter

Selector = Callable[[Sequence[MessageQueue], Message], MessageQueue]
"""Picks the queue of an ordered message out of all that may be written, whose order is the same for every producer."""

_OK: Final = Outcome.OK
_SYNC: Final = SendKind.SYNC
_GIVEN: Final = SendKind.SYNC_GIVEN_QUEUE


class Delivery:
    """Brings what one producer sends to its brokers.

    Nearly every send is stored by its first attempt, so that one is made without a task, a timer or a list of its own.
    Any thread may call `first` and `ended`; the rest belongs to the session's loop.
    """

    def __init__(
        self,
        session: Session,
        config: ProducerConfig,
        chooser: QueueChooser,
        routes: PublishRoutes,
        exchange: Exchange,
        preparation: Preparation,
    ) -> None:
        self.exchange = exchange
        self._ready = preparation.ready
        self._plain: PlainSends | None = None
        if (
            steps is not None
            and exchange.is_plain
            and not chooser.learns
            and config.attempt_timeout_seconds is None
            and isinstance(session.clock, SystemClock)
        ):
            self._plain = PlainSends(session, config, preparation, chooser, routes, exchange)
        self._session = session
        self._config = config
        self._chooser = chooser
        self._routes = routes
        self._monotonic = session.clock.monotonic

    # --- the first attempt ----------------------------------------------------------------------------------------

    def begin(
        self,
        message: Message,
        queue: MessageQueue | None,
        selector: Selector | None,
        timeout: float | None,
        waiter: Waiter,
    ) -> FirstAttempt | None:
        """The first attempt of a message; `waiter` gets the reply if the broker could be asked without waiting.

        None when the route is not known, and with hooks or signatures. Raises MessageError.
        """
        if self._plain is not None and queue is None and selector is None:
            first = self._plain.ask(message, timeout, waiter)
            if first is not None:  # nearly always
                return first
        exchange = self.exchange
        if not exchange.is_plain:
            return None
        ready = self._ready(message)
        first = self.first(ready, queue, selector, timeout)
        if first is not None:
            try:  # `ask`, without a call more
                if not exchange.ask_now(ready, first.queue, first.address, waiter, first.seconds):
                    first.is_unasked = True
            except MQError as error:
                first.ended = error
                first.is_unasked = True
        return first

    def ask(self, first: FirstAttempt, waiter: Waiter) -> None:
        """Make the first attempt, if it takes no waiting."""
        try:
            asked = self.exchange.ask_now(first.ready, first.queue, first.address, waiter, first.seconds)
            first.is_unasked = not asked
        except MQError as error:  # a frame too large
            first.ended = error
            first.is_unasked = True

    def first(
        self, ready: Outgoing, queue: MessageQueue | None, selector: Selector | None, timeout: float | None
    ) -> FirstAttempt | None:
        """Where a message goes first, and until when; None without a known route, and with hooks or signatures."""
        info = self._routes.known(ready.topic)
        if info is None or not self.exchange.is_plain:
            return None
        config = self._config
        given = queue
        if queue is not None or selector is not None or ready.messages[0].sharding_key:
            given = _given_queue(ready, info, queue, selector)
        begun = self._monotonic()
        seconds = config.send_timeout_seconds if timeout is None else timeout
        deadline = begun + seconds
        if config.attempt_timeout_seconds is not None or seconds < 0:
            seconds = attempt_timeout(begun, deadline, config.attempt_timeout_seconds)
        chosen = given or self._chooser.choose(info.queues, begun * 1000)
        address = info.addresses.get(chosen.broker_name)
        kind = _SYNC if given is None else _GIVEN
        return FirstAttempt(ready, kind, info, chosen, begun, deadline, seconds, address)

    def ended(self, first: FirstAttempt, outcome: Outcome = _OK) -> None:
        """Learn from the first attempt; not for one that `all` goes on with."""
        chooser = self._chooser
        if chooser.learns:
            now = self._monotonic()
            chooser.attempt_ended(now * 1000, first.queue.broker_name, (now - first.begun) * 1000, outcome)

    # --- all attempts ---------------------------------------------------------------------------------------------

    async def all(
        self,
        ready: Outgoing,
        kind: SendKind,
        queue: MessageQueue | None,
        selector: Selector | None,
        timeout: float | None,
        first: FirstAttempt | None = None,
    ) -> Sequence[SendResult]:
        """One result for each message. `first` may have been made before: then queue, selector and time-out are its."""
        config = self._config
        monotonic = self._monotonic
        ended: Command | MQError | None = None
        if first is not None:
            kind, info, deadline, begun, ended = first.kind, first.info, first.deadline, first.begun, first.ended
            started = begun
            chosen: MessageQueue | None = first.queue
        else:
            begun = started = monotonic()
            deadline = started + (config.send_timeout_seconds if timeout is None else timeout)
            known = self._routes.known(ready.topic)
            if known is None:
                known = await self._routes.find(ready.topic, deadline)
                begun = monotonic()
            info = known
            chosen = _given_queue(ready, info, queue, selector)
            if chosen is not None and kind is SendKind.SYNC:
                kind = SendKind.SYNC_GIVEN_QUEUE
        if chosen is not None and kind is not SendKind.SYNC and chosen.broker_name not in info.addresses:
            info = await self._routes.refreshed(info, deadline)
            begun = monotonic()
        failures: list[FailedAttempt] = []
        unsafe: Sequence[SendResult] = ()
        last_broker: str | None = None
        number = 0
        while True:
            number += 1
            if chosen is None:
                chosen = self._chooser.choose(info.queues, begun * 1000, last_broker)
            results: Sequence[SendResult] = ()
            error: MQError | None = None
            try:
                reply: Command | SendResult | MQError | None = ended
                if reply is None:
                    address = info.addresses.get(chosen.broker_name)
                    if address is None:
                        raise BrokerNotFound(
                            f"the route of {ready.topic} names no master of broker {chosen.broker_name}"
                        )
                    seconds = attempt_timeout(begun, deadline, config.attempt_timeout_seconds)
                    reply = await self.exchange.reply(ready, kind, chosen, address, seconds)
                ended = None
                if isinstance(reply, MQError):
                    raise reply
                if reply is not None:
                    results = results_of(reply, ready, chosen)
                outcome = Outcome.OK if not results or results[0].status is SendStatus.SEND_OK else Outcome.NOT_STORE_OK
            except MQError as problem:
                error = problem
                outcome = outcome_of_error(problem)
            except asyncio.CancelledError:
                now = monotonic()
                self._chooser.attempt_ended(now * 1000, chosen.broker_name, (now - begun) * 1000, Outcome.INTERRUPTED)
                self.exchange.forget_given_up(info.addresses.get(chosen.broker_name))
                raise
            now = monotonic()
            cost_millis = (now - begun) * 1000
            if kind is not SendKind.ONEWAY or error is not None:
                self._chooser.attempt_ended(now * 1000, chosen.broker_name, cost_millis, outcome)
            if outcome is Outcome.OK:
                return results
            begun = now  # of the next attempt, if there is one
            if error is not None:
                failures.append(FailedAttempt(chosen, cost_millis, error))
            unsafe = results or unsafe
            decision = self._what_next(kind, number, outcome, error, now, deadline, has_result=bool(unsafe))
            if error is not None:
                self._session.refresh_soon(ready.topic)
            if decision is Decision.RETURN:
                return unsafe
            if decision is Decision.RAISE:
                raise SendFailed(ready.topic, tuple(failures), (now - started) * 1000) from error
            last_broker = chosen.broker_name
            info = self._routes.known(ready.topic) or info
            if decision is Decision.RETRY:
                chosen = None

    def _what_next(
        self,
        kind: SendKind,
        number: int,
        outcome: Outcome,
        error: MQError | None,
        now: float,
        deadline: float,
        *,
        has_result: bool,
    ) -> Decision:
        config = self._config
        allowed = attempts_allowed(kind, config.retry_times_when_send_failed, config.retry_times_when_send_async_failed)
        if kind is SendKind.ASYNC:
            return after_async_attempt(number, allowed, outcome, now, deadline)
        return after_attempt(
            number,
            allowed,
            outcome,
            error.code if isinstance(error, BrokerError) else None,
            now,
            deadline,
            config.retry_another_broker_when_not_store_ok,
            has_result=has_result,
        )


def _given_queue(
    ready: Outgoing, info: PublishInfo, queue: MessageQueue | None, selector: Selector | None
) -> MessageQueue | None:
    """The one queue this message must go to, if the caller or its sharding key says so."""
    message = ready.messages[0]
    if queue is not None:
        return MessageQueue(ready.topic, queue.broker_name, queue.queue_id)
    if selector is not None:
        chosen = selector([each._replace(topic=message.topic) for each in info.queues], message)
        return MessageQueue(ready.topic, chosen.broker_name, chosen.queue_id)
    if message.sharding_key:
        return info.queues[abs(java_hash(message.sharding_key)) % len(info.queues)]
    return None
