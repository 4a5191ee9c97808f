"""Refusals of the gRPC protocol: a code and a text for the client, and how other errors become such."""

from __future__ import annotations

import logging
from typing import Final

from downrange.client.errors import BrokerNotFound, NoRoute
from downrange.model.errors import MQError
from downrange.protocol.codes import ResponseCode
from downrange.protocol.errors import BrokerError
from downrange.proxy.wire.enums import Code, GrpcStatus
from downrange.proxy.wire.messages import Status
from downrange.transport.errors import RequestTimedOut

log = logging.getLogger(__name__)

_CODES: Final = {
    ResponseCode.SYSTEM_BUSY: Code.TOO_MANY_REQUESTS,
    ResponseCode.FLOW_CONTROL: Code.TOO_MANY_REQUESTS,
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED: Code.NOT_IMPLEMENTED,
    ResponseCode.TOPIC_NOT_EXIST: Code.TOPIC_NOT_FOUND,
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST: Code.CONSUMER_GROUP_NOT_FOUND,
}


class Refused(MQError):
    """The answer to a request is this code and this text."""

    def __init__(self, code: Code, text: str = "") -> None:
        super().__init__(text or code.name)
        self.code = code


class CallFailed(MQError):
    """The call itself ends with this status of gRPC, without an answer."""

    def __init__(self, status: GrpcStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


OK: Final = Status(code=Code.OK, message=Code.OK.name)


def status_of(error: Exception) -> Status:
    """The one place where errors become codes of the gRPC protocol."""
    match error:
        case Refused():
            return Status(code=error.code, message=str(error))
        case NoRoute():
            return Status(code=Code.TOPIC_NOT_FOUND, message=no_route_text(error.topic))
        case BrokerError():
            code = _CODES.get(ResponseCode(error.code)) if error.code in _KNOWN else None
            return Status(code=code or Code.INTERNAL_SERVER_ERROR, message=error.remark or str(error))
        case RequestTimedOut():
            return Status(code=Code.PROXY_TIMEOUT, message=str(error))
        case BrokerNotFound():
            return Status(code=Code.BAD_REQUEST, message=str(error))
        case MQError():
            return Status(code=Code.INTERNAL_SERVER_ERROR, message=str(error))
        case _:
            log.error("gRPC request failed", exc_info=error)
            return Status(code=Code.INTERNAL_SERVER_ERROR, message=f"{type(error).__name__}: {error}")


_KNOWN: Final = frozenset(map(int, ResponseCode))


def no_route_text(topic: str) -> str:
    return f"CODE: 17  DESC: No topic route info in name server for the topic: {topic}"
