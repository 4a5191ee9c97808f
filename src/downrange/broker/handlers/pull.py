"""Pulls: 11, and 361 from 5.x lite consumers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

import msgspec

from downrange.broker.clients import Consumers
from downrange.broker.compiled_sql import compiled
from downrange.broker.delayed import stored_text
from downrange.broker.filter_data import ConsumerFilters
from downrange.broker.filtering import EVERYTHING, MessageFilter, group_filter, retry_filter, sql_filter, tag_filter
from downrange.broker.flow_control import FlowControl
from downrange.broker.groups import CommittedOffsets, Groups
from downrange.broker.held_pulls import HeldPulls
from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import MessageWriter
from downrange.broker.routes import RouteTable
from downrange.broker.sql.errors import SqlError
from downrange.broker.topics import Topics
from downrange.model import properties as names
from downrange.model.message import MessageQueue, TopicQueue
from downrange.model.message_id import pack_host
from downrange.model.subscription import SQL92, TAG, Subscription, subscribe
from downrange.model.topics import OFFSET_MOVED_TOPIC, RETRY_PREFIX, Perm, SubscriptionGroupConfig
from downrange.protocol.bodies.body import encode_body
from downrange.protocol.bodies.fields import encode_fields
from downrange.protocol.bodies.pull import (
    OffsetMovedEvent,
    PullMessageRequest,
    PullMessageResponse,
    PullSysFlag,
)
from downrange.protocol.codes import RequestCode, ResponseCode, SerializeType
from downrange.protocol.command import Command
from downrange.protocol.errors import (
    BrokerError,
    FilterDataNotExist,
    FilterDataNotLatest,
    NoPermission,
    SubscriptionGroupNotExist,
    SubscriptionNotExist,
    SubscriptionNotLatest,
    SubscriptionParseFailed,
    TopicNotExist,
)
from downrange.store.config import BrokerRole
from downrange.store.message_store import MessageStore
from downrange.store.new_message import NewMessage
from downrange.store.read_result import GetMessageStatus, ReadResult
from downrange.transport.connection import Connection
from downrange.transport.handler import LaterReply

FAQ: Final = "\nSee http://rocketmq.apache.org/docs/faq/ for further details."

# Plain numbers and a cache: every pull goes through here.
_READ = int(Perm.READ)
_subscription_of = lru_cache(maxsize=4096)(subscribe)
_COMMIT = int(PullSysFlag.COMMIT_OFFSET)
SUSPEND = int(PullSysFlag.SUSPEND)
_SUBSCRIPTION = int(PullSysFlag.SUBSCRIPTION)

# With these a pull got past something; with any other its offset lies outside the queue.
_SCANNED: Final = (GetMessageStatus.MESSAGE_WAS_REMOVING, GetMessageStatus.NO_MATCHED_MESSAGE)
# RocketMQ's slaves answer at once that the consumer should come again at once; it does, hundreds of times a second.
_OUT_OF_REACH_SECONDS: Final = 1.0

_CODES: Final = {
    GetMessageStatus.FOUND: ResponseCode.SUCCESS,
    GetMessageStatus.MESSAGE_WAS_REMOVING: ResponseCode.PULL_RETRY_IMMEDIATELY,
    GetMessageStatus.NO_MATCHED_MESSAGE: ResponseCode.PULL_RETRY_IMMEDIATELY,
    GetMessageStatus.OFFSET_FOUND_NULL: ResponseCode.PULL_NOT_FOUND,
    GetMessageStatus.OFFSET_OVERFLOW_ONE: ResponseCode.PULL_NOT_FOUND,
    GetMessageStatus.OFFSET_OVERFLOW_BADLY: ResponseCode.PULL_OFFSET_MOVED,
    GetMessageStatus.OFFSET_TOO_SMALL: ResponseCode.PULL_OFFSET_MOVED,
}
_REMARKS: Final = {status: status.value for status in GetMessageStatus}
_JSON = int(SerializeType.JSON)


def _fields(command: Command, numbers: tuple[int, int, int, int]) -> Mapping[str, str] | msgspec.Raw:
    """The header of a reply; as JSON text at once where it goes out as such: that takes a tenth of the time."""
    if command.serialize_type == _JSON:
        return msgspec.Raw(
            b'{"suggestWhichBrokerId":"%d","nextBeginOffset":"%d","minOffset":"%d","maxOffset":"%d"}' % numbers
        )
    suggested, next_offset, minimum, maximum = numbers
    return encode_fields(
        PullMessageResponse(
            suggest_which_broker_id=suggested, next_begin_offset=next_offset, min_offset=minimum, max_offset=maximum
        )
    )


class PullHandlers:
    """Hands messages to consumers."""

    def __init__(
        self,
        config: LiveConfig,
        topics: Topics,
        groups: Groups,
        offsets: CommittedOffsets,
        consumers: Consumers,
        filters: ConsumerFilters,
        store: MessageStore,
        held: HeldPulls,
        writer: MessageWriter,
        flow: FlowControl,
    ) -> None:
        self._config = config
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._consumers = consumers
        self._filters = filters
        self._store = store
        self.held = held
        self._writer = writer
        self._flow = flow

    @property
    def routes(self) -> RouteTable:
        return {RequestCode.PULL_MESSAGE: self.pull, RequestCode.LITE_PULL_MESSAGE: self.pull}

    def pull(self, command: Command, connection: Connection) -> Command | LaterReply:
        self._flow.check_pull()
        request = command.header(PullMessageRequest)
        try:
            group, wanted = self.agreed(request, connection)
        except BrokerError as error:
            return command.reply(error.code, error.remark, ext_fields={})
        reply, is_empty = self._read(command, request, group, wanted)
        self.commit(request, request.commit_offset)
        if not is_empty or not request.sys_flag & SUSPEND:
            return reply
        seconds = self.wait_seconds(request)
        if reply.code == ResponseCode.PULL_RETRY_IMMEDIATELY:
            seconds = min(seconds, _OUT_OF_REACH_SECONDS)
        return self.held.hold(
            TopicQueue(request.topic, request.queue_id),
            request.queue_offset,
            wanted,
            lambda: self._read(command, request, group, wanted)[0],
            connection,
            seconds,
        )

    # --- steps that plain pulls take, too -----------------------------------------------------------------------

    def agreed(
        self, request: PullMessageRequest, connection: Connection
    ) -> tuple[SubscriptionGroupConfig, MessageFilter]:
        """The group that pulls, and what it wants; raises BrokerError when it may not."""
        group = self._check(request, connection)
        return group, self._filter(request, self._subscription(request, group))

    def commit(self, request: PullMessageRequest, offset: int) -> None:
        """Keep how far the group has consumed, if the pull brought that along."""
        if request.sys_flag & _COMMIT and self._config.store.broker_role is not BrokerRole.SLAVE:
            self._offsets.commit(request.topic, request.consumer_group, request.queue_id, offset)

    def suggested_broker(self, group: SubscriptionGroupConfig, *, is_slow: bool) -> int:
        """Where to pull from next; a group that is slow reads what is no longer in our memory."""
        if not self._config.broker.slave_read_enable:
            return 0
        return group.which_broker_when_consume_slowly if is_slow else group.broker_id

    def wait_seconds(self, request: PullMessageRequest) -> float:
        """How long a pull that found nothing, and may wait, does so."""
        broker = self._config.broker
        millis = request.suspend_timeout_millis if broker.long_polling_enable else broker.short_polling_time_mills
        return max(0, millis) / 1000

    def again(self, command: Command, group: SubscriptionGroupConfig, wanted: MessageFilter) -> Command:
        """The answer to a pull that has waited, as things are now."""
        return self._read(command, command.header(PullMessageRequest), group, wanted)[0]

    # --- checks -------------------------------------------------------------------------------------------------

    def _check(self, request: PullMessageRequest, connection: Connection) -> SubscriptionGroupConfig:
        broker = self._config.broker
        if not broker.broker_permission & _READ:
            raise NoPermission(f"the broker[{broker.broker_ip1}] pulling message is forbidden")
        name = request.consumer_group
        group = self._groups.find(name, auto_create=broker.auto_create_subscription_group)
        if group is None:
            raise SubscriptionGroupNotExist(f"subscription group [{name}] does not exist, {FAQ}")
        if not group.consume_enable:
            raise NoPermission(f"subscription group no permission, {name}")
        topic = self._topics.get(request.topic)
        if topic is None:
            raise TopicNotExist(f"topic[{request.topic}] not exist, apply first please! {FAQ}")
        if not topic.perm & _READ:
            raise NoPermission(f"the topic[{request.topic}] pulling message is forbidden")
        if not 0 <= request.queue_id < topic.read_queue_nums:
            raise BrokerError(
                f"queueId[{request.queue_id}] is illegal, topic:[{request.topic}] "
                f"topicConfig.readQueueNums:[{topic.read_queue_nums}] consumer:[/{connection.peer}]"
            )
        return group

    def _subscription(self, request: PullMessageRequest, group: SubscriptionGroupConfig) -> Subscription:
        """What the consumer wants: as the request says, or as its group's heartbeat said."""
        kind = request.expression_type or TAG
        if request.sys_flag & _SUBSCRIPTION:
            if kind != TAG and not request.subscription:
                raise SubscriptionParseFailed("parse the consumer's subscription failed")
            return _subscription_of(request.topic, request.subscription, kind, request.sub_version)
        live = self._consumers.get(request.consumer_group)
        if live is None:
            raise SubscriptionNotExist(f"the consumer's group info not exist{FAQ}")
        if live.is_broadcasting and not group.consume_broadcast_enable:
            raise NoPermission(f"the consumer group[{request.consumer_group}] can not consume by broadcast way")
        subscription = live.subscriptions.get(request.topic)
        if subscription is None:
            raise SubscriptionNotExist(f"the consumer's subscription not exist{FAQ}")
        if subscription.version < request.sub_version:
            raise SubscriptionNotLatest("the consumer's subscription not latest")
        return subscription

    def _filter(self, request: PullMessageRequest, subscription: Subscription) -> MessageFilter:
        broker = self._config.broker
        group = request.consumer_group
        if subscription.is_tag_type:
            if broker.filter_support_retry and request.topic.startswith(RETRY_PREFIX):
                return retry_filter(subscription, group, self._filters)
            return tag_filter(subscription)
        kind = subscription.expression_type
        if request.sys_flag & _SUBSCRIPTION:
            if kind != SQL92:
                raise SubscriptionParseFailed(f"unknown expression type {kind}: expected TAG or SQL92")
            expression = compiled(subscription.expression)
            # Java gives everything to a pull whose own expression it cannot read. So must we; the log has the reason.
            found = EVERYTHING if isinstance(expression, SqlError) else sql_filter(expression)
        else:
            known = self._filters.get(request.topic, group)
            if known is None:
                raise FilterDataNotExist("The broker's consumer filter data is not exist!Your expression may be wrong!")
            if known.client_version < request.sub_version:
                raise FilterDataNotLatest("The broker's consumer filter data is not latest!")
            found = group_filter(known, self._filters)
        if not broker.enable_property_filter:
            raise BrokerError(f"The broker does not support consumer to filter message by {kind}")
        return EVERYTHING if subscription.class_filter_mode else found

    # --- reading ------------------------------------------------------------------------------------------------

    def _read(
        self,
        command: Command,
        request: PullMessageRequest,
        group: SubscriptionGroupConfig,
        wanted: MessageFilter,
    ) -> tuple[Command, bool]:
        """The reply, and whether it may wait: there is nothing new, or a slave cannot say more."""
        found = self._store.read(
            request.topic,
            request.queue_id,
            request.queue_offset,
            request.max_msg_nums,
            matches=wanted.matches_entry,
            matches_record=wanted.matches_record,
            bulk_bytes=self._config.broker.max_transfer_bytes_on_bulk_pull if request.bulk else 0,
        )
        code = _CODES.get(found.status)
        if code is None:  # an empty or unknown queue
            code = ResponseCode.PULL_OFFSET_MOVED if request.queue_offset else ResponseCode.PULL_NOT_FOUND
        next_offset = found.next_begin_offset
        suggested = self.suggested_broker(group, is_slow=found.suggest_pulling_from_slave)
        statistics = self._writer.statistics
        if code == ResponseCode.SUCCESS:
            statistics.got(request.topic, request.consumer_group, found.message_count, found.byte_count)
        else:
            statistics.get_missed()
            if code == ResponseCode.PULL_OFFSET_MOVED:
                code, suggested, next_offset = self._moved(request, group, found, suggested)
        numbers = suggested, next_offset, found.min_offset, found.max_offset
        reply = command.reply(code, _REMARKS[found.status], ext_fields=_fields(command, numbers), body=found.slices)
        is_out_of_reach = code == ResponseCode.PULL_RETRY_IMMEDIATELY and found.status not in _SCANNED
        return reply, code == ResponseCode.PULL_NOT_FOUND or is_out_of_reach

    def _moved(
        self, request: PullMessageRequest, group: SubscriptionGroupConfig, found: ReadResult, suggested: int
    ) -> tuple[ResponseCode, int, int]:
        """An offset outside the queue: a master says where to go on and keeps a note; a slave sends to its master."""
        store = self._config.store
        if store.broker_role is BrokerRole.SLAVE and not store.offset_check_in_slave:
            return ResponseCode.PULL_RETRY_IMMEDIATELY, group.broker_id, request.queue_offset
        broker = self._config.broker
        event = OffsetMovedEvent(
            consumer_group=request.consumer_group,
            message_queue=MessageQueue(request.topic, broker.broker_name, request.queue_id),
            offset_new=found.next_begin_offset,
            offset_request=request.queue_offset,
        )
        host = pack_host(broker.broker_ip1, broker.listen_port)
        properties = {names.TAGS: request.consumer_group, names.KEYS: request.consumer_group}
        self._writer.append(
            NewMessage(
                topic=OFFSET_MOVED_TOPIC,
                queue_id=0,
                body=encode_body(event),
                properties=stored_text(properties),
                born_timestamp=self._writer.now(),
                born_host=host,
                store_host=host,
            )
        )
        return ResponseCode.PULL_OFFSET_MOVED, suggested, found.next_begin_offset
