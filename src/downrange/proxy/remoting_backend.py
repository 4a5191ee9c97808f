"""Brokers asked over the remoting protocol: the one beside us, or those of a whole cluster, ours or genuine."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, TypeVar

import msgspec

from downrange.client.errors import NoRoute
from downrange.client.session import Session
from downrange.model.errors import MQError
from downrange.model.message_id import parse_offset_message_id
from downrange.model.properties import POP_CK, find_property
from downrange.model.record import CorruptRecord, decode_records
from downrange.model.topics import SubscriptionGroupConfig, TopicConfig
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.groups import ConsumerData, GroupRequest
from downrange.protocol.bodies.pop import (
    NORMAL,
    AckMessageRequest,
    ChangeInvisibleTimeRequest,
    ChangeInvisibleTimeResponse,
    NotificationRequest,
    NotificationResponse,
    PopMessageRequest,
    PopMessageResponse,
    ReceiptHandle,
    read_offset_info,
    read_order_count_info,
)
from downrange.protocol.bodies.routes import MASTER_ID, TopicRouteData
from downrange.protocol.bodies.send import ConsumerSendMessageBackRequest, SendMessageRequest, SendMessageResponse
from downrange.protocol.bodies.timer import RecallMessageRequest, RecallMessageResponse
from downrange.protocol.bodies.topics import TopicRequest
from downrange.protocol.bodies.transactions import EndTransactionRequest
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command, request
from downrange.protocol.errors import (
    BrokerError,
    RequestCodeNotSupported,
    SubscriptionGroupNotExist,
    TopicNotExist,
)
from downrange.proxy.backend import HalfMessage, Outgoing, PoppedMessage, Sent
from downrange.proxy.errors import Refused
from downrange.proxy.message_types import MIXED, UNSPECIFIED
from downrange.proxy.wire.enums import Code
from downrange.transport.errors import TransportError

log = logging.getLogger(__name__)

T = TypeVar("T")

MESSAGE_TYPE: Final = "message.type"
_REMEMBERED_SECONDS: Final = 10.0
_MOST_REMEMBERED: Final = 10_000
_STORED: Final = (
    ResponseCode.SUCCESS,
    ResponseCode.FLUSH_DISK_TIMEOUT,
    ResponseCode.SLAVE_NOT_AVAILABLE,
    ResponseCode.FLUSH_SLAVE_TIMEOUT,
)
_POLLING_FULL: Final = 209
_POLLING_TIMEOUT: Final = 210
_NOTHING: Final = (ResponseCode.SUCCESS, ResponseCode.PULL_NOT_FOUND, _POLLING_FULL, _POLLING_TIMEOUT)
_BURY: Final = -1


class _Remembered(Generic[T]):
    """Answers that are used again for some seconds."""

    def __init__(self, ask: Callable[[str], Awaitable[T]], now: Callable[[], float]) -> None:
        self._ask = ask
        self._now = now
        self._known: dict[str, tuple[float, T]] = {}

    async def get(self, name: str) -> T:
        known = self._known.get(name)
        now = self._now()
        if known is not None and now - known[0] < _REMEMBERED_SECONDS:
            return known[1]
        answer = await self._ask(name)
        if len(self._known) >= _MOST_REMEMBERED:
            self._known.clear()
        self._known[name] = (now, answer)
        return answer


class RemotingBackend:
    """A client session as the backend of the gRPC service."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._types = _Remembered(self._ask_type, session.clock.monotonic)
        self._groups = _Remembered(self._ask_group, session.clock.monotonic)
        self._addresses: dict[str, str] = {}
        """The master of each broker name, as far as it was seen in a route."""
        self._consumers: dict[str, ConsumerData] = {}

    # --- topics and groups --------------------------------------------------------------------------------------

    async def route(self, topic: str) -> TopicRouteData:
        route = await self.session.route(topic)
        for data in route.broker_datas:
            if (address := data.broker_addrs.get(MASTER_ID)) is not None:
                self._addresses[data.broker_name] = address
            else:
                self._addresses.pop(data.broker_name, None)
        return route

    async def topic_type(self, topic: str) -> str:
        return await self._types.get(topic)

    async def _ask_type(self, topic: str) -> str:
        try:
            address = await self._some_broker(topic)
            reply = await self.session.invoke(address, request(RequestCode.GET_TOPIC_CONFIG, TopicRequest(topic)))
        except (NoRoute, TopicNotExist):
            return UNSPECIFIED
        except RequestCodeNotSupported:  # a broker of 4.x: its topics have no types
            return MIXED
        attributes = decode_body(TopicConfig, reply.body_bytes).attributes or {}
        return attributes.get(MESSAGE_TYPE, "NORMAL")

    async def group(self, group: str) -> SubscriptionGroupConfig | None:
        return await self._groups.get(group)

    async def _ask_group(self, group: str) -> SubscriptionGroupConfig | None:
        if not self._addresses:
            for broker in await self.session.masters():
                if broker.address:
                    self._addresses[broker.name] = broker.address
        for address in sorted(set(self._addresses.values())):
            try:
                reply = await self.session.invoke(
                    address, request(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, GroupRequest(group))
                )
            except (SubscriptionGroupNotExist, RequestCodeNotSupported):
                continue
            return decode_body(SubscriptionGroupConfig, reply.body_bytes)
        return None

    async def _some_broker(self, topic: str) -> str:
        for data in (await self.route(topic)).broker_datas:
            if (address := data.broker_addrs.get(MASTER_ID)) is not None:
                return address
        raise NoRoute(topic, f"no master serves the topic {topic}")

    async def _ask(self, broker_name: str, command: Command, timeout: float | None = None, **accept: Any) -> Command:
        address = self._addresses.get(broker_name)
        if address is None:
            address = (await self.session.broker(broker_name)).address
            self._addresses[broker_name] = address
        try:
            return await self.session.invoke(address, command, timeout, **accept)
        except TransportError:
            self._addresses.pop(broker_name, None)  # it may be elsewhere by now
            raise

    # --- messages -----------------------------------------------------------------------------------------------

    async def send(self, topic: str, message: Outgoing) -> Sent:
        queue = message.queue
        header = SendMessageRequest(
            producer_group=topic,
            topic=topic,
            queue_id=queue.queue_id,
            sys_flag=message.sys_flag,
            born_timestamp=message.born_timestamp,
            properties=message.properties,
            bname=queue.broker_name,
        )
        command = request(RequestCode.SEND_MESSAGE_V2, header, body=message.body)
        reply = await self._ask(queue.broker_name, command, accept=_STORED)
        stored = reply.header(SendMessageResponse)
        return Sent(
            reply.code,
            stored.queue_offset,
            parse_offset_message_id(stored.msg_id).physical_offset,
            stored.recall_handle or "",
        )

    async def pop(self, broker_name: str, wanted: PopMessageRequest) -> list[PoppedMessage]:
        now = msgspec.structs.replace(wanted, born_time=self.session.clock.now())  # a pop that is old is refused
        reply = await self._ask(broker_name, request(RequestCode.POP_MESSAGE, now), accept=_NOTHING)
        return popped(reply, broker_name) if reply.code == ResponseCode.SUCCESS else []

    async def wait(self, broker_name: str, wanted: PopMessageRequest, seconds: float) -> bool:
        header = NotificationRequest(
            consumer_group=wanted.consumer_group,
            topic=wanted.topic,
            queue_id=wanted.queue_id,
            poll_time=int(seconds * 1000),
            born_time=self.session.clock.now(),
            order=wanted.order,
            attempt_id=wanted.attempt_id,
        )
        command = request(RequestCode.NOTIFICATION, header)
        reply = await self._ask(broker_name, command, seconds + 5, accept=_NOTHING)
        found = reply.header(NotificationResponse)
        if found.polling_full:
            raise Refused(Code.TOO_MANY_REQUESTS, "polling full")
        return found.has_msg

    async def ack(self, topic: str, group: str, handle: ReceiptHandle) -> None:
        header = AckMessageRequest(
            consumer_group=group,
            topic=handle.source(topic, group),
            queue_id=handle.queue_id,
            extra_info=str(handle),
            offset=handle.offset,
        )
        await self._ask(handle.broker_name, request(RequestCode.ACK_MESSAGE, header))

    async def change_invisible(self, topic: str, group: str, handle: ReceiptHandle, millis: int) -> ReceiptHandle:
        header = ChangeInvisibleTimeRequest(
            consumer_group=group,
            topic=handle.source(topic, group),
            queue_id=handle.queue_id,
            extra_info=str(handle),
            offset=handle.offset,
            invisible_time=millis,
        )
        reply = await self._ask(handle.broker_name, request(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, header))
        return handle.changed(reply.header(ChangeInvisibleTimeResponse))

    async def bury(self, topic: str, group: str, handle: ReceiptHandle, log_offset: int, message_id: str) -> None:
        header = ConsumerSendMessageBackRequest(
            offset=log_offset,
            group=group,
            delay_level=_BURY,
            origin_msg_id=message_id,
            origin_topic=handle.source(topic, group),
            max_reconsume_times=0,
            bname=handle.broker_name,
        )
        await self._ask(handle.broker_name, request(RequestCode.CONSUMER_SEND_MSG_BACK, header))

    async def end_transaction(self, topic: str, half: HalfMessage, message_id: str, state: int, checked: bool) -> None:
        header = EndTransactionRequest(
            producer_group=topic,
            tran_state_table_offset=half.queue_offset,
            commit_log_offset=half.log_offset,
            commit_or_rollback=state,
            msg_id=message_id,
            from_transaction_check=checked,
            transaction_id=message_id,
            topic=topic,
            bname=half.broker_name,
        )
        await self._ask(half.broker_name, request(RequestCode.END_TRANSACTION, header))

    async def recall(self, topic: str, broker_name: str, handle: str) -> str:
        header = RecallMessageRequest(producer_group=topic, topic=topic, recall_handle=handle, bname=broker_name)
        reply = await self._ask(broker_name, request(RequestCode.RECALL_MESSAGE, header))
        return reply.header(RecallMessageResponse).msg_id

    # --- who is connected ---------------------------------------------------------------------------------------

    async def add_producer(self, topic: str) -> None:
        await self._follow(topic)
        self.session.heartbeats.add_producer(topic)

    async def remove_producer(self, topic: str) -> None:
        await self.session.heartbeats.remove_producer(topic)

    async def add_consumer(self, consumer: ConsumerData) -> None:
        for subscription in consumer.subscription_data_set:
            await self._follow(subscription.topic)
        group = consumer.group_name
        if self._consumers.get(group) != consumer:
            self._consumers[group] = consumer
            self.session.heartbeats.add_consumer(group, lambda: self._consumers[group])

    async def remove_consumer(self, group: str) -> None:
        await self.session.heartbeats.remove_consumer(group)
        self._consumers.pop(group, None)

    async def _follow(self, topic: str) -> None:
        """Let the brokers of a topic get heartbeats."""
        try:
            await self.route(topic)
            await self.session.follow(topic)
        except MQError as error:
            log.info("route not known topic=%s reason=%s", topic, error)


def popped(reply: Command, broker_name: str) -> list[PoppedMessage]:
    """The messages of the answer to a pop, with their handles."""
    header = reply.header(PopMessageResponse)
    starts = {(one.retry_flag, one.queue_id): one.offsets[0] for one in read_offset_info(header.start_offset_info)}
    counts = read_order_count_info(header.order_count_info)
    found = []
    try:
        records = list(decode_records(reply.body_bytes))
    except CorruptRecord as error:
        raise BrokerError(f"the broker {broker_name} answered with records that cannot be read: {error}") from None
    for record in records:
        own = find_property(record.properties_text, POP_CK)
        if own is not None:  # brokers put the handle into messages of a retry topic
            handle = ReceiptHandle.parse(own)
        else:
            start = starts.get((NORMAL, record.queue_id), record.queue_offset)
            handle = ReceiptHandle(
                start, header.pop_time, header.invisible_time, header.revive_qid, NORMAL, broker_name,
                record.queue_id, record.queue_offset,
            )  # fmt: skip
        before = record.reconsume_times
        if handle.is_orderly:
            before = counts.get(f"qo{record.queue_id}%{record.queue_offset}", counts.get(str(record.queue_id), before))
        found.append(PoppedMessage(record, handle, before))
    return found
