"""Downrange: a message platform that speaks Apache RocketMQ."""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers take it for True; importing `typing` would be most of the time this module takes
if TYPE_CHECKING:
    from typing import Any

    from downrange.client.admin import Admin
    from downrange.client.config import ClientConfig, ProducerConfig
    from downrange.client.consumer.blocking import PushConsumer
    from downrange.client.consumer.config import ConsumerConfig
    from downrange.client.consumer.lite_pull import AsyncLitePullConsumer
    from downrange.client.consumer.lite_pull_blocking import LitePullConsumer
    from downrange.client.consumer.lite_pull_config import LitePullConfig
    from downrange.client.consumer.messages import ReceivedMessage
    from downrange.client.consumer.pop.messages import PoppedMessage
    from downrange.client.consumer.pull import PullConsumer
    from downrange.client.consumer.push import AsyncPushConsumer
    from downrange.client.consumer.retry import Acknowledged, Later
    from downrange.client.consumer.simple import AsyncSimpleConsumer
    from downrange.client.consumer.simple_blocking import SimpleConsumer
    from downrange.client.consumer.simple_config import SimpleConsumerConfig
    from downrange.client.dead_letters import DeadLetter, DeadLetters
    from downrange.client.errors import ClientClosed, CommitFailed, NoNameServer, NoRoute, SendFailed, TooManySends
    from downrange.client.producer.blocking.producer import Producer
    from downrange.client.producer.blocking.transaction_producer import TransactionProducer
    from downrange.client.producer.outgoing import BodyTooLarge, InvalidTopic
    from downrange.client.producer.producer import AsyncProducer
    from downrange.client.producer.request_reply import NotARequest, Reply, ReplyMessage, ReplyTimedOut, reply_to
    from downrange.client.producer.send_result import SendResult, SendStatus
    from downrange.client.producer.transaction_producer import AsyncTransactionProducer
    from downrange.client.producer.transactions import HalfSent, LocalTransactionState, TransactionResult
    from downrange.model.errors import MessageError, MQError
    from downrange.model.message import Message, MessageQueue
    from downrange.model.topics import SubscriptionGroupConfig, TopicConfig
    from downrange.protocol.bodies.groups import ConsumeFromWhere, MessageModel
    from downrange.protocol.errors import BrokerError
    from downrange.settings import ConfigError
    from downrange.transport.tls_config import TlsConfig

__version__ = "0.1.0"

__all__ = [
    "Acknowledged",
    "Admin",
    "AsyncLitePullConsumer",
    "AsyncProducer",
    "AsyncPushConsumer",
    "AsyncSimpleConsumer",
    "AsyncTransactionProducer",
    "BodyTooLarge",
    "BrokerError",
    "ClientClosed",
    "ClientConfig",
    "CommitFailed",
    "ConfigError",
    "ConsumeFromWhere",
    "ConsumerConfig",
    "DeadLetter",
    "DeadLetters",
    "HalfSent",
    "InvalidTopic",
    "Later",
    "LitePullConfig",
    "LitePullConsumer",
    "LocalTransactionState",
    "MQError",
    "Message",
    "MessageError",
    "MessageModel",
    "MessageQueue",
    "NoNameServer",
    "NoRoute",
    "NotARequest",
    "PoppedMessage",
    "Producer",
    "ProducerConfig",
    "PullConsumer",
    "PushConsumer",
    "ReceivedMessage",
    "Reply",
    "ReplyMessage",
    "ReplyTimedOut",
    "SendFailed",
    "SendResult",
    "SendStatus",
    "SimpleConsumer",
    "SimpleConsumerConfig",
    "SubscriptionGroupConfig",
    "TlsConfig",
    "TooManySends",
    "TopicConfig",
    "TransactionProducer",
    "TransactionResult",
    "reply_to",
]

# The module of each name, imported when the name is first used: servers and the command line must start fast.
_HOMES = {
    "Acknowledged": "downrange.client.consumer.retry",
    "Admin": "downrange.client.admin",
    "AsyncLitePullConsumer": "downrange.client.consumer.lite_pull",
    "AsyncProducer": "downrange.client.producer.producer",
    "AsyncPushConsumer": "downrange.client.consumer.push",
    "AsyncSimpleConsumer": "downrange.client.consumer.simple",
    "AsyncTransactionProducer": "downrange.client.producer.transaction_producer",
    "BodyTooLarge": "downrange.client.producer.outgoing",
    "BrokerError": "downrange.protocol.errors",
    "ClientClosed": "downrange.client.errors",
    "ClientConfig": "downrange.client.config",
    "CommitFailed": "downrange.client.errors",
    "ConfigError": "downrange.settings",
    "ConsumeFromWhere": "downrange.protocol.bodies.groups",
    "ConsumerConfig": "downrange.client.consumer.config",
    "DeadLetter": "downrange.client.dead_letters",
    "DeadLetters": "downrange.client.dead_letters",
    "HalfSent": "downrange.client.producer.transactions",
    "InvalidTopic": "downrange.client.producer.outgoing",
    "Later": "downrange.client.consumer.retry",
    "LitePullConfig": "downrange.client.consumer.lite_pull_config",
    "LitePullConsumer": "downrange.client.consumer.lite_pull_blocking",
    "LocalTransactionState": "downrange.client.producer.transactions",
    "MQError": "downrange.model.errors",
    "Message": "downrange.model.message",
    "MessageError": "downrange.model.errors",
    "MessageModel": "downrange.protocol.bodies.groups",
    "MessageQueue": "downrange.model.message",
    "NoNameServer": "downrange.client.errors",
    "NoRoute": "downrange.client.errors",
    "NotARequest": "downrange.client.producer.request_reply",
    "PoppedMessage": "downrange.client.consumer.pop.messages",
    "Producer": "downrange.client.producer.blocking.producer",
    "ProducerConfig": "downrange.client.config",
    "PullConsumer": "downrange.client.consumer.pull",
    "PushConsumer": "downrange.client.consumer.blocking",
    "ReceivedMessage": "downrange.client.consumer.messages",
    "Reply": "downrange.client.producer.request_reply",
    "ReplyMessage": "downrange.client.producer.request_reply",
    "ReplyTimedOut": "downrange.client.producer.request_reply",
    "SendFailed": "downrange.client.errors",
    "SendResult": "downrange.client.producer.send_result",
    "SendStatus": "downrange.client.producer.send_result",
    "SimpleConsumer": "downrange.client.consumer.simple_blocking",
    "SimpleConsumerConfig": "downrange.client.consumer.simple_config",
    "SubscriptionGroupConfig": "downrange.model.topics",
    "TlsConfig": "downrange.transport.tls_config",
    "TooManySends": "downrange.client.errors",
    "TopicConfig": "downrange.model.topics",
    "TransactionProducer": "downrange.client.producer.blocking.transaction_producer",
    "TransactionResult": "downrange.client.producer.transactions",
    "reply_to": "downrange.client.producer.request_reply",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'downrange' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
