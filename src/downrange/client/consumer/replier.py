"""Answers to messages that were sent as requests."""

from __future__ import annotations

from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.retry import INNER_PRODUCER_GROUP
from downrange.client.producer.producer import AsyncProducer
from downrange.client.producer.request_reply import ReplyMessage, reply_to, send_reply
from downrange.client.session import Session


class Replier:
    """Sends the replies of one consumer, through a producer of its own that starts with the first of them."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._producer: AsyncProducer | None = None

    @property
    def is_started(self) -> bool:
        return self._producer is not None

    async def reply(self, request: ReceivedMessage, body: bytes | ReplyMessage) -> bool:
        """Answer a request by a producer that is started with the first answer; whether the asking client has it."""
        answer = body if isinstance(body, ReplyMessage) else reply_to(request, body)
        if self._producer is None:
            self._producer = AsyncProducer(INNER_PRODUCER_GROUP, session=self._session)
            await self._producer.start()
        return await send_reply(self._producer, answer, request.broker_name)

    async def close(self) -> None:
        if self._producer is not None:
            await self._producer.close()
