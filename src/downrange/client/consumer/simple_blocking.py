"""The simple consumer for code without an event loop."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

from downrange.client import background_loop
from downrange.client.config import ClientConfig
from downrange.client.consumer.pop.messages import PoppedMessage
from downrange.client.consumer.simple import AsyncSimpleConsumer
from downrange.client.consumer.simple_config import SimpleConsumerConfig
from downrange.client.errors import ClientClosed
from downrange.model.subscription import SUB_ALL, Subscription

T = TypeVar("T")


class SimpleConsumer:
    """`AsyncSimpleConsumer` with calls that wait.

    `with SimpleConsumer("group", "host:9876") as consumer: consumer.subscribe("topic")`, then `for message in
    consumer.receive(16, 30)` and `consumer.ack(message)`. Any number of threads may use one consumer at the same time.
    It works on the thread in the background that all blocking clients of a process share, and does not survive a fork:
    make a new one in the child.
    """

    def __init__(
        self, group: str, namesrv: str | ClientConfig | None = None, config: SimpleConsumerConfig | None = None
    ) -> None:
        self.config = config or SimpleConsumerConfig()
        self._group = group
        self._client_config = ClientConfig.of(namesrv)
        self._process_id = os.getpid()
        self._background: background_loop.BackgroundLoop | None = None
        self._consumer: AsyncSimpleConsumer | None = None
        self._opening = threading.Lock()
        # Wrong arguments are told by the line that gave them.
        AsyncSimpleConsumer(group, self._client_config, self.config)

    def __repr__(self) -> str:
        return f"<SimpleConsumer {self._consumer!r}>" if self._consumer else f"<SimpleConsumer {self._group}>"

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Join the group; `with` does this. A consumer starts once."""
        with self._opening:
            if self._consumer is not None:
                raise ClientClosed(f"the consumer {self._group} was started before; make a new one")
            self._background, self._consumer = background_loop.open_client(self._open())
        return self

    async def _open(self) -> AsyncSimpleConsumer:
        return await AsyncSimpleConsumer(self._group, self._client_config, self.config).start()

    def close(self) -> None:
        """Leave the group. A `receive` of another thread that waits ends, and returns nothing.

        Messages that were received and not acknowledged come again when their invisible duration is over.
        """
        with self._opening:
            background, consumer = self._background, self._consumer
            if background is None or consumer is None or self._process_id != os.getpid():
                return
            self._background = None
            background_loop.close_client(background, consumer.close())

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- calls of AsyncSimpleConsumer -----------------------------------------------------------------------------

    def subscribe(self, topic: str, expression: str = SUB_ALL, *, sql: str | None = None) -> None:
        """Receive messages of a topic: all of them, those with tags of `A || B`, or those that `sql` matches.

        Replaces an earlier subscription to the topic. All consumers of a group must have equal subscriptions. A topic
        that does not exist yet is looked for by `receive`.
        """
        self._run(lambda consumer: consumer.subscribe(topic, expression, sql=sql))

    def unsubscribe(self, topic: str) -> None:
        """Receive messages of a topic no more."""
        self._run(lambda consumer: consumer.unsubscribe(topic))

    @property
    def subscriptions(self) -> Collection[Subscription]:
        """What this consumer subscribes to."""
        return () if self._consumer is None else self._consumer.subscriptions

    def receive(
        self,
        max_message_num: int,
        invisible_duration: float | timedelta,
        await_duration: float | timedelta | None = None,
    ) -> list[PoppedMessage]:
        """Lease up to `max_message_num` messages for `invisible_duration`, seconds or a timedelta.

        Waits up to `await_duration` for a message; returns an empty list when none came. Topics and brokers take turns.
        Raises when a broker refuses, and when no broker could be asked all the time.
        """
        return self._run(lambda consumer: consumer.receive(max_message_num, invisible_duration, await_duration))

    def ack(self, message: PoppedMessage) -> None:
        """Tell the broker that a message is done, and wait for its answer; the message does not come again.

        Raises when no answer comes within `retry_seconds`; trying again does no harm. After the invisible duration the
        broker still answers, but the message comes again.
        """
        self._run(lambda consumer: consumer.ack(message))

    def ack_many(self, messages: Iterable[PoppedMessage]) -> None:
        """Tell brokers that messages are done, with one request to each; raises AckFailed, which lists the others."""
        self._run(lambda consumer: consumer.ack_many(messages))

    def change_invisible_duration(self, message: PoppedMessage, invisible_duration: float | timedelta) -> None:
        """Let a message come again so many seconds from now, unless it is acknowledged before; 0: at once.

        `message.receipt_handle` is replaced: copies of the old one are void.
        """
        self._run(lambda consumer: consumer.change_invisible_duration(message, invisible_duration))

    def forward_to_dead_letter_queue(self, message: PoppedMessage) -> None:
        """Give a message up: it goes to the dead letters of the group, and does not come again."""
        self._run(lambda consumer: consumer.forward_to_dead_letter_queue(message))

    # --- the loop behind it ---------------------------------------------------------------------------------------

    def _run(self, call: Callable[[AsyncSimpleConsumer], Coroutine[Any, Any, T]]) -> T:
        background, consumer = self._background, self._consumer
        if self._process_id != os.getpid():
            raise ClientClosed(f"the consumer {self._group} was made before a fork: make a new one in the child")
        if background is None or consumer is None:
            raise ClientClosed(f"the consumer {self._group} is {'not started' if consumer is None else 'closed'}")
        return background.run(call(consumer))
