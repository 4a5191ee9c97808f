"""The parts of a transaction: its half message, its local work, its end."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from enum import IntEnum
from typing import Final

import msgspec

from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.producer.send_result import SendResult, SendStatus

log = logging.getLogger(__name__)


class LocalTransactionState(IntEnum):
    """How a transaction ended, with the values of END_TRANSACTION."""

    UNKNOWN = 0
    """Not known yet: the broker asks again later."""
    COMMIT = 8
    ROLLBACK = 12


# As traces name them, RocketMQ's spelling included.
TRACED_STATES: Final = {
    LocalTransactionState.UNKNOWN: "UNKNOW",
    LocalTransactionState.COMMIT: "COMMIT_MESSAGE",
    LocalTransactionState.ROLLBACK: "ROLLBACK_MESSAGE",
}


class HalfSent(msgspec.Struct, frozen=True, kw_only=True):
    """A half message that was sent, with all that any process needs to end its transaction. Can be pickled."""

    result: SendResult
    """`queue` is the one the message will be visible in; the offset is that of the half message."""
    producer_group: str
    topic: str
    """The name on the wire, with its namespace."""
    broker_address: str
    commit_log_offset: int

    @property
    def is_safe(self) -> bool:
        """Stored as the broker's settings promise; otherwise the transaction must be rolled back."""
        return self.result.status is SendStatus.SEND_OK

    @property
    def transaction_id(self) -> str:
        """The id that the half message, its checks and the message of the consumers share."""
        return self.result.message_id

    @property
    def state_table_offset(self) -> int:
        """The offset of the half message in the half topic."""
        return self.result.queue_offset


class TransactionResult(msgspec.Struct, frozen=True):
    """The end of a transaction: its half message, its state, and the error of the local work if any."""

    half: HalfSent
    state: LocalTransactionState
    error: Exception | None = None

    @property
    def transaction_id(self) -> str:
        """The id of the transaction: the unique id of its message."""
        return self.half.transaction_id


Execute = Callable[[HalfSent], LocalTransactionState | Awaitable[LocalTransactionState | None] | None]
"""The local work. None, or an exception, means UNKNOWN: the check will find out."""
Check = Callable[[ReceivedMessage], LocalTransactionState | Awaitable[LocalTransactionState | None] | None]
"""How did the transaction of this message (`message.transaction_id`) end? Any producer of the group may be asked."""


def executed(execute: Execute, half: HalfSent) -> tuple[LocalTransactionState, Exception | None]:
    """Call plain local work: the state to end the transaction with, and the error of the work."""
    if not half.is_safe:
        return LocalTransactionState.ROLLBACK, None
    try:
        return state_of(execute(half)), None
    except Exception as error:
        return failed(half, error)


def failed(half: HalfSent, error: Exception) -> tuple[LocalTransactionState, Exception]:
    # The user's code failed after an unknown step: only the check can tell how far it came.
    log.warning("local transaction failed id=%s", half.transaction_id, exc_info=error)
    return LocalTransactionState.UNKNOWN, error


def state_of(answer: object) -> LocalTransactionState:
    """The state that a user's function returned. Any other value is a mistake, and must not commit by accident."""
    if answer is None:
        return LocalTransactionState.UNKNOWN
    if not isinstance(answer, LocalTransactionState):
        raise TypeError(f"a local transaction answers with a LocalTransactionState, not with {answer!r}")
    return answer
