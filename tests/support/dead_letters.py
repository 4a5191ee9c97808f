"""Messages a group gave up on, made through a real broker."""

from __future__ import annotations

import asyncio
from typing import Final

from downrange import Message
from downrange.client.consumer.pull import PullConsumer
from downrange.client.consumer.retry import DEAD_LETTER, send_back_request
from downrange.client.errors import NoRoute
from downrange.client.producer.producer import AsyncProducer
from downrange.client.session import Session
from downrange.model.topics import dlq_topic
from downrange.testing import EmbeddedBroker

GROUP: Final = "billing"


async def give_up(mq: EmbeddedBroker, session: Session, *messages: Message) -> None:
    """Send messages, read them as GROUP, and send each back as one that can never be handled."""
    producer = AsyncProducer("testing", session=session)
    consumer = PullConsumer(GROUP, session=session)
    await producer.start()
    for message in messages:
        result = await producer.send(message)
        (received,) = (await consumer.pull(result.queue, result.queue_offset, 1)).messages
        await session.invoke(mq.address, send_back_request(received, GROUP, DEAD_LETTER, 16))
    await producer.close()
    await dead_letters_are_known(session)


async def dead_letters_are_known(session: Session) -> None:
    """A broker tells the name server of a topic for dead letters right after it made it, but does not wait for that."""
    async with asyncio.timeout(30):
        while True:
            try:
                await session.look_up_route(dlq_topic(GROUP))
            except NoRoute:
                await asyncio.sleep(0.005)
            else:
                return
