"""The way of a send: where it goes, its first attempt, and the attempts after that.

    aim ─▶ ask, over the event loop's connection; or encode, and blocking/ asks over the thread's own
               ├─▶ stored: the SendResult
               └─▶ anything else: go_on (attempts.py), until the message is stored or the time is up

Nearly every send is stored by its first attempt, so that one is made without a task, a timer or a list of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from downrange.client.config import ProducerConfig
from downrange.client.producer.attempts import Attempts
from downrange.client.producer.fault import Outcome, QueueChooser
from downrange.client.producer.outgoing import SEND, Outgoing, Target, make_send
from downrange.client.producer.preparation import Preparation
from downrange.client.producer.publish_info import PublishInfo
from downrange.client.producer.publish_routes import PublishRoutes
from downrange.client.producer.retry import SendKind, attempt_timeout, attempts_allowed
from downrange.client.producer.send_requests import SendRequests
from downrange.client.producer.send_result import Expected, SendResult
from downrange.client.producer.started_send import Aim, Destination, Selector, StartedSend
from downrange.client.session import Session
from downrange.model.hashing import java_hash
from downrange.model.message import Message, MessageQueue
from downrange.protocol.command import Command
from downrange.protocol.errors import LocalProtocolError
from downrange.transport.errors import TransportClosed
from downrange.transport.outstanding import Waiter

_SYNC: Final = SendKind.SYNC
_GIVEN: Final = SendKind.SYNC_GIVEN_QUEUE
_ONEWAY: Final = SendKind.ONEWAY
_REMEMBERED: Final = 10_000  # topics


class Delivery:
    """Brings what one producer sends to its brokers.

    Any thread may call `aim`, `encode` and `learn`; all else belongs to the session's event loop.
    """

    def __init__(
        self,
        session: Session,
        config: ProducerConfig,
        chooser: QueueChooser,
        routes: PublishRoutes,
        requests: SendRequests,
        preparation: Preparation,
    ) -> None:
        self.requests = requests
        self.new_future: Callable[[], asyncio.Future[Command | SendResult]] = requests.new_future
        """Makes the waiter of a coroutine for `ask`."""
        self._session = session
        self._config = config
        self._chooser = chooser
        self._routes = routes
        self._preparation = preparation
        self._destinations: dict[str, Destination] = {}
        self._oneway_targets: dict[Target, Target] = {}
        # Looked up for every send.
        self._connection = session.connection_known
        self._monotonic = session.clock.monotonic
        self._nanoseconds = preparation.nanoseconds
        self._ids = preparation.ids
        self._rules = preparation.rules
        self.learns = chooser.learns
        """Whether `learn` must be called for every first attempt."""
        self._next_index = chooser.next_index
        self._seconds = float(config.send_timeout_seconds)
        self._attempt_seconds = config.attempt_timeout_seconds
        self._first_seconds = attempt_timeout(0.0, self._seconds, self._attempt_seconds)
        self._most_attempts = attempts_allowed(_SYNC, config.retry_times_when_send_failed)
        self._attempts = Attempts(session, config, chooser, routes, requests)
        self.statistics = self._attempts.statistics

    # --- the first attempt ----------------------------------------------------------------------------------------

    def aim(
        self,
        message: Message,
        queue: MessageQueue | None,
        selector: Selector | None,
        timeout: float | None,
        kind: SendKind = _SYNC,
    ) -> Aim | None:
        """Choose the queue of the first attempt. None when the route is not known, with hooks, and with signatures."""
        if type(message) is not Message:  # replies and forwarded messages have requests of their own kind
            return None
        there = self._destinations.get(message.topic)
        if there is None or there[0] != self._session.route_changes:
            there = self._destination(message.topic)
            if there is None:
                return None
        _, topic, info, targets, by_queue = there
        begun = self._monotonic()
        patience: float | None = None
        if queue is None and selector is None and not message.sharding_key:
            if self.learns:
                target = by_queue[self._chooser.choose(info.queues, begun * 1000)]
                if kind is _SYNC:
                    patience = self._patience(info, target.queue.broker_name)
            else:
                target = targets[self._next_index(topic) % len(targets)]
        elif message.sharding_key and type(message.sharding_key) is not str:
            return None  # making the request raises the error
        else:
            given = _given_queue(message, info, queue, selector)
            assert given is not None
            target = by_queue.get(given) or self._target(info, given)
            if kind is _SYNC:
                kind = _GIVEN
        deadline = begun + (self._seconds if timeout is None else timeout)
        if patience is not None:
            seconds = attempt_timeout(begun, deadline, self._attempt_seconds, patience, self._most_attempts)
        elif timeout is None:
            seconds = self._first_seconds
        else:
            seconds = attempt_timeout(begun, deadline, self._attempt_seconds)
        return message, kind, info, target, begun, deadline, seconds

    def _patience(self, info: PublishInfo, broker: str) -> float | None:
        """How many seconds to wait for `broker` before another is asked; None while no other could be."""
        if not info.has_choice:
            return None
        millis = self._chooser.patience_millis(broker)
        return None if millis is None else millis / 1000

    def encode(self, started: StartedSend, opaque: int) -> tuple[bytes, Expected]:
        """The frame of the first attempt, and what is known of its result.

        Raises MessageError, and LocalProtocolError when the frame is too large.
        """
        topic, month, target = started.info.topic, self._ids.month, started.target
        started.ready, frame, expected = make_send(
            started.message, topic, month, self._nanoseconds(), self._rules, target, opaque
        )
        return frame, expected

    def ask(self, aim: Aim, waiter: Waiter) -> Outgoing | None:
        """Make the first attempt if the broker can be asked without waiting: returns the request, else None.

        Then `waiter` gets the reply: a SendResult when the message was stored, else a Command. Raises MessageError.
        """
        message, _, info, target, _, _, seconds = aim
        connection = self._connection(target[1])  # type: ignore[arg-type]  # None is no key
        opaque = None if connection is None else connection.opaque_if_room()
        if connection is None or opaque is None:
            return None
        try:
            ready, frame, expected = make_send(
                message, info.topic, self._ids.month, self._nanoseconds(), self._rules, target, opaque
            )
            connection.ask_encoded(opaque, frame, waiter, SEND, seconds, expected)
        except (LocalProtocolError, TransportClosed):  # `go_on` makes the attempt again, and a list of its errors
            return None
        return ready

    def tell(self, aim: Aim) -> bool:
        """Send one-way if that takes no waiting, and whether it did; raises MessageError."""
        message, _, info, target, _, _, _ = aim
        connection = self._connection(target[1])  # type: ignore[arg-type]  # None is no key
        if connection is None or not connection.is_writable:
            return False
        opaque, month = connection.next_opaque(), self._ids.month
        target = self._oneway_target(target)
        try:
            _, frame, _ = make_send(message, info.topic, month, self._nanoseconds(), self._rules, target, opaque)
            connection.oneway_encoded(frame)
        except LocalProtocolError:
            return False
        return True

    def learn(self, target: Target, begun: float, outcome: Outcome = Outcome.OK) -> None:
        """Tell the fault strategy how a first attempt ended; `go_on` does so for the sends it is called for."""
        if self.learns:
            now = self._monotonic()
            self._chooser.attempt_ended(now * 1000, target.queue.broker_name, (now - begun) * 1000, outcome)

    def _destination(self, topic: str) -> Destination | None:
        changes = self._session.route_changes  # before the route is looked at, which may change meanwhile
        on_wire = self._preparation.known_wire_topic(topic)
        info = None if on_wire is None else self._routes.known(on_wire)
        if on_wire is None or info is None or not self.requests.is_plain:
            return None
        targets = tuple(self._target(info, queue) for queue in info.queues)
        if len(self._destinations) >= _REMEMBERED:
            self._destinations.clear()
        by_queue = dict(zip(info.queues, targets, strict=True))
        there = self._destinations[topic] = Destination(changes, on_wire, info, targets, by_queue)
        return there

    def _target(self, info: PublishInfo, queue: MessageQueue) -> Target:
        pieces = self.requests.template(info.topic, queue.broker_name, SEND).pieces
        return Target(queue, info.addresses.get(queue.broker_name), pieces)

    def _oneway_target(self, target: Target) -> Target:
        found = self._oneway_targets.get(target)
        if found is None:
            if len(self._oneway_targets) >= _REMEMBERED:
                self._oneway_targets.clear()
            template = self.requests.template(target.queue.topic, target.queue.broker_name, SEND)
            found = self._oneway_targets[target] = target._replace(pieces=template.oneway_pieces)
        return found

    # --- all attempts ---------------------------------------------------------------------------------------------

    async def deliver(
        self,
        ready: Outgoing,
        kind: SendKind,
        queue: MessageQueue | None,
        selector: Selector | None,
        timeout: float | None,
    ) -> Sequence[SendResult]:
        """Make all attempts, the first included: one result for each message of the request."""
        begun = self._monotonic()
        deadline = begun + (self._config.send_timeout_seconds if timeout is None else timeout)
        info = self._routes.known(ready.topic)
        if info is None:
            info = await self._routes.find(ready.topic, deadline)
        message = ready.messages[0]
        chosen = _given_queue(message, info, queue, selector)
        if chosen is None:
            chosen = self._chooser.choose(info.queues, self._monotonic() * 1000)
        elif kind is _SYNC:
            kind = _GIVEN
        return await self.go_on(StartedSend(message, kind, info, Target(chosen, None, ()), begun, deadline, 0.0, ready))

    async def go_on(self, started: StartedSend) -> Sequence[SendResult]:
        """Make the attempts after the first, which may have ended or not been made: one result for each message."""
        return await self._attempts.go_on(started, started.ready or self._preparation.ready(started.message))


def _given_queue(
    message: Message, info: PublishInfo, queue: MessageQueue | None, selector: Selector | None
) -> MessageQueue | None:
    """The one queue a message must go to, if the caller or its sharding key says so."""
    if queue is not None:
        return MessageQueue(info.topic, queue.broker_name, queue.queue_id)
    if selector is not None:
        chosen = selector([each._replace(topic=message.topic) for each in info.queues], message)
        return MessageQueue(info.topic, chosen.broker_name, chosen.queue_id)
    if message.sharding_key:
        return info.queues[abs(java_hash(message.sharding_key)) % len(info.queues)]
    return None
