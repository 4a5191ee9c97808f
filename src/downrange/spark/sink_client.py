"""The connection of a worker process to the cluster, kept for all its tasks and for the driver's commits."""

from __future__ import annotations

import os
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from downrange.client import background_loop
from downrange.client.admin.messages import MessageAdmin
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.errors import NoRoute
from downrange.client.producer.producer import AsyncProducer
from downrange.client.producer.transaction_producer import AsyncTransactionProducer, HalfSent, LocalTransactionState
from downrange.client.session import Session
from downrange.model.errors import MessageError
from downrange.spark.delivery import Level, verdict
from downrange.spark.markers import AskedMarkers, Markers
from downrange.spark.sink_options import SinkOptions
from downrange.spark.sink_rows import ATTEMPT_PROPERTY, ROW_PROPERTY, RowKey

T = TypeVar("T")


class SinkClient:
    """One producer and the markers, on the background thread of this process.

    At the transactional level every such process answers questions of brokers about half messages of its group.
    """

    def __init__(self, options: SinkOptions) -> None:
        self.options = options
        self._background = background_loop.hold()
        self._background.run(self._open())

    async def _open(self) -> None:
        options = self.options
        self.session = Session(options.client_config())
        self.messages = MessageAdmin(self.session)
        config = options.producer_config()
        if options.delivery_level is Level.TRANSACTIONAL:
            topics = (options.marker_topic, *((options.topic,) if options.topic else ()))
            self.producer: AsyncProducer = AsyncTransactionProducer(
                options.producer_group, config=config, session=self.session, check=self.check, topics=topics
            )
        else:
            self.producer = AsyncProducer(options.producer_group, config=config, session=self.session)
        self.markers = Markers(options.marker_topic, self.producer, self.messages)
        self._asked = AskedMarkers(self.markers, self.session.clock)
        await self.producer.start()

    @property
    def transactions(self) -> AsyncTransactionProducer:
        assert isinstance(self.producer, AsyncTransactionProducer), "half messages below the transactional level"
        return self.producer

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the background thread and wait for it. Called in Spark's thread."""
        return self._background.run(work)

    async def check(self, message: ReceivedMessage) -> LocalTransactionState:
        """Answer a broker that asks how the transaction of a half message ended, by the markers."""
        properties = message.properties
        token = properties.get(ATTEMPT_PROPERTY)
        if token is None:
            raise MessageError(
                f"the half message {message.message_id} was not sent by the Spark sink: "
                f"its group {self.options.producer_group} must be used by this sink only"
            )
        row = RowKey.parse(properties.get(ROW_PROPERTY, ""))
        of_batch, newest = await self._asked.get(row.query, row.batch)
        state = verdict(of_batch, newest, row.batch, token, self.session.clock.now())
        if state is LocalTransactionState.COMMIT and not await self._is_half(message.topic, message.message_id):
            # A broker that asked before made a copy and asks about the copy, too. The message was delivered already.
            return LocalTransactionState.ROLLBACK
        return state

    async def is_half(self, sent: HalfSent) -> bool:
        """Whether a half message has not become a message yet, according to the brokers of its topic."""
        return await self._is_half(sent.topic, sent.transaction_id)

    async def _is_half(self, topic: str, message_id: str) -> bool:
        try:
            found = await self.messages.all_by_unique_key(topic, message_id)
        except NoRoute:
            return True  # the topic does not exist, so no half message of it was committed
        for error in found.failed.values():
            raise error
        return not any(found.done.values())

    def close(self) -> None:
        async def end() -> None:
            await self.producer.close()
            await self.session.close()

        try:
            self.run(end())
        finally:
            background_loop.let_go(self._background)


_clients: Final[dict[tuple[int, SinkOptions], SinkClient]] = {}


def client_of(options: SinkOptions) -> SinkClient:
    """The client of this process for these options; a forked process makes its own."""
    key = (os.getpid(), options)
    client = _clients.get(key)
    if client is None:
        client = _clients[key] = SinkClient(options)
    return client


def close_clients() -> None:
    """For tests: a worker process ends with its clients."""
    for key in [key for key in _clients if key[0] == os.getpid()]:
        _clients.pop(key).close()
