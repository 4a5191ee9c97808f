"""What tests ask of servers in other processes, over one connection each; nothing is retried or balanced here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from downrange.model.message import StoredMessage
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import request
from downrange.transport.pool import connect
from tests.support.broker_client import BrokerClient

SECONDS = 10.0


@asynccontextmanager
async def connected(address: str, client_id: str = "test@1") -> AsyncIterator[BrokerClient]:
    connection = await connect(address)
    try:
        yield BrokerClient(connection, client_id)
    finally:
        await connection.drain(1)


async def create_topic(broker: BrokerClient, topic: str, queues: int) -> None:
    fields = {
        "topic": topic,
        "defaultTopic": "TBW102",
        "readQueueNums": queues,
        "writeQueueNums": queues,
        "perm": 6,
        "topicFilterType": "SINGLE_TAG",
    }
    await broker.call(RequestCode.UPDATE_AND_CREATE_TOPIC, fields)


async def wait_for_route(namesrv: BrokerClient, topic: str) -> None:
    """Until the name server knows the topic: a broker registers what it creates right away, but not at once."""
    asked = request(RequestCode.GET_ROUTEINFO_BY_TOPIC, ext_fields={"topic": topic})
    async with asyncio.timeout(SECONDS):
        while (await namesrv.connection.request(asked, SECONDS)).code == ResponseCode.TOPIC_NOT_EXIST:
            await asyncio.sleep(0.02)


async def max_offset(broker: BrokerClient, topic: str, queue_id: int) -> int:
    reply = await broker.call(RequestCode.GET_MAX_OFFSET, {"topic": topic, "queueId": queue_id})
    return int(reply.ext_fields["offset"])


async def drain(broker: BrokerClient, topic: str, queues: int) -> list[StoredMessage]:
    """Every message of a topic, queue by queue, from the first to the last."""
    messages: list[StoredMessage] = []
    for queue_id in range(queues):
        end = await max_offset(broker, topic, queue_id)
        offset = 0
        while offset < end:
            found, header = await broker.pull(topic, queue_id=queue_id, offset=offset)
            assert header.next_begin_offset > offset, f"{topic} {queue_id}: no way past offset {offset} of {end}"
            messages += found
            offset = header.next_begin_offset
    return messages
