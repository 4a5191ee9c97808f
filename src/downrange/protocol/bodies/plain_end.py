"""Reads the header of an end of transaction (request 37) into values in one step, since every transaction has one."""

from __future__ import annotations

from typing import Final

from downrange.protocol.bodies.plain_header import PlainHeader
from downrange.protocol.bodies.transactions import EndTransactionRequest
from downrange.protocol.codes import RequestCode

END_HEADER: Final = PlainHeader(RequestCode.END_TRANSACTION, EndTransactionRequest)
