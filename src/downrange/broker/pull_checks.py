"""Whether a group may pull from a queue, and which of its messages it wants."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from downrange.broker.clients import Consumers
from downrange.broker.compiled_sql import compiled
from downrange.broker.filter_data import ConsumerFilters
from downrange.broker.filtering import EVERYTHING, MessageFilter, group_filter, retry_filter, sql_filter, tag_filter
from downrange.broker.groups import Groups
from downrange.broker.live_config import LiveConfig
from downrange.broker.topics import Topics
from downrange.model.sql.errors import SqlError
from downrange.model.subscription import SQL92, TAG, Subscription, subscribe
from downrange.model.topics import RETRY_PREFIX, Perm, SubscriptionGroupConfig
from downrange.protocol.bodies.pull import PullMessageRequest, PullSysFlag
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

FAQ: Final = "\nSee http://rocketmq.apache.org/docs/faq/ for further details."

# Plain numbers and a cache: every pull goes through here.
_READ = int(Perm.READ)
_SUBSCRIPTION = int(PullSysFlag.SUBSCRIPTION)
_subscription_of = lru_cache(maxsize=4096)(subscribe)


@lru_cache(maxsize=4096)
def _tag_filter_of(expression: str | None) -> MessageFilter:
    if expression and not any(expression.split("||")):
        raise SubscriptionParseFailed("parse the consumer's subscription failed")  # nothing but separators
    return tag_filter(subscribe("", expression))


@dataclass(eq=False)
class PullChecks:
    """Checks a pull against groups, topics, clients and filters, before a queue is read."""

    _config: LiveConfig
    _topics: Topics
    _groups: Groups
    _consumers: Consumers
    _filters: ConsumerFilters

    def agreed(self, request: PullMessageRequest, peer: str) -> tuple[SubscriptionGroupConfig, MessageFilter]:
        """The group that pulls, and the messages it wants; raises BrokerError when it may not pull."""
        group = self._check(request, peer)
        kind = request.expression_type or TAG
        is_retry = self._config.broker.filter_support_retry and request.topic.startswith(RETRY_PREFIX)
        if request.sys_flag & _SUBSCRIPTION and kind == TAG and not is_retry:  # nearly every pull
            return group, _tag_filter_of(request.subscription)
        return group, self._filter(request, self._subscription(request, group))

    def _check(self, request: PullMessageRequest, peer: str) -> SubscriptionGroupConfig:
        broker = self._config.broker
        if not broker.broker_permission & _READ:
            raise NoPermission(f"the broker[{broker.broker_ip1}] pulling message is forbidden")
        name = request.consumer_group
        group = self._groups.find(name, auto_create=broker.auto_create_subscription_group)
        if group is None and not name and broker.auto_create_subscription_group:
            group = SubscriptionGroupConfig(
                ""
            )  # RocketMQ answers this pull; such a group is not worth a line of the table
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
                f"topicConfig.readQueueNums:[{topic.read_queue_nums}] consumer:[/{peer}]"
            )
        return group

    def _subscription(self, request: PullMessageRequest, group: SubscriptionGroupConfig) -> Subscription:
        """The consumer's subscription: from the request, or else from the last heartbeat of its group."""
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
