"""Errors of the client itself: a server that is not known or not reached, a call that cannot be made.

ClientError
├── NoNameServer      no configured name server answers                                  retriable
├── NoRoute           no broker serves this topic, as far as the name servers know       retriable
│   └── NoMaster      brokers serve it, but none has a master at the moment              retriable
├── BrokerNotFound    no broker of this name, or it has no master at the moment          retriable
├── ClusterNotFound   no cluster of this name
├── GroupNotFound     no broker knows this consumer group
├── ClientNotFound    the group has no member of this id at the moment
├── GroupOnline       refused while members of the group are running: they would overwrite it
├── MessageNotFound   no broker has this message
├── SendFailed        every attempt to send was in vain; lists them     retriable if the last error was
├── TooManySends      more asynchronous sends are on their way than allowed              retriable
├── SubscriptionConflict   topics subscribed to and queues assigned, or neither
├── NotAssigned       the queue is not this consumer's at the moment
├── CommitFailed      not every offset arrived at its broker                             retriable
├── AckFailed         not every message was acknowledged; lists those that were not      retriable if all errors are
├── PopNotSupported   the broker is older than RocketMQ 5 and leases no messages
└── ClientClosed      used before it was started, after it was closed, or on another event loop
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from downrange.model.errors import MQError
from downrange.model.message import MessageQueue
from downrange.protocol.errors import BrokerError
from downrange.transport.errors import RequestTimedOut, TransportError

if TYPE_CHECKING:
    from downrange.client.consumer.pop.messages import PoppedMessage
    from downrange.client.producer.send_result import SendResult


class ClientCode(IntEnum):
    """The codes of the client's own errors, in the place of a broker's response code. [ClientErrorCode]"""

    CONNECT_BROKER_EXCEPTION = 10001
    ACCESS_BROKER_TIMEOUT = 10002
    BROKER_NOT_EXIST = 10003
    NO_NAME_SERVER = 10004
    NOT_FOUND_TOPIC = 10005


class ClientError(MQError):
    """The client could not do what was asked; the text says how to help it."""

    code: int | None = None


class NoNameServer(ClientError):
    """No name server answers."""

    retriable = True
    code = ClientCode.NO_NAME_SERVER


class NotANameServer(ClientError):
    """Where a name server was expected, another server answers."""


class NoRoute(ClientError):
    """Carries the topic, so that a producer can fall back on the auto-create topic."""

    retriable = True
    code = ClientCode.NOT_FOUND_TOPIC

    def __init__(self, topic: str, problem: str) -> None:
        super().__init__(problem)
        self.topic = topic


class NoMaster(NoRoute):
    """Brokers serve the topic, but none of them has a master at the moment: one may be on its way."""


class BrokerNotFound(ClientError):
    """No broker has this name or address at the moment."""

    retriable = True
    code = ClientCode.BROKER_NOT_EXIST


class ClusterNotFound(ClientError):
    """No cluster has this name."""


class GroupNotFound(ClientError):
    """No broker knows this consumer group."""


class ClientNotFound(ClientError):
    """No member of the group has this client id."""


class GroupOnline(ClientError):
    """The group has running members: what was asked is possible only without."""


class MessageNotFound(ClientError):
    """No broker has this message."""


class ClientClosed(ClientError):
    """The client is not started, or was closed."""


class TooManySends(ClientError):
    """More sends wait for their answers than the configuration allows."""

    retriable = True


class SubscriptionConflict(ClientError):
    """A consumer either subscribes to topics or is assigned queues; neither, or both, is a mistake."""


class NotAssigned(ClientError):
    """The queue is not this consumer's at the moment."""


class CommitFailed(ClientError):
    """Not every offset arrived at its broker; the next commit sends the missing ones again."""

    retriable = True


class AckFailed(ClientError):
    """Messages that were not acknowledged, with the reason of each. They come again unless a further try succeeds."""

    def __init__(self, failed: Mapping[PoppedMessage, MQError], total: int) -> None:
        self.failed = failed
        self.retriable = all(error.retriable for error in failed.values())
        first = next(iter(failed.values()))
        super().__init__(f"{len(failed)} of {total} messages were not acknowledged: {first}")


class PopNotSupported(ClientError):
    """The broker does not serve POP: it is older than RocketMQ 5."""


class FailedAttempt(NamedTuple):
    """One attempt to send: its queue, how long it took, and its error."""

    queue: MessageQueue
    cost_millis: float
    error: MQError


class SendFailed(ClientError):
    """A message was not acknowledged by any broker that was tried.

    After a time-out or a lost connection it may be stored all the same. `code` is that of the last attempt: the
    broker's response code, or a ClientCode. `stored` holds the results of those messages of a batch that went before.
    """

    def __init__(self, topic: str, attempts: tuple[FailedAttempt, ...], cost_millis: float) -> None:
        self.topic = topic
        self.attempts = attempts
        self.cost_millis = cost_millis
        self.error = attempts[-1].error
        self.code = code_of(self.error)
        self.retriable = self.error.retriable
        self.stored: tuple[SendResult, ...] = ()
        tried = "; ".join(
            f"{attempt.queue.broker_name} queue {attempt.queue.queue_id}, {attempt.cost_millis:.0f} ms: {attempt.error}"
            for attempt in attempts
        )
        times = "1 attempt" if len(attempts) == 1 else f"{len(attempts)} attempts"
        super().__init__(f"message for {topic} was not sent after {times} in {cost_millis:.0f} ms: {tried}")

    @property
    def brokers(self) -> tuple[str, ...]:
        """The brokers tried, in order."""
        return tuple(attempt.queue.broker_name for attempt in self.attempts)


def code_of(error: MQError) -> int | None:
    match error:
        case BrokerError() | ClientError():
            return error.code
        case RequestTimedOut():
            return ClientCode.ACCESS_BROKER_TIMEOUT
        case TransportError():
            return ClientCode.CONNECT_BROKER_EXCEPTION
        case _:
            return None
