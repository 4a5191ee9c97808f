"""Reading a queue of one broker as the tools do: nothing is committed, and the topic needs no route.

Topics of the broker itself (delayed, timed and half messages) are read in this way.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from downrange.client.brokers import Broker, reachable
from downrange.client.consumer.messages import ReceivedMessage, read_pulled
from downrange.client.session import Session
from downrange.model.message import MessageQueue
from downrange.model.subscription import SUB_ALL
from downrange.model.topics import TOOLS_GROUP
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.offsets import OffsetResponse, QueryConsumerOffsetRequest
from downrange.protocol.bodies.pull import PullMessageRequest, PullMessageResponse, PullSysFlag
from downrange.protocol.bodies.statistics import TopicOffset, TopicStats
from downrange.protocol.bodies.topics import TopicRequest
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import request
from downrange.protocol.errors import QueryNotFound, TopicNotExist

MAX_MESSAGES = 32


@dataclass(frozen=True, slots=True)
class Pulled:
    """The records of one pull, where to go on, and the reach of the queue at that moment."""

    queue: MessageQueue
    records: bytes
    next_offset: int
    min_offset: int
    max_offset: int

    @property
    def messages(self) -> list[ReceivedMessage]:
        return read_pulled(self.records, self.queue, min_offset=self.min_offset, max_offset=self.max_offset)


async def pull_from(
    session: Session, broker: Broker, queue: MessageQueue, offset: int, max_messages: int = MAX_MESSAGES
) -> Pulled:
    """One pull at `offset`; without messages when there is none, or when the offset lies outside the queue."""
    header = PullMessageRequest(
        consumer_group=TOOLS_GROUP,
        topic=queue.topic,
        queue_id=queue.queue_id,
        queue_offset=offset,
        max_msg_nums=max_messages,
        sys_flag=PullSysFlag.SUBSCRIPTION,
        commit_offset=0,
        suspend_timeout_millis=0,
        subscription=SUB_ALL,
        sub_version=0,
        bname=queue.broker_name,
    )
    reply = await session.invoke(
        reachable(broker).address,
        request(RequestCode.PULL_MESSAGE, header),
        accept=(
            ResponseCode.SUCCESS,
            ResponseCode.PULL_NOT_FOUND,
            ResponseCode.PULL_RETRY_IMMEDIATELY,
            ResponseCode.PULL_OFFSET_MOVED,
        ),
    )
    answer = reply.header(PullMessageResponse)
    records = reply.body_bytes if reply.code == ResponseCode.SUCCESS else b""
    return Pulled(queue, records, answer.next_begin_offset, answer.min_offset, answer.max_offset)


async def read_between(
    session: Session, broker: Broker, queue: MessageQueue, begin: int, end: int
) -> AsyncIterator[ReceivedMessage]:
    """The messages from offset `begin` up to `end`, as far as they are still there."""
    at = begin
    while at < end:
        pulled = await pull_from(session, broker, queue, at)
        for message in pulled.messages:
            if message.queue_offset < end:
                yield message
        if pulled.next_offset <= at:
            return
        at = pulled.next_offset


async def reach(session: Session, broker: Broker, topic: str) -> dict[MessageQueue, TopicOffset]:
    """The offsets of every queue of a topic on one broker; none when the broker does not have the topic."""
    try:
        reply = await session.ask(broker, request(RequestCode.GET_TOPIC_STATS_INFO, TopicRequest(topic)))
    except TopicNotExist:
        return {}
    return decode_body(TopicStats, reply.body_bytes).offset_table


async def committed_at(session: Session, broker: Broker, group: str, queue: MessageQueue) -> int | None:
    """The committed offset of a group on one broker; None when there is none."""
    header = QueryConsumerOffsetRequest(
        consumer_group=group, topic=queue.topic, queue_id=queue.queue_id, bname=queue.broker_name
    )
    try:
        reply = await session.ask(broker, request(RequestCode.QUERY_CONSUMER_OFFSET, header))
    except QueryNotFound:
        return None
    offset = reply.header(OffsetResponse).offset
    return offset if offset >= 0 else None
