"""What the gRPC service asks of the brokers of a cluster."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from downrange.model.message import MessageQueue, StoredMessage
from downrange.model.topics import SubscriptionGroupConfig
from downrange.protocol.bodies.groups import ConsumerData
from downrange.protocol.bodies.pop import PopMessageRequest, ReceiptHandle
from downrange.protocol.bodies.routes import TopicRouteData


class Outgoing(NamedTuple):
    """A message on its way to a queue."""

    queue: MessageQueue
    body: bytes
    properties: str
    sys_flag: int
    born_timestamp: int


class Sent(NamedTuple):
    """A message that a broker took; `code` tells whether it is as safe as the broker's settings promise."""

    code: int
    queue_offset: int
    log_offset: int
    recall_handle: str


class PoppedMessage(NamedTuple):
    """A message that was leased."""

    record: StoredMessage
    handle: ReceiptHandle
    delivered_before: int


class HalfMessage(NamedTuple):
    """Where the half message of a transaction is."""

    broker_name: str
    queue_offset: int
    log_offset: int


class Backend(Protocol):
    """The brokers of a cluster. Methods raise BrokerError with a broker's code, NoRoute, or a TransportError."""

    async def route(self, topic: str) -> TopicRouteData:
        """The brokers and queues of a topic."""

    async def topic_type(self, topic: str) -> str:
        """The attribute message.type of a topic; UNSPECIFIED when there is no such topic."""

    async def group(self, group: str) -> SubscriptionGroupConfig | None:
        """The configuration of a consumer group; None when there is none."""

    async def send(self, topic: str, message: Outgoing) -> Sent:
        """Store a message."""

    async def pop(self, broker_name: str, request: PopMessageRequest) -> list[PoppedMessage]:
        """Lease messages that are there now."""

    async def wait(self, broker_name: str, request: PopMessageRequest, seconds: float) -> bool:
        """Whether there are messages to pop; waits so long for them."""

    async def ack(self, topic: str, group: str, handle: ReceiptHandle) -> None:
        """Acknowledge a message."""

    async def change_invisible(self, topic: str, group: str, handle: ReceiptHandle, millis: int) -> ReceiptHandle:
        """Lease a message for another time, counted from now; the old handle is void."""

    async def bury(self, topic: str, group: str, handle: ReceiptHandle, log_offset: int, message_id: str) -> None:
        """Copy a message to the dead letters of a group."""

    async def end_transaction(self, topic: str, half: HalfMessage, message_id: str, state: int, checked: bool) -> None:
        """Commit or roll back a half message."""

    async def recall(self, topic: str, broker_name: str, handle: str) -> str:
        """Take a timer message back before it is due; its message id."""

    # --- who is connected ---------------------------------------------------------------------------------------

    async def add_producer(self, topic: str) -> None:
        """Tell brokers that a producer of this topic is here: they ask it about half messages."""

    async def remove_producer(self, topic: str) -> None: ...

    async def add_consumer(self, consumer: ConsumerData) -> None:
        """Tell brokers that a consumer is here."""

    async def remove_consumer(self, group: str) -> None: ...
