"""The rights that each request needs, as one table: request code -> the resources it touches, and how.

The resources are those that the request will touch: topics in a body, the topic of a stored record. A field that a
request may leave out never decides alone. A code that a broker serves and that has no row here needs an administrator;
a test compares this table with the codes that are served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

from downrange.auth.access_control import ANY_NAME, Action, Need, ResourceType
from downrange.model.errors import MessageError
from downrange.model.message_id import parse_offset_message_id
from downrange.model.recall_handle import RecallHandle
from downrange.model.topics import REPLY_TOPIC_SUFFIX, RETRY_PREFIX, is_send_forbidden, popped_topic
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.groups import HeartbeatData, LockBatchBody
from downrange.protocol.bodies.pop import BatchAckMessageBody, QueryAssignmentBody
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command

_PUB: Final = frozenset({Action.PUB})
_SUB: Final = frozenset({Action.SUB})
_SUB_OR_GET: Final = frozenset({Action.SUB, Action.GET})
_SUB_OR_UPDATE: Final = frozenset({Action.SUB, Action.UPDATE})
_PUB_OR_SUB: Final = frozenset({Action.PUB, Action.SUB})
_CREATE: Final = frozenset({Action.CREATE})
_UPDATE: Final = frozenset({Action.UPDATE})
_DELETE: Final = frozenset({Action.DELETE})
_GET: Final = frozenset({Action.GET})


class StoredTopics(Protocol):
    """Tells the topics of messages that requests name by their place in the log."""

    def topic_at(self, physical_offset: int) -> str | None:
        """The topic of the record at an offset, as consumers know it; None when there is none."""

    def topic_of_half_message(self, physical_offset: int) -> str | None:
        """The topic that a half message at an offset will go to; None when there is none."""


Rule = Callable[[Command, StoredTopics], Iterable[Need]]


def topic_need(topic: str, actions: frozenset[Action]) -> Need:
    """A right on a topic.

    A retry topic belongs to its group: the right to consume with the group counts. In the broker's own topics messages
    of all topics wait for their delay or the end of their transaction: only operators of the whole broker may look.
    """
    if is_send_forbidden(topic) and Action.SUB in actions:
        return Need(ResourceType.CLUSTER, ANY_NAME, _GET)
    if topic.startswith(RETRY_PREFIX):
        return group_need(topic.removeprefix(RETRY_PREFIX), _SUB)
    return Need(ResourceType.TOPIC, _no_wildcard(topic), actions)


def group_need(group: str, actions: frozenset[Action]) -> Need:
    """A right on a group."""
    return Need(ResourceType.GROUP, _no_wildcard(group), actions)


def _no_wildcard(name: str) -> str:
    """The name that a request gave. No topic or group is called `ANY_NAME`, which only a rule may ask for."""
    return "" if name == ANY_NAME else name


def _topic(actions: frozenset[Action], field: str = "topic") -> Rule:
    return lambda command, _: (topic_need(command.ext_fields.get(field, ""), actions),)


def _group(actions: frozenset[Action], field: str = "consumerGroup") -> Rule:
    return lambda command, _: (group_need(command.ext_fields.get(field, ""), actions),)


def _both(actions: frozenset[Action], group: str = "consumerGroup") -> Rule:
    """A right on the topic and on the group that the request names; a pop retry topic of the group is its topic's."""

    def needs(command: Command, stored: StoredTopics) -> Iterable[Need]:
        of_group = command.ext_fields.get(group, "")
        topic = popped_topic(command.ext_fields.get("topic", ""), of_group)
        return topic_need(topic, actions), group_need(of_group, actions)

    return needs


def _cluster(actions: frozenset[Action]) -> Rule:
    return lambda command, _: (Need(ResourceType.CLUSTER, ANY_NAME, actions),)


def _signed(command: Command, stored: StoredTopics) -> Iterable[Need]:
    """Every account may."""
    return ()


def _reply(command: Command, stored: StoredTopics) -> Iterable[Need]:
    """Answer a request-reply message: the reply does not name the topic of the request that it answers.

    A broker may store replies, so one for another topic than those of replies is a send to that topic.
    """
    topic = command.ext_fields.get("topic" if command.code == RequestCode.SEND_REPLY_MESSAGE else "b", "")
    if not topic.endswith(REPLY_TOPIC_SUFFIX):
        return (topic_need(topic, _PUB),)
    return (Need(ResourceType.TOPIC, ANY_NAME, _PUB_OR_SUB),)


def _view(command: Command, stored: StoredTopics) -> Iterable[Need]:
    return _stored_need(stored.topic_at(_number(command, "offset")), _SUB_OR_GET)


def _send_back(command: Command, stored: StoredTopics) -> Iterable[Need]:
    """The group gets the message again, so its consumers must be allowed to read the topic of the message."""
    topic = stored.topic_at(_number(command, "offset"))
    name = command.ext_fields.get("group", "")
    group = group_need(name, _SUB)
    return (group,) if topic is None else (group, topic_need(popped_topic(topic, name), _SUB))


def _consume_directly(command: Command, stored: StoredTopics) -> Iterable[Need]:
    """A consumer of the group gets the message: whoever sends it there must be allowed to read it."""
    yield group_need(command.ext_fields.get("consumerGroup", ""), _UPDATE)
    yield from _stored_need(stored.topic_at(_offset_in(command, "msgId")), _UPDATE)


def _resume(command: Command, stored: StoredTopics) -> Iterable[Need]:
    yield topic_need(command.ext_fields.get("topic", ""), _UPDATE)
    yield from _stored_need(stored.topic_at(_offset_in(command, "msgId")), _UPDATE)


def _end_transaction(command: Command, stored: StoredTopics) -> Iterable[Need]:
    return _stored_need(stored.topic_of_half_message(_number(command, "commitLogOffset")), _PUB)


def _recall(command: Command, stored: StoredTopics) -> Iterable[Need]:
    """A recall deletes the message that its handle names; the topic beside the handle must be that of the message."""
    handle = RecallHandle.decode(command.ext_fields.get("recallHandle", ""))
    topics = {command.ext_fields.get("topic", ""), *(() if handle is None else (handle.topic,))}
    return [topic_need(topic, _PUB) for topic in sorted(topics)]


def _stored_need(topic: str | None, actions: frozenset[Action]) -> Iterable[Need]:
    """A right on the topic of a stored message. Where no message is, nothing can be read or changed."""
    return () if topic is None else (topic_need(topic, actions),)


def _heartbeat(command: Command, stored: StoredTopics) -> Iterable[Need]:
    for consumer in decode_body(HeartbeatData, command.body_bytes).consumer_data_set:
        yield group_need(consumer.group_name, _SUB)
        for subscription in consumer.subscription_data_set:
            yield topic_need(popped_topic(subscription.topic, consumer.group_name), _SUB)


def _unregister(command: Command, stored: StoredTopics) -> Iterable[Need]:
    group = command.ext_fields.get("consumerGroup")
    return (group_need(group, _SUB),) if group else ()


def _locks(command: Command, stored: StoredTopics) -> Iterable[Need]:
    body = decode_body(LockBatchBody, command.body_bytes)
    yield group_need(body.consumer_group, _SUB)
    for topic in sorted({popped_topic(queue.topic, body.consumer_group) for queue in body.mq_set}):
        yield topic_need(topic, _SUB)


def _clone_offsets(command: Command, stored: StoredTopics) -> Iterable[Need]:
    fields = command.ext_fields
    yield group_need(fields.get("srcGroup", ""), _UPDATE)
    yield group_need(fields.get("destGroup", ""), _UPDATE)
    yield topic_need(fields.get("topic", ""), _UPDATE)


def _pop(command: Command, stored: StoredTopics) -> Iterable[Need]:
    """The topic that was popped from, also if the request names its retry topic, and the group."""
    fields = command.ext_fields
    return _popped(fields.get("topic", ""), fields.get("consumerGroup", ""))


def _batch_ack(command: Command, stored: StoredTopics) -> Iterable[Need]:
    if command.body_bytes:
        for ack in decode_body(BatchAckMessageBody, command.body_bytes).acks:
            yield from _popped(ack.topic, ack.consumer_group)


def _popped(topic: str, group: str) -> Iterable[Need]:
    return group_need(group, _SUB), topic_need(popped_topic(topic, group), _SUB)


def _assignment(command: Command, stored: StoredTopics) -> Iterable[Need]:
    return (group_need(decode_body(QueryAssignmentBody, command.body_bytes).consumer_group, _SUB),)


def _number(command: Command, field: str) -> int:
    text = command.ext_fields.get(field, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else -1


def _offset_in(command: Command, field: str) -> int:
    """The place in the log that a message id says; -1 for what is none."""
    try:
        return parse_offset_message_id(command.ext_fields.get(field, "")).physical_offset
    except MessageError:
        return -1


_CODE = RequestCode
BROKER_NEEDS: Final[Mapping[int, Rule]] = {
    # Producers
    _CODE.SEND_MESSAGE: _topic(_PUB),
    _CODE.SEND_MESSAGE_V2: _topic(_PUB, "b"),
    _CODE.SEND_BATCH_MESSAGE: _topic(_PUB, "b"),
    _CODE.SEND_REPLY_MESSAGE: _reply,
    _CODE.SEND_REPLY_MESSAGE_V2: _reply,
    _CODE.END_TRANSACTION: _end_transaction,
    _CODE.RECALL_MESSAGE: _recall,
    # Consumers
    _CODE.PULL_MESSAGE: _both(_SUB),
    _CODE.LITE_PULL_MESSAGE: _both(_SUB),
    _CODE.POP_MESSAGE: _pop,
    _CODE.ACK_MESSAGE: _pop,
    _CODE.BATCH_ACK_MESSAGE: _batch_ack,
    _CODE.CHANGE_MESSAGE_INVISIBLETIME: _pop,
    _CODE.PEEK_MESSAGE: _pop,
    _CODE.NOTIFICATION: _pop,
    _CODE.POLLING_INFO: _group(_SUB_OR_GET),
    _CODE.QUERY_ASSIGNMENT: _assignment,
    _CODE.HEART_BEAT: _heartbeat,
    _CODE.UNREGISTER_CLIENT: _unregister,
    _CODE.CHECK_CLIENT_CONFIG: _signed,
    _CODE.CONSUMER_SEND_MSG_BACK: _send_back,
    _CODE.GET_CONSUMER_LIST_BY_GROUP: _group(_SUB_OR_GET),
    _CODE.LOCK_BATCH_MQ: _locks,
    _CODE.UNLOCK_BATCH_MQ: _locks,
    _CODE.QUERY_CONSUMER_OFFSET: _both(_SUB_OR_GET),
    _CODE.UPDATE_CONSUMER_OFFSET: _both(_SUB_OR_UPDATE),
    _CODE.SEARCH_OFFSET_BY_TIMESTAMP: _topic(_SUB_OR_GET),
    _CODE.GET_MAX_OFFSET: _topic(_SUB_OR_GET),
    _CODE.GET_MIN_OFFSET: _topic(_SUB_OR_GET),
    _CODE.GET_EARLIEST_MSG_STORETIME: _topic(_SUB_OR_GET),
    _CODE.QUERY_MESSAGE: _topic(_SUB_OR_GET),
    _CODE.VIEW_MESSAGE_BY_ID: _view,
    # Operators: topics
    _CODE.UPDATE_AND_CREATE_TOPIC: _topic(_CREATE),
    _CODE.UPDATE_AND_CREATE_TOPIC_LIST: _cluster(_UPDATE),
    _CODE.DELETE_TOPIC_IN_BROKER: _topic(_DELETE),
    _CODE.GET_TOPIC_CONFIG: _topic(_GET),
    _CODE.GET_TOPIC_STATS_INFO: _topic(_GET),
    _CODE.QUERY_TOPIC_CONSUME_BY_WHO: _topic(_GET),
    _CODE.QUERY_CONSUME_QUEUE: _topic(_GET),
    _CODE.RESUME_CHECK_HALF_MESSAGE: _resume,
    # Operators: groups
    _CODE.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: _cluster(_UPDATE),
    _CODE.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: _cluster(_UPDATE),
    _CODE.DELETE_SUBSCRIPTIONGROUP: _group(_DELETE, "groupName"),
    _CODE.GET_SUBSCRIPTIONGROUP_CONFIG: _group(_GET, "group"),
    _CODE.GET_CONSUMER_CONNECTION_LIST: _group(_GET),
    _CODE.GET_CONSUMER_RUNNING_INFO: _group(_GET),
    _CODE.GET_CONSUME_STATS: _group(_GET),
    _CODE.QUERY_CONSUME_TIME_SPAN: _both(_GET, "group"),
    _CODE.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: _both(_GET, "group"),
    _CODE.INVOKE_BROKER_TO_RESET_OFFSET: _both(_UPDATE, "group"),
    _CODE.QUERY_CORRECTION_OFFSET: _both(_GET, "compareGroup"),
    _CODE.CLONE_GROUP_OFFSET: _clone_offsets,
    _CODE.CONSUME_MESSAGE_DIRECTLY: _consume_directly,
    # Operators: the whole broker
    _CODE.UPDATE_BROKER_CONFIG: _cluster(_UPDATE),
    _CODE.GET_BROKER_CONFIG: _cluster(_GET),
    _CODE.GET_BROKER_RUNTIME_INFO: _cluster(_GET),
    _CODE.VIEW_BROKER_STATS_DATA: _cluster(_GET),
    _CODE.GET_BROKER_CONSUME_STATS: _cluster(_GET),
    _CODE.GET_PRODUCER_CONNECTION_LIST: _cluster(_GET),
    _CODE.GET_ALL_PRODUCER_INFO: _cluster(_GET),
    _CODE.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: _cluster(_GET),
    _CODE.GET_ALL_TOPIC_CONFIG: _cluster(_GET),
    _CODE.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: _cluster(_GET),
    _CODE.GET_ALL_CONSUMER_OFFSET: _cluster(_GET),
    _CODE.GET_ALL_DELAY_OFFSET: _cluster(_GET),
    _CODE.GET_TIMER_CHECK_POINT: _cluster(_GET),
    _CODE.GET_TIMER_METRICS: _cluster(_GET),
    _CODE.EXCHANGE_BROKER_HA_INFO: _cluster(_GET),
    _CODE.GET_BROKER_HA_STATUS: _cluster(_GET),
    _CODE.CONTROLLER_GET_BROKER_EPOCH_CACHE: _cluster(_GET),
    _CODE.CONTROLLER_NOTIFY_BROKER_ROLE_CHANGED: _cluster(_UPDATE),
    _CODE.SET_MESSAGE_REQUEST_MODE: _cluster(_UPDATE),
    _CODE.GET_ALL_MESSAGE_REQUEST_MODE: _cluster(_GET),
    _CODE.CLEAN_EXPIRED_CONSUMEQUEUE: _cluster(_UPDATE),
    _CODE.CLEAN_UNUSED_TOPIC: _cluster(_UPDATE),
    _CODE.DELETE_EXPIRED_COMMITLOG: _cluster(_UPDATE),
    _CODE.UPDATE_AND_CREATE_ACL_CONFIG: _cluster(_UPDATE),
    _CODE.DELETE_ACL_CONFIG: _cluster(_UPDATE),
    _CODE.GET_BROKER_CLUSTER_ACL_INFO: _cluster(_GET),
    _CODE.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG: _cluster(_UPDATE),
    # Operators: users and their access rules
    _CODE.AUTH_CREATE_USER: _cluster(_UPDATE),
    _CODE.AUTH_UPDATE_USER: _cluster(_UPDATE),
    _CODE.AUTH_DELETE_USER: _cluster(_UPDATE),
    _CODE.AUTH_GET_USER: _cluster(_GET),
    _CODE.AUTH_LIST_USER: _cluster(_GET),
    _CODE.AUTH_CREATE_ACL: _cluster(_UPDATE),
    _CODE.AUTH_UPDATE_ACL: _cluster(_UPDATE),
    _CODE.AUTH_DELETE_ACL: _cluster(_UPDATE),
    _CODE.AUTH_GET_ACL: _cluster(_GET),
    _CODE.AUTH_LIST_ACL: _cluster(_GET),
}
"""The rows of a broker. Those of a name server are in NAMESRV_NEEDS, of a controller in CONTROLLER_NEEDS."""

NAMESRV_NEEDS: Final[Mapping[int, Rule]] = {
    _CODE.GET_ROUTEINFO_BY_TOPIC: _signed,
    _CODE.GET_BROKER_CLUSTER_INFO: _signed,
    _CODE.GET_BROKER_MEMBER_GROUP: _signed,
    _CODE.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: _signed,
    _CODE.GET_TOPICS_BY_CLUSTER: _signed,
    _CODE.GET_SYSTEM_TOPIC_LIST_FROM_NS: _signed,
    _CODE.GET_UNIT_TOPIC_LIST: _signed,
    _CODE.GET_HAS_UNIT_SUB_TOPIC_LIST: _signed,
    _CODE.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: _signed,
    _CODE.REGISTER_BROKER: _cluster(_UPDATE),
    _CODE.UNREGISTER_BROKER: _cluster(_UPDATE),
    _CODE.QUERY_DATA_VERSION: _cluster(_UPDATE),
    _CODE.BROKER_HEARTBEAT: _cluster(_UPDATE),
    _CODE.REGISTER_TOPIC_IN_NAMESRV: _cluster(_UPDATE),
    _CODE.WIPE_WRITE_PERM_OF_BROKER: _cluster(_UPDATE),
    _CODE.ADD_WRITE_PERM_OF_BROKER: _cluster(_UPDATE),
    _CODE.DELETE_TOPIC_IN_NAMESRV: _cluster(_UPDATE),
    _CODE.PUT_KV_CONFIG: _cluster(_UPDATE),
    _CODE.DELETE_KV_CONFIG: _cluster(_UPDATE),
    _CODE.GET_KV_CONFIG: _cluster(_GET),
    _CODE.GET_KVLIST_BY_NAMESPACE: _cluster(_GET),
    _CODE.UPDATE_NAMESRV_CONFIG: _cluster(_UPDATE),
    _CODE.GET_NAMESRV_CONFIG: _cluster(_GET),
}

CONTROLLER_NEEDS: Final[Mapping[int, Rule]] = {
    _CODE.CONTROLLER_GET_METADATA_INFO: _signed,
    _CODE.CONTROLLER_GET_SYNC_STATE_DATA: _signed,
    _CODE.BROKER_HEARTBEAT: _cluster(_UPDATE),
    _CODE.CONTROLLER_ALTER_SYNC_STATE_SET: _cluster(_UPDATE),
    _CODE.CONTROLLER_ELECT_MASTER: _cluster(_UPDATE),
    _CODE.CONTROLLER_REGISTER_BROKER: _cluster(_UPDATE),
    _CODE.CONTROLLER_GET_REPLICA_INFO: _cluster(_UPDATE),
    _CODE.CONTROLLER_GET_NEXT_BROKER_ID: _cluster(_UPDATE),
    _CODE.CONTROLLER_APPLY_BROKER_ID: _cluster(_UPDATE),
    _CODE.CONTROLLER_CLEAN_BROKER_DATA: _cluster(_UPDATE),
    _CODE.CONTROLLER_UPDATE_CONTROLLER_CONFIG: _cluster(_UPDATE),
    _CODE.CONTROLLER_GET_CONTROLLER_CONFIG: _cluster(_GET),
}
