"""The push consumer for code without an event loop."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Coroutine, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from downrange.client import background_loop
from downrange.client.config import ClientConfig
from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.listener import OnBatch, OnMessage
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.push import AsyncPushConsumer
from downrange.client.errors import ClientClosed
from downrange.client.producer.request_reply import ReplyMessage
from downrange.model.message import MessageQueue
from downrange.model.subscription import SUB_ALL

T = TypeVar("T")


class PushConsumer:
    """`AsyncPushConsumer` with calls that wait.

    `with PushConsumer("group", "host:9876") as consumer: consumer.subscribe("topic"); for message in consumer: …`, or
    with a callback: a plain function runs in threads of its own, an async one on the background thread. Any thread may
    use one consumer; several may iterate. A copy in the child of a fork is not started: make a new one there.
    """

    def __init__(
        self,
        group: str,
        namesrv: str | ClientConfig | None = None,
        config: ConsumerConfig | None = None,
        *,
        on_message: OnMessage | None = None,
        on_batch: OnBatch | None = None,
    ) -> None:
        self.config = config or ConsumerConfig()
        self.group = group
        self._client_config = ClientConfig.of(namesrv)
        self._on_message = on_message
        self._on_batch = on_batch
        self._opening = threading.Lock()
        self._process_id = os.getpid()
        self._background: background_loop.BackgroundLoop | None = None
        self._early: list[tuple[str, str, str | None]] = []
        # Wrong arguments are told by the line that gave them.
        self._consumer = self._make()

    def __repr__(self) -> str:
        return f"<PushConsumer {self._consumer!r}>"

    def _make(self) -> AsyncPushConsumer:
        return AsyncPushConsumer(
            self.group, self._client_config, self.config, on_message=self._on_message, on_batch=self._on_batch
        )

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Join the group and begin to consume; `with` does this. Returns after the queues were shared out once."""
        with self._opening:
            if self._background is not None or self._process_id != os.getpid():
                raise ClientClosed(f"the consumer {self.group} was started before; make a new one")
            self._background, _ = background_loop.open_client(self._open())
        return self

    async def _open(self) -> None:
        self._consumer = self._make()
        for topic, expression, sql in self._early:
            await self._consumer.subscribe(topic, expression, sql=sql)
        await self._consumer.start()

    def drain(self, timeout: float | None = None) -> bool:
        """Pull and begin nothing more, wait for the callbacks that run, commit; whether all ended in time.

        Messages that were pulled and not begun are left to the next consumer of the queue.
        """
        return self._run(lambda consumer: consumer.drain(timeout))

    def close(self, timeout: float | None = None) -> None:
        """Drain, give the queues to other members, and leave the group.

        Waits at most `timeout` seconds for callbacks. The background thread ends with the last client of the process.
        """
        with self._opening:
            background = self._background
            if background is None or self._process_id != os.getpid():
                return
            self._background = None
            background_loop.close_client(background, self._consumer.close(timeout))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- consuming ------------------------------------------------------------------------------------------------

    def subscribe(self, topic: str, expression: str = SUB_ALL, *, sql: str | None = None) -> None:
        """Consume a topic: messages with tags of `A || B`, or messages that an SQL92 expression matches.

        Replaces an earlier subscription to the topic. All members of a group must have equal subscriptions. May be
        called before `start` and on a running consumer, where the change takes effect within a moment.
        """
        with self._opening:
            if self._background is None:
                self._early.append((topic, expression, sql))
                return
        self._run(lambda consumer: consumer.subscribe(topic, expression, sql=sql))

    def unsubscribe(self, topic: str) -> None:
        """Consume a topic no more."""
        self._run(lambda consumer: consumer.unsubscribe(topic))

    def pause(self) -> None:
        """Pull nothing more for now; what was pulled is still consumed."""
        self._running().call_soon(self._consumer.pause)

    def resume(self) -> None:
        """Pull again after `pause`."""
        self._running().call_soon(self._consumer.resume)

    @property
    def queues(self) -> Collection[MessageQueue]:
        """The queues this consumer holds now."""
        return self._consumer.queues

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """The messages one by one. Asking for the next says that the one before is done."""
        self._running()
        messages = aiter(self._consumer)
        try:
            while True:
                try:
                    message = self._run(lambda _: messages.__anext__())
                except StopAsyncIteration:
                    return
                yield message
        finally:
            background = self._background
            if background is not None:  # a loop that is left gives its message back
                background.run(messages.aclose())

    def later(self, message: ReceivedMessage, delay_level: int = 0) -> None:
        """Say in a loop over messages that this one could not be handled: it is delivered again, after a delay."""

        async def call(consumer: AsyncPushConsumer) -> None:
            consumer.later(message, delay_level)

        self._run(call)

    def reply(self, request: ReceivedMessage, body: bytes | ReplyMessage) -> bool:
        """Answer a message that was sent with `request`; whether the client that asked has the answer.

        For loops and for callbacks that are not coroutines. False when the client is gone or waits no longer: then a
        further delivery would not help. Raises NotARequest when nobody asked, and SendFailed when no broker took the
        reply.
        """
        return self._run(lambda consumer: consumer.reply(request, body))

    # --- the loop behind it ---------------------------------------------------------------------------------------

    def _running(self) -> background_loop.BackgroundLoop:
        background = self._background
        if background is None or self._process_id != os.getpid():
            raise ClientClosed(f"the consumer {self.group} is not started, or was started before a fork, or is closed")
        return background

    def _run(self, call: Callable[[AsyncPushConsumer], Coroutine[Any, Any, T]]) -> T:
        return self._running().run(call(self._consumer))
