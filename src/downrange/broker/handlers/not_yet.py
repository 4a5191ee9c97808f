"""Requests of 4.9 this broker will serve one day. Who sends one is told what is missing."""

from __future__ import annotations

from typing import Final

from downrange.broker.routes import RequestHandler, RouteTable
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command
from downrange.protocol.errors import RequestCodeNotSupported
from downrange.transport.connection import Connection

_MISSING: Final = {
    RequestCode.END_TRANSACTION: "transactional messages",
    RequestCode.RESUME_CHECK_HALF_MESSAGE: "transactional messages",
    RequestCode.SEND_REPLY_MESSAGE: "request-reply",
    RequestCode.SEND_REPLY_MESSAGE_V2: "request-reply",
}


def _refuse(code: RequestCode, feature: str) -> RequestHandler:
    def handle(command: Command, connection: Connection) -> Command:
        raise RequestCodeNotSupported(f"{code.name} ({code}) is not served yet: this broker does not do {feature}")

    return handle


NOT_YET: Final[RouteTable] = {code: _refuse(code, feature) for code, feature in _MISSING.items()}
