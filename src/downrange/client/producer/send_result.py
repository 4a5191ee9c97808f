"""The result of a send."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from downrange.model.message import MessageQueue
from downrange.protocol.codes import ResponseCode


class SendStatus(StrEnum):
    """How safely the broker has stored the message. Every status but SEND_OK falls short of the broker's settings."""

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
"""The reply codes of a send that say that the message is stored."""

Expected = tuple[str, str, MessageQueue]
"""What is known of a result before the reply: the message's unique id, its topic, the queue it was sent to."""


class SendStatistics(msgspec.Struct):
    """What sends of one producer took beyond a first attempt that was stored; counted since the producer started."""

    further_attempts: int = 0
    given_up: int = 0
    """Attempts that ended with the time-out that `adaptive` learned, because another broker could be asked."""
    unanswered: int = 0
    """Attempts without an answer, those given up included: each may have stored its message, and so a duplicate."""
    waits: int = 0
    """How often a send waited for a master, or for its return."""
    failed: int = 0
    """Sends that raised SendFailed."""


class SendResult(msgspec.Struct, frozen=True, gc=False):
    """Where a message is stored. `message_id` is its unique id, `offset_message_id` its place in the commit log.

    `region_id` and `trace_on` are what the broker wants to stand in traces of the message. `recall_handle` of a message
    that is not due yet is what a producer's `recall` takes. `unanswered` counts the attempts before the one that stored
    the message which ended without an answer: each may have stored it, too, so there may be as many duplicates.
    """

    status: SendStatus
    message_id: str
    offset_message_id: str
    queue: MessageQueue
    queue_offset: int
    region_id: str | None = None
    trace_on: bool = True
    recall_handle: str | None = None
    unanswered: int = 0
