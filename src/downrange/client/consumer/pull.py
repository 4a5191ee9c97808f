"""Reading queues one request at a time, for pull consumers of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Final, Self

from downrange.client.config import ClientConfig
from downrange.client.consumer import offsets
from downrange.client.consumer.addresses import address_of
from downrange.client.consumer.messages import ReceivedMessage, read_pulled
from downrange.client.consumer.messages import wanted as with_wanted_tags
from downrange.client.consumer.rebalance import readable_queues
from downrange.client.errors import NoRoute
from downrange.client.namespace import wrap
from downrange.client.session import Session
from downrange.model.message import MessageQueue
from downrange.model.subscription import SUB_ALL, Subscription, subscribe
from downrange.model.topics import check_group_name
from downrange.protocol.bodies.pull import PullMessageRequest, PullMessageResponse, PullSysFlag
from downrange.protocol.bodies.routes import MASTER_ID
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import request
from downrange.protocol.errors import NoPermission, ServiceNotAvailable, SystemBusy
from downrange.transport.errors import TransportError

MAX_MESSAGES: Final = 32
"""Brokers give no more than this in one answer unless they are configured to."""
ANSWER_SECONDS: Final = 10.0
"""How long a broker may take, beside the time it was told to wait for a message."""


class PullStatus(StrEnum):
    """How a pull ended, in RocketMQ's words."""

    FOUND = "FOUND"
    NO_NEW_MSG = "NO_NEW_MSG"
    NO_MATCHED_MSG = "NO_MATCHED_MSG"
    OFFSET_ILLEGAL = "OFFSET_ILLEGAL"
    """The offset lies outside the queue: `next_offset` is the nearest inside."""


STATUS_OF_CODE: Final = {
    int(ResponseCode.SUCCESS): PullStatus.FOUND,
    int(ResponseCode.PULL_NOT_FOUND): PullStatus.NO_NEW_MSG,
    int(ResponseCode.PULL_RETRY_IMMEDIATELY): PullStatus.NO_MATCHED_MSG,
    int(ResponseCode.PULL_OFFSET_MOVED): PullStatus.OFFSET_ILLEGAL,
}


@dataclass(frozen=True, slots=True)
class PullResult:
    """The messages of one pull, the offset to go on from, and how far the queue reached at that moment.

    `messages` may be empty although the status is FOUND: the broker compares hashes of tags, the client their texts.
    """

    status: PullStatus
    messages: Sequence[ReceivedMessage]
    next_offset: int
    min_offset: int
    max_offset: int


class PullConsumer:
    """Reads single queues for a group, on one event loop. The caller keeps the offsets and decides what to read next.

    `async with PullConsumer("group", "host:9876") as consumer: await consumer.pull(queue, offset)`. It does not join
    the group: members that share the work are LitePullConsumer and PushConsumer. A session that was passed in is not
    closed.
    """

    def __init__(
        self,
        group: str,
        namesrv: str | ClientConfig | None = None,
        *,
        session: Session | None = None,
        namespace: str = "",
    ) -> None:
        check_group_name(group)
        self.namespace = namespace
        self.group = wrap(namespace, group)
        self._owns_session = session is None
        self.session = session or Session(ClientConfig.of(namesrv))
        self._suggested: dict[MessageQueue, int] = {}

    def __repr__(self) -> str:
        return f"<PullConsumer {self.group} {self.session!r}>"

    async def __aenter__(self) -> Self:
        self.session.start()  # keeps the routes fresh
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections, if they are this consumer's own."""
        if self._owns_session:
            await self.session.close()

    # --- queues ---------------------------------------------------------------------------------------------------

    async def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """The queues of a topic that may be read, sorted as all clients sort them; raises NoRoute."""
        name = wrap(self.namespace, topic)
        queues = readable_queues(name, await self.session.follow(name))
        if not queues:
            raise NoRoute(topic, f"the topic {topic} has no queue that may be read at the moment")
        return queues

    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        max_messages: int = MAX_MESSAGES,
        *,
        wait: float = 0,
        subscription: Subscription | str = SUB_ALL,
        is_lite: bool = False,
    ) -> PullResult:
        """The messages from `offset` on. When there is none, the broker waits up to `wait` seconds for the next one.

        `subscription` is a tag expression (`A || B`), or anything `subscribe` makes.
        """
        wanted = subscribe(queue.topic, subscription) if isinstance(subscription, str) else subscription
        flags = PullSysFlag.SUBSCRIPTION
        if wait > 0:
            flags |= PullSysFlag.SUSPEND
        if is_lite:
            flags |= PullSysFlag.LITE_PULL
        header = PullMessageRequest(
            consumer_group=self.group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            queue_offset=offset,
            max_msg_nums=max_messages,
            sys_flag=flags,
            commit_offset=0,
            suspend_timeout_millis=int(wait * 1000),
            subscription=wanted.expression,
            sub_version=wanted.version,
            expression_type=wanted.expression_type,
            bname=queue.broker_name,
        )
        broker = await address_of(self.session, queue, self._suggested.get(queue, MASTER_ID))
        command = request(RequestCode.PULL_MESSAGE, header)
        try:
            reply = await self.session.invoke(broker.address, command, wait + ANSWER_SECONDS, STATUS_OF_CODE)
        except (TransportError, ServiceNotAvailable, NoPermission, SystemBusy):
            self.session.refresh_soon(queue.topic)  # the broker may have moved, or be the master no more
            self._suggested.pop(queue, None)
            raise
        answer = reply.header(PullMessageResponse)
        self._suggested[queue] = answer.suggest_which_broker_id
        status = STATUS_OF_CODE[reply.code]
        messages: Sequence[ReceivedMessage] = ()
        if status is PullStatus.FOUND:
            found = read_pulled(
                reply.body_bytes,
                queue,
                min_offset=answer.min_offset,
                max_offset=answer.max_offset,
                offset_delta=answer.offset_delta or 0,
                namespace=self.namespace,
            )
            messages = with_wanted_tags(found, wanted)
        return PullResult(status, messages, answer.next_begin_offset, answer.min_offset, answer.max_offset)

    # --- offsets --------------------------------------------------------------------------------------------------

    async def committed(self, queue: MessageQueue) -> int | None:
        """Where the group goes on in a queue; None when it has never committed.

        Brokers answer 0 for a young queue, one whose first message is still there, though nothing was committed.
        """
        return await offsets.committed_offset(self.session, self.group, queue)

    async def commit(self, queue: MessageQueue, offset: int) -> None:
        """Let the group go on at `offset`: that of the last message done, plus one."""
        await offsets.commit_offset(self.session, self.group, queue, offset)

    async def min_offset(self, queue: MessageQueue) -> int:
        """The offset of the oldest message that is still there."""
        return await offsets.min_offset(self.session, queue)

    async def max_offset(self, queue: MessageQueue) -> int:
        """The offset the next message will get."""
        return await offsets.max_offset(self.session, queue)

    async def offset_at(self, queue: MessageQueue, timestamp: int) -> int:
        """The first message stored at `timestamp` (milliseconds since 1970) or later, as the broker finds it.

        A 4.9 broker answers with the nearest message, and with the last one when all are older.
        """
        return await offsets.offset_by_time(self.session, queue, timestamp)
