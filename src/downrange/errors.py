"""Every error that a client may raise, in one place; `downrange.model.errors` draws them as a tree.

    from downrange.errors import NoRoute, SendFailed

All are an `MQError`, whose text is one line for people; `retriable` says whether the same call may succeed later.
Errors that a server told us, by the code of its reply, are a `BrokerError`.
"""

from __future__ import annotations

from downrange.client.admin.chosen_brokers import ClusterNotChosen
from downrange.client.admin.pipelines import PipelineNotFound
from downrange.client.admin.plans import PlanDrifted
from downrange.client.admin.search import WrongCursor
from downrange.client.admin.users import UserNotFound
from downrange.client.compression import CompressionMissing
from downrange.client.consumer.retry import BadAnswer
from downrange.client.dead_letters import DeadLettersUnreadable
from downrange.client.errors import (
    AckFailed,
    BrokerNotFound,
    ClientClosed,
    ClientError,
    ClientNotFound,
    ClusterNotFound,
    CommitFailed,
    GroupNotFound,
    GroupOnline,
    MessageNotFound,
    NoMaster,
    NoNameServer,
    NoRoute,
    NotANameServer,
    NotAssigned,
    PopNotSupported,
    SendFailed,
    SubscriptionConflict,
    TooManySends,
)
from downrange.client.producer.outgoing import (
    BodyMissing,
    BodyTooLarge,
    ForbiddenTopic,
    InvalidBatch,
    InvalidBody,
    InvalidDelayLevel,
    InvalidDeliveryTime,
    InvalidGroup,
    InvalidHandle,
    InvalidProperty,
    InvalidTopic,
)
from downrange.client.producer.request_reply import NotARequest, ReplyTimedOut
from downrange.client.resending import JournalDamaged
from downrange.model.errors import MessageError, MQError, StoreError
from downrange.model.record import CorruptRecord
from downrange.model.sql.errors import SqlError
from downrange.protocol.errors import (
    BrokerError,
    ConsumeMessageTimeout,
    ConsumerNotOnline,
    FilterDataNotExist,
    FilterDataNotLatest,
    FlowControl,
    InternalError,
    LocalProtocolError,
    MessageIllegal,
    NoPermission,
    NotLeader,
    ProtocolError,
    PullOffsetMoved,
    QueryNotFound,
    RemoteProtocolError,
    RequestCodeNotSupported,
    ServiceNotAvailable,
    SlaveNotAvailable,
    SubscriptionGroupNotExist,
    SubscriptionNotExist,
    SubscriptionNotLatest,
    SubscriptionParseFailed,
    SystemBusy,
    TopicNotExist,
)
from downrange.settings import ConfigError
from downrange.transport.errors import (
    ConnectFailed,
    ConnectionLost,
    ListenFailed,
    RequestTimedOut,
    TransportClosed,
    TransportError,
)

__all__ = [
    "AckFailed",
    "BadAnswer",
    "BodyMissing",
    "BodyTooLarge",
    "BrokerError",
    "BrokerNotFound",
    "ClientClosed",
    "ClientError",
    "ClientNotFound",
    "ClusterNotChosen",
    "ClusterNotFound",
    "CommitFailed",
    "CompressionMissing",
    "ConfigError",
    "ConnectFailed",
    "ConnectionLost",
    "ConsumeMessageTimeout",
    "ConsumerNotOnline",
    "CorruptRecord",
    "DeadLettersUnreadable",
    "FilterDataNotExist",
    "FilterDataNotLatest",
    "FlowControl",
    "ForbiddenTopic",
    "GroupNotFound",
    "GroupOnline",
    "InternalError",
    "InvalidBatch",
    "InvalidBody",
    "InvalidDelayLevel",
    "InvalidDeliveryTime",
    "InvalidGroup",
    "InvalidHandle",
    "InvalidProperty",
    "InvalidTopic",
    "JournalDamaged",
    "ListenFailed",
    "LocalProtocolError",
    "MQError",
    "MessageError",
    "MessageIllegal",
    "MessageNotFound",
    "NoMaster",
    "NoNameServer",
    "NoPermission",
    "NoRoute",
    "NotANameServer",
    "NotARequest",
    "NotAssigned",
    "NotLeader",
    "PipelineNotFound",
    "PlanDrifted",
    "PopNotSupported",
    "ProtocolError",
    "PullOffsetMoved",
    "QueryNotFound",
    "RemoteProtocolError",
    "ReplyTimedOut",
    "RequestCodeNotSupported",
    "RequestTimedOut",
    "SendFailed",
    "ServiceNotAvailable",
    "SlaveNotAvailable",
    "SqlError",
    "StoreError",
    "SubscriptionConflict",
    "SubscriptionGroupNotExist",
    "SubscriptionNotExist",
    "SubscriptionNotLatest",
    "SubscriptionParseFailed",
    "SystemBusy",
    "TooManySends",
    "TopicNotExist",
    "TransportClosed",
    "TransportError",
    "UserNotFound",
    "WrongCursor",
]
