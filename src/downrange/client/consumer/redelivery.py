"""Sends failed messages where they will be delivered again."""

from __future__ import annotations

import logging
import random

from downrange.client.consumer.addresses import address_of, find_address
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.retry import SEND_BACK_TIMEOUT_SECONDS, retry_send_request, send_back_request
from downrange.client.errors import NoRoute
from downrange.client.producer.publish_info import publish_info
from downrange.client.producer.send_result import STATUS_OF_CODE
from downrange.client.session import Session
from downrange.model.errors import MQError
from downrange.model.topics import retry_topic

log = logging.getLogger(__name__)


class Redelivery:
    """The ways back into the queue for one group. `limit` is how often a message may come again."""

    def __init__(self, session: Session, group: str, limit: int) -> None:
        self._session = session
        self._group = group
        self._limit = limit

    async def deliver_again(self, message: ReceivedMessage, delay_level: int) -> bool:
        """Send back to the broker that stored it, else send it to the retry topic. False: neither worked."""
        try:
            target = await address_of(self._session, message.queue)
            command = send_back_request(message, self._group, delay_level, self._limit)
            await self._session.invoke(target.address, command, SEND_BACK_TIMEOUT_SECONDS)
        except MQError as error:
            log.warning("message not sent back message=%s group=%s reason=%s", message, self._group, error)
            return await self.send_to_retry_topic(message, message.reconsume_times + 1)
        return True

    async def make_dead_letter(self, message: ReceivedMessage) -> bool:
        """Tell a broker that the message was delivered more often than allowed: it makes a dead letter of it."""
        return await self.send_to_retry_topic(
            message, message.reconsume_times + 1, min(message.reconsume_times, self._limit)
        )

    async def send_to_retry_topic(self, message: ReceivedMessage, times: int, limit: int | None = None) -> bool:
        """Send the message as a new one that says how often it was delivered; any broker of the retry topic will do."""
        topic = retry_topic(self._group)
        try:
            route = self._session.known_route(topic) or await self._session.follow(topic)
            queue = random.choice(publish_info(topic, route).queues)  # noqa: S311  spreads load, guards nothing
            target = find_address(route, queue.broker_name)
            if target is None or not target.is_master:
                raise NoRoute(topic, f"no master of {queue.broker_name} at the moment")
            command = retry_send_request(
                message,
                self._group,
                queue,
                times=times,
                limit=self._limit if limit is None else limit,
                now_millis=self._session.clock.now(),
            )
            await self._session.invoke(target.address, command, SEND_BACK_TIMEOUT_SECONDS, STATUS_OF_CODE)
        except MQError as error:
            log.warning("message not sent to the retry topic message=%s reason=%s", message, error)
            return False
        return True
