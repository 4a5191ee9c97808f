"""A cluster for the driver: its queues, their offset ranges, and the committed offsets of a group."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine, Mapping
from typing import Any, TypeVar

from downrange.client.consumer.rebalance import readable_queues
from downrange.client.errors import NoRoute
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue
from downrange.model.record import decode_record
from downrange.model.subscription import SQL92, Subscription, subscribe
from downrange.model.topics import retry_topic
from downrange.protocol.bodies.body import decode_body, encode_body
from downrange.protocol.bodies.groups import (
    CheckClientBody,
    ConsumerData,
    ConsumeType,
    HeartbeatData,
    UnregisterClientRequest,
)
from downrange.protocol.bodies.offsets import (
    GetMaxOffsetRequest,
    OffsetResponse,
    QueryConsumerOffsetRequest,
    QueueRequest,
    UpdateConsumerOffsetRequest,
)
from downrange.protocol.bodies.routes import TopicList
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command, request
from downrange.protocol.errors import BrokerError, QueryNotFound
from downrange.spark.brokers import BrokerAway, Brokers
from downrange.spark.errors import OptionError
from downrange.spark.offsets import Offsets
from downrange.spark.options import SourceOptions
from downrange.spark.planner import Reach
from downrange.spark.worker_loop import WorkerLoop

log = logging.getLogger(__name__)

T = TypeVar("T")


class Cluster:
    """Asks name servers and brokers what a planner needs to know; blocks until they answer.

    Every `queues()` looks up topics, queues and brokers again, so that new ones are found.
    """

    def __init__(self, options: SourceOptions, loop: WorkerLoop) -> None:
        self._options = options
        self._loop = loop
        self._session = loop.session(options.client_config())
        self._brokers = Brokers(self._session, group=options.group)
        self._seen: dict[str, tuple[MessageQueue, ...]] = {}
        self._takes_bulk_pulls: dict[str, bool] = {}
        self._brokers_with_group: set[str] = set()

    def queues(self) -> list[MessageQueue]:
        self._loop.catch_up()
        return self._loop.run(self._queues())

    async def _queues(self) -> list[MessageQueue]:
        wanted = self._options.assigned
        topics = await self._topics()
        found = await _for_each(topics, self._queues_of)
        return [
            queue
            for topic in topics
            for queue in found[topic]
            if not wanted or queue.queue_id in wanted.get(topic, {}).get(queue.broker_name, ())
        ]

    async def _topics(self) -> list[str]:
        if self._options.subscribe_pattern is None:
            return list(self._options.topics or self._options.assigned)
        reply = await self._session.ask_namesrv(request(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER))
        return sorted(filter(self._options.matches, decode_body(TopicList, reply.body_bytes).topic_list))

    async def _queues_of(self, topic: str) -> tuple[MessageQueue, ...]:
        try:
            self._seen[topic] = readable_queues(topic, await self._session.follow(topic))
        except NoRoute:
            return ()
        except MQError as error:
            if topic not in self._seen:
                raise
            log.warning("route not refreshed topic=%s reason=%s", topic, error)
        return self._seen[topic]

    def reach(self, queues: Collection[MessageQueue], *, must_answer: bool) -> dict[MessageQueue, Reach]:
        async def ask(queue: MessageQueue) -> Reach | None:
            _, broker_name, queue_id = queue
            low = QueueRequest(topic=queue.topic, queue_id=queue_id, bname=broker_name)
            high = GetMaxOffsetRequest(topic=queue.topic, queue_id=queue_id, bname=broker_name)
            try:
                (minimum, is_first_of_slave), (maximum, is_last_of_slave) = await asyncio.gather(
                    self._offset(queue, request(RequestCode.GET_MIN_OFFSET, low)),
                    self._offset(queue, request(RequestCode.GET_MAX_OFFSET, high)),
                )
            except BrokerAway as error:
                if must_answer:
                    raise
                log.warning("queue cannot be read at present queue=%s reason=%s", queue, error)
                return None
            # For a queue that never had a message, RocketMQ's broker answers -1, or a minimum beyond the end.
            return Reach(max(0, min(minimum, maximum)), max(0, maximum), is_first_of_slave or is_last_of_slave)

        found = self._loop.run(_for_each(queues, ask))
        return {queue: there for queue, there in found.items() if there is not None}

    async def _offset(self, queue: MessageQueue, command: Command) -> tuple[int, bool]:
        """An offset, and whether a slave has told it."""
        reply, is_of_slave = await self._brokers.ask_any(queue, command)
        return reply.header(OffsetResponse).offset, is_of_slave

    def at_time(self, times: Mapping[MessageQueue, int], reach: Mapping[MessageQueue, Reach]) -> Offsets:
        """Found by bisection, because brokers themselves answer with the nearest message, before or after a time."""

        async def find(queue: MessageQueue) -> int:
            low, high = reach[queue].minimum, reach[queue].maximum
            while low < high:
                middle = (low + high) // 2
                stored = await self._store_time(queue, middle)
                if stored is not None and stored < times[queue]:
                    low = middle + 1
                else:
                    high = middle
            return low

        return self._loop.run(_for_each(times, find))

    async def _store_time(self, queue: MessageQueue, offset: int) -> int | None:
        pulled = await self._brokers.pull(queue, offset, 1)
        return decode_record(pulled.body).store_timestamp if pulled.code == ResponseCode.SUCCESS else None

    def committed(self, queues: Collection[MessageQueue]) -> Offsets:
        async def ask(queue: MessageQueue) -> int | None:
            header = QueryConsumerOffsetRequest(
                consumer_group=self._options.group,
                topic=queue.topic,
                queue_id=queue.queue_id,
                bname=queue.broker_name,
            )
            try:
                offset, _ = await self._offset(queue, request(RequestCode.QUERY_CONSUMER_OFFSET, header))
            except QueryNotFound:
                return None
            return offset if offset >= 0 else None

        found = self._loop.run(_for_each(queues, ask))
        return {queue: offset for queue, offset in found.items() if offset is not None}

    def commit(self, offsets: Offsets) -> None:
        """Commit the offsets of the group. A commit that fails is made up for by that of the next batch."""

        async def tell(queue: MessageQueue) -> None:
            header = UpdateConsumerOffsetRequest(
                consumer_group=self._options.group,
                topic=queue.topic,
                queue_id=queue.queue_id,
                commit_offset=offsets[queue],
                bname=queue.broker_name,
            )
            try:
                await self._brokers.ask(queue, request(RequestCode.UPDATE_CONSUMER_OFFSET, header))
            except MQError as error:
                log.warning("offset not committed group=%s queue=%s reason=%s", self._options.group, queue, error)

        self._loop.catch_up()
        self._loop.run(self._introduce_group(offsets))
        self._loop.run(_for_each(offsets, tell))

    async def _introduce_group(self, queues: Collection[MessageQueue]) -> None:
        """Make brokers create the group and its retry topic, without which operators' tools do not see the group.

        A broker creates them when a consumer says hello: so the driver does, once, and leaves again. Where the retry
        topic is already, a consumer may be online, whose subscriptions an empty hello would take away.
        """
        group = self._options.group
        news = {queue.broker_name: queue for queue in queues if queue.broker_name not in self._brokers_with_group}
        if not news:
            return
        try:
            route = await self._session.look_up_route(retry_topic(group))
            self._brokers_with_group.update(broker.broker_name for broker in route.broker_datas)
        except MQError as error:
            log.debug("retry topic not found group=%s reason=%s", group, error)
        hello = HeartbeatData(
            client_id=self._session.client_id,
            consumer_data_set=(ConsumerData(group_name=group, consume_type=ConsumeType.ACTIVELY),),
        )
        goodbye = UnregisterClientRequest(client_id=self._session.client_id, consumer_group=group)
        for broker_name, queue in news.items():
            if broker_name in self._brokers_with_group:
                continue
            try:
                await self._brokers.ask(queue, request(RequestCode.HEART_BEAT, body=encode_body(hello)))
                await self._brokers.ask(queue, request(RequestCode.UNREGISTER_CLIENT, goodbye))
                self._brokers_with_group.add(broker_name)
            except MQError as error:
                log.warning("group not introduced group=%s broker=%s reason=%s", group, broker_name, error)

    def bulk_brokers(self, queues: Collection[MessageQueue]) -> frozenset[str]:
        """The names of the brokers of `queues` that take bulk pulls. Each broker is asked until it answers once."""

        async def ask(queue: MessageQueue) -> None:
            try:
                self._takes_bulk_pulls[queue.broker_name] = await self._brokers.takes_bulk_pulls(queue)
            except MQError as error:  # a broker that refuses is not ours; one that is away is asked again
                log.info("broker gets no bulk pulls broker=%s reason=%s", queue.broker_name, error)

        names = {queue.broker_name: queue for queue in queues}
        self._loop.run(_for_each([one for name, one in names.items() if name not in self._takes_bulk_pulls], ask))
        return frozenset(name for name in names if self._takes_bulk_pulls.get(name))

    def check_filter(self, queues: Collection[MessageQueue]) -> None:
        """Ask a broker whether it can evaluate the SQL expression: pulls with a bad one would bring all messages."""
        if self._options.sql_filter is None or not queues:
            return
        queue = min(queues)
        body = CheckClientBody(
            client_id=self._session.client_id,
            group=self._options.group,
            subscription_data=subscription_of(self._options, queue.topic),
        )
        command = request(RequestCode.CHECK_CLIENT_CONFIG, body=encode_body(body))
        try:
            self._loop.run(self._brokers.ask(queue, command))
        except BrokerError as error:
            raise OptionError(f"sqlFilter={self._options.sql_filter}: {error.remark}") from None


def subscription_of(options: SourceOptions, topic: str) -> Subscription:
    if options.sql_filter is not None:
        return subscribe(topic, options.sql_filter, SQL92)
    return subscribe(topic, options.tags)


async def _for_each(items: Collection[T], ask: Any) -> dict[T, Any]:
    """Call `ask` for all items at the same time; return the results by item."""
    work: list[Coroutine[Any, Any, Any]] = [ask(item) for item in items]
    return dict(zip(items, await asyncio.gather(*work), strict=True))
