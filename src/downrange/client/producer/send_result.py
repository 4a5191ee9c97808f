"""What a send came to."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from downrange.model.message import MessageQueue
from downrange.protocol.codes import ResponseCode


class SendStatus(StrEnum):
    """All four mean stored; the last three that the promise of the broker's settings was not kept in time."""

    SEND_OK = "SEND_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"


STATUS_OF_CODE: Final = {
    int(ResponseCode.SUCCESS): SendStatus.SEND_OK,
    int(ResponseCode.FLUSH_DISK_TIMEOUT): SendStatus.FLUSH_DISK_TIMEOUT,
    int(ResponseCode.FLUSH_SLAVE_TIMEOUT): SendStatus.FLUSH_SLAVE_TIMEOUT,
    int(ResponseCode.SLAVE_NOT_AVAILABLE): SendStatus.SLAVE_NOT_AVAILABLE,
}
"""Reply codes of a send that say the message is stored."""


class SendResult(msgspec.Struct, frozen=True, gc=False):
    """Where a message lies. `message_id` is its unique id, `offset_message_id` its place in the commit log.

    `region_id` and `trace_on` are what the broker says for those who trace.
    """

    status: SendStatus
    message_id: str
    offset_message_id: str
    queue: MessageQueue
    queue_offset: int
    region_id: str | None = None
    trace_on: bool = True
