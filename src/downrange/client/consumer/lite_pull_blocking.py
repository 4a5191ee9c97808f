"""The lite pull consumer for code without an event loop."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from downrange.client import background_loop
from downrange.client.config import ClientConfig
from downrange.client.consumer.lite_pull import AsyncLitePullConsumer
from downrange.client.consumer.lite_pull_config import LitePullConfig
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.errors import ClientClosed
from downrange.model.message import MessageQueue
from downrange.model.subscription import SUB_ALL

T = TypeVar("T")


class LitePullConsumer:
    """`AsyncLitePullConsumer` with calls that wait.

    `with LitePullConsumer("group", "host:9876") as consumer: consumer.subscribe("topic")`, then `for message in
    consumer` or `consumer.poll()`. One thread at a time may use it; `close` may be called by another. It fetches on the
    thread in the background that all blocking clients of a process share, and does not survive a fork: make a new one
    in the child.
    """

    def __init__(
        self, group: str, namesrv: str | ClientConfig | None = None, config: LitePullConfig | None = None
    ) -> None:
        self.config = config or LitePullConfig()
        self._group = group
        self._client_config = ClientConfig.of(namesrv)
        self._process_id = os.getpid()
        self._background: background_loop.BackgroundLoop | None = None
        self._consumer: AsyncLitePullConsumer | None = None
        self._closing = threading.Lock()
        self._in_hand: deque[ReceivedMessage] = deque()
        # Wrong arguments are told by the line that gave them.
        AsyncLitePullConsumer(group, self._client_config, self.config)

    def __repr__(self) -> str:
        return f"<LitePullConsumer {self._consumer!r}>" if self._consumer else f"<LitePullConsumer {self._group}>"

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Begin to work; `with` does this. A consumer starts once."""
        if self._consumer is not None:
            raise ClientClosed(f"the consumer {self._group} was started before; make a new one")
        self._background, self._consumer = background_loop.open_client(self._open())
        return self

    async def _open(self) -> AsyncLitePullConsumer:
        return await AsyncLitePullConsumer(self._group, self._client_config, self.config).start()

    def close(self, *, last_are_done: bool = True) -> None:
        """Stop fetching, commit, and leave the group, so that other members go on where this consumer was.

        The messages handed out last count as done unless `last_are_done` is false. Messages that a loop did not get to
        are left to the next consumer of their queue. Without `auto_commit` nothing is committed.
        """
        with self._closing:
            background, consumer = self._background, self._consumer
            if background is None or consumer is None or self._process_id != os.getpid():
                return
            self._background = None
            rest = list(self._in_hand)

            async def close() -> None:
                consumer.give_back(rest)
                await consumer.close(last_are_done=last_are_done)

            background_loop.close_client(background, close())

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A message that made the block fail was not handled.
        self.close(last_are_done=error is None)

    # --- calls of AsyncLitePullConsumer ---------------------------------------------------------------------------

    def subscribe(self, topic: str, expression: str = SUB_ALL, *, sql: str | None = None) -> None:
        """Read a topic together with the other members: all of it, tags `A || B`, or messages that `sql` matches.

        Returns when the first share of queues is held, as far as brokers can be reached; more come and go as members
        do. A topic that does not exist yet is looked for until it does.
        """
        self._run(lambda consumer: consumer.subscribe(topic, expression, sql=sql))

    def unsubscribe(self, topic: str) -> None:
        """Give the queues of a topic to the other members."""
        self._run(lambda consumer: consumer.unsubscribe(topic))

    def assign(self, queues: Iterable[MessageQueue], expression: str = SUB_ALL, *, sql: str | None = None) -> None:
        """Read exactly these queues, whatever other consumers read. Replaces an earlier assignment."""
        self._run(lambda consumer: consumer.assign(queues, expression, sql=sql))

    @property
    def assignment(self) -> frozenset[MessageQueue]:
        """The queues this consumer reads now."""
        return self._call(lambda consumer: consumer.assignment)

    def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """The queues of a topic that may be read."""
        return self._run(lambda consumer: consumer.queues(topic))

    def poll(self, timeout: float | None = None, max_messages: int | None = None) -> list[ReceivedMessage]:
        """Wait for the next messages of one queue, in order; an empty list when none came within `timeout` seconds.

        The call also says that the messages handed out before are done. Raises when a broker refuses to serve a queue.
        """
        return self._run(lambda consumer: consumer.poll(timeout, max_messages))

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Message after message, without end; leave the loop with `break`, or close the consumer."""
        while self._background is not None:
            # A batch at a time: a call to the other thread costs as much as ten messages.
            self._in_hand.extend(self.poll())
            while self._in_hand:
                yield self._in_hand.popleft()

    def commit(self) -> None:
        """Commit everything handed out so far and wait for the answer of the brokers; raises CommitFailed."""
        self._run(lambda consumer: consumer.commit())

    def committed(self, queue: MessageQueue) -> int | None:
        """The offset that the group has committed for a queue; None when there is none."""
        return self._run(lambda consumer: consumer.committed(queue))

    def min_offset(self, queue: MessageQueue) -> int:
        """The offset of the oldest message of a queue."""
        return self._run(lambda consumer: consumer.min_offset(queue))

    def max_offset(self, queue: MessageQueue) -> int:
        """The offset of the next message that arrives in a queue."""
        return self._run(lambda consumer: consumer.max_offset(queue))

    def position(self, queue: MessageQueue) -> int:
        """The offset of the message that `poll` hands out next for a queue."""
        return self._call(lambda consumer: consumer.position(queue))

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Go on at this offset of a queue."""
        self._run(lambda consumer: consumer.seek(queue, offset))

    def seek_to_begin(self, queue: MessageQueue) -> None:
        """Go on with the oldest message of the queue."""
        self._run(lambda consumer: consumer.seek_to_begin(queue))

    def seek_to_end(self, queue: MessageQueue) -> None:
        """Go on with the next message that arrives in the queue."""
        self._run(lambda consumer: consumer.seek_to_end(queue))

    def seek_to_time(self, queue: MessageQueue, timestamp: int) -> None:
        """Go on with the messages of a queue stored at this time, in milliseconds since 1970, or later."""
        self._run(lambda consumer: consumer.seek_to_time(queue, timestamp))

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Fetch nothing more from these queues for now."""
        self._call(lambda consumer: consumer.pause(queues))

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        """Fetch again from queues that were paused."""
        self._call(lambda consumer: consumer.resume(queues))

    # --- the loop behind it ---------------------------------------------------------------------------------------

    def _run(self, call: Callable[[AsyncLitePullConsumer], Coroutine[Any, Any, T]]) -> T:
        background, consumer = self._background, self._consumer
        if self._process_id != os.getpid():
            raise ClientClosed(f"the consumer {self._group} was made before a fork: make a new one in the child")
        if background is None or consumer is None:
            state = "not started" if consumer is None else "closed"
            raise ClientClosed(f"the consumer {self._group} is {state}")
        rest = list(self._in_hand)
        self._in_hand.clear()

        async def work() -> T:
            # Messages that an abandoned iteration still has go back first: positions must not count them as read.
            consumer.give_back(rest)
            return await call(consumer)

        return background.run(work())

    def _call(self, call: Callable[[AsyncLitePullConsumer], T]) -> T:
        async def once(consumer: AsyncLitePullConsumer) -> T:
            return call(consumer)

        return self._run(once)
