"""Errors of the protocol, and errors for the response codes of a server.

ProtocolError
├── LocalProtocolError    we tried to write something that the protocol cannot express
└── RemoteProtocolError   the peer's bytes break the rules: the rest of its connection cannot be read
BrokerError(code, remark) the peer understood and refused; one class for each code that callers distinguish
"""

from __future__ import annotations

from typing import ClassVar

from downrange.model.errors import MQError
from downrange.protocol.codes import ResponseCode


class ProtocolError(MQError):
    """Bytes and commands do not match."""


class LocalProtocolError(ProtocolError):
    """Our own command breaks the rules of the protocol."""


class RemoteProtocolError(ProtocolError):
    """The bytes of the peer break the rules of the protocol."""


class BrokerError(MQError):
    """A server answered with an error code. `remark` is the explanation of the server."""

    default_code: ClassVar[int] = ResponseCode.SYSTEM_ERROR

    def __init_subclass__(cls, *, code: ResponseCode, retriable: bool = False) -> None:
        cls.default_code = code
        cls.retriable = retriable

    def __init__(self, remark: str | None = None, code: int | None = None) -> None:
        self.code = self.default_code if code is None else code
        self.remark = remark or ""
        super().__init__(f"{code_name(self.code)} ({self.code}): {self.remark}" if remark else code_name(self.code))


def code_name(code: int) -> str:
    try:
        return ResponseCode(code).name
    except ValueError:
        return f"response code {code}"


class InternalError(BrokerError, code=ResponseCode.SYSTEM_ERROR, retriable=True):
    """An operation failed inside the server."""


class SystemBusy(BrokerError, code=ResponseCode.SYSTEM_BUSY):
    """Flow control: the server sheds load. Trying again at once makes it worse."""


class RequestCodeNotSupported(BrokerError, code=ResponseCode.REQUEST_CODE_NOT_SUPPORTED):
    """The server does not know this request."""


class MessageIllegal(BrokerError, code=ResponseCode.MESSAGE_ILLEGAL):
    """The broker does not take this message: it is too long, or its properties are."""


class ServiceNotAvailable(BrokerError, code=ResponseCode.SERVICE_NOT_AVAILABLE, retriable=True):
    """The broker stores nothing at the moment: it is a slave, shuts down, or its disk is full."""


class NoPermission(BrokerError, code=ResponseCode.NO_PERMISSION, retriable=True):
    """The account, the topic or the broker does not allow this."""


class TopicNotExist(BrokerError, code=ResponseCode.TOPIC_NOT_EXIST, retriable=True):
    """The server does not have this topic."""


class PullOffsetMoved(BrokerError, code=ResponseCode.PULL_OFFSET_MOVED):
    """The queue does not reach to this offset, or no longer begins there."""


class QueryNotFound(BrokerError, code=ResponseCode.QUERY_NOT_FOUND):
    """The group has committed no offset for this queue."""


class SubscriptionParseFailed(BrokerError, code=ResponseCode.SUBSCRIPTION_PARSE_FAILED):
    """The filter expression cannot be read."""


class SubscriptionNotExist(BrokerError, code=ResponseCode.SUBSCRIPTION_NOT_EXIST, retriable=True):
    """The broker has not heard of this subscription of the group yet."""


class SubscriptionNotLatest(BrokerError, code=ResponseCode.SUBSCRIPTION_NOT_LATEST, retriable=True):
    """The broker has heard of an older version of this subscription."""


class SubscriptionGroupNotExist(BrokerError, code=ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST):
    """The broker does not have this group, and does not create groups."""


class FilterDataNotExist(BrokerError, code=ResponseCode.FILTER_DATA_NOT_EXIST, retriable=True):
    """The broker has not compiled the expression of this group."""


class FilterDataNotLatest(BrokerError, code=ResponseCode.FILTER_DATA_NOT_LATEST, retriable=True):
    """The broker has compiled an older expression of this group."""


class ConsumerNotOnline(BrokerError, code=ResponseCode.CONSUMER_NOT_ONLINE):
    """No member of the group is connected."""


class ConsumeMessageTimeout(BrokerError, code=ResponseCode.CONSUME_MSG_TIMEOUT, retriable=True):
    """The member did not answer in time."""


class SlaveNotAvailable(BrokerError, code=ResponseCode.SLAVE_NOT_AVAILABLE, retriable=True):
    """A SYNC_MASTER has no slave that is near enough."""


class NotLeader(BrokerError, code=ResponseCode.NOT_LEADER, retriable=True):
    """Another controller leads, or none."""


class FlowControl(BrokerError, code=ResponseCode.FLOW_CONTROL, retriable=True):
    """The broker has more of these requests than it allows."""


ERRORS: dict[int, type[BrokerError]] = {error.default_code: error for error in BrokerError.__subclasses__()}


def broker_error(code: int, remark: str | None) -> BrokerError:
    """The error for a response code; codes without a class of their own give a BrokerError."""
    return ERRORS.get(code, BrokerError)(remark, code)
