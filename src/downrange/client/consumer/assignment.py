"""What a push consumer should hold of a topic: its own count, or what brokers say (400), pull or pop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from downrange.client.consumer.addresses import address_of
from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.rebalance import readable_queues, route_of, share
from downrange.client.errors import NoRoute
from downrange.client.session import Session
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue
from downrange.protocol.bodies.body import decode_body, encode_body
from downrange.protocol.bodies.pop import POP, AssignmentBody, QueryAssignmentBody, QueueAssignment
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from downrange.protocol.errors import RequestCodeNotSupported

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Assigned:
    """What a member should hold of a topic: queues to pull and queues to pop, where -1 is all queues of a broker.

    Brokers in `silent` did not tell: what is held of them is kept.
    """

    pulled: Sequence[MessageQueue]
    popped: Sequence[MessageQueue] = ()
    silent: frozenset[str] = frozenset()


async def assigned(session: Session, group: str, topic: str, config: ConsumerConfig) -> Assigned:
    """What a push consumer should hold of a topic, by its own count or by that of brokers.

    Raises an MQError when that cannot be told now: then nothing should change.
    """
    if config.client_rebalance or config.is_broadcasting:
        return Assigned(await share(session, group, topic, config))
    route = await route_of(session, topic)
    names = sorted({queue.broker_name for queue in readable_queues(topic, route)})
    if not names:
        raise NoRoute(topic, f"the topic {topic} has no queue that may be read at the moment")
    try:
        answers = await asyncio.gather(*(_assigned_by(session, group, MessageQueue(topic, name, 0)) for name in names))
    except RequestCodeNotSupported:
        log.info("brokers do not share queues out, this consumer does group=%s topic=%s", group, topic)
        return Assigned(await share(session, group, topic, config))
    told = [one for answer in answers if answer is not None for one in answer]
    return Assigned(
        [one.message_queue for one in told if one.mode != POP],
        [one.message_queue for one in told if one.mode == POP],
        frozenset(name for name, answer in zip(names, answers, strict=True) if answer is None),
    )


async def _assigned_by(session: Session, group: str, place: MessageQueue) -> Sequence[QueueAssignment] | None:
    """What a broker says about its own queues (400); None when it cannot tell now.

    Brokers of RocketMQ answer for all brokers, by what they know of them; ours answer for themselves.
    """
    body = QueryAssignmentBody(topic=place.topic, consumer_group=group, client_id=session.client_id)
    command = request(RequestCode.QUERY_ASSIGNMENT, body=encode_body(body))
    try:
        address = (await address_of(session, place)).address
        found = await _ask_assignments(session, address, command)
        if found is None:  # the broker was restarted, or has not heard from us yet
            await session.heartbeats.beat()
            found = await _ask_assignments(session, address, command)
    except RequestCodeNotSupported:
        raise
    except MQError as error:
        log.info("assignment not known group=%s queue=%s reason=%s", group, place, error)
        session.refresh_soon(place.topic)
        return None
    if found is None:
        return None
    return [one for one in found if one.message_queue.broker_name == place.broker_name]


async def _ask_assignments(session: Session, address: str, command: Command) -> Sequence[QueueAssignment] | None:
    reply = await session.invoke(address, command)
    return decode_body(AssignmentBody, reply.body_bytes).message_queue_assignments if reply.body_bytes else None
