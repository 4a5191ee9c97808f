"""Receipt handles of gRPC: the handle of a lease, and the place of the message in the log."""

from __future__ import annotations

from typing import Final, NamedTuple

from downrange.protocol.bodies.pop import HandleError, ReceiptHandle
from downrange.proxy.errors import Refused
from downrange.proxy.wire.enums import Code

_LEASE_PARTS: Final = 8
_NO_OFFSET: Final = -1


class Handle(NamedTuple):
    lease: ReceiptHandle
    log_offset: int

    def __str__(self) -> str:
        return f"{self.lease} {self.log_offset}"

    def expires(self) -> int:
        return self.lease.pop_time + self.lease.invisible_time


def parse_handle(text: str) -> Handle:
    try:
        lease = ReceiptHandle.parse(text)
    except HandleError as error:
        raise Refused(Code.INVALID_RECEIPT_HANDLE, str(error)) from None
    rest = text.split(" ")[_LEASE_PARTS:]
    offset = rest[-1] if rest else ""
    return Handle(lease, int(offset) if offset.isdecimal() and len(offset) < 20 else _NO_OFFSET)


def live_handle(text: str, now: int) -> Handle:
    """The handle of a lease that is not over."""
    handle = parse_handle(text)
    if handle.expires() <= now:
        raise Refused(Code.INVALID_RECEIPT_HANDLE, "receipt handle is expired")
    return handle
