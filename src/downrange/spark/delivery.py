"""The promises of the delivery levels, and the steps that keep them. Pure: no connections, no clock.

A *batch* is one micro-batch of a streaming query, or one batch write. Spark runs its tasks, then calls `commit` on the
driver, then writes its own checkpoint. The driver may die between any two of these; a new driver runs the batch again.

at-least-once   Tasks await every acknowledgement. Nothing is remembered: a batch that runs again is sent again.
idempotent      `commit` writes a marker. A batch that has a marker is not sent again.
transactional   Tasks send half messages, which cannot be consumed. Then, on the driver:

    DECIDE      writes an open marker with the tokens of the task attempts that count: this is the commit point
    END         turns every half message of these attempts into a message
    CLOSE       writes a closed marker: the broker's check-back ends the remaining half messages

    After a driver died behind DECIDE, the next one finds the open marker when it runs the batch again. Its tasks send
    nothing, and SETTLE replaces END: a broker delivers a message twice if its transaction is ended twice, so SETTLE
    looks for each message in its topic first.

Every task attempt has a new token, which distinguishes its half messages from those of an attempt that failed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final

from downrange.client.producer.transaction_producer import LocalTransactionState

HANDOVER_MILLIS: Final = 10 * 60 * 1000
"""After this time an open marker counts as abandoned: its driver has died and no other ran the batch again."""


class Level(StrEnum):
    AT_LEAST_ONCE = "at-least-once"
    IDEMPOTENT = "idempotent"
    TRANSACTIONAL = "transactional"


class Step(Enum):
    """The steps of `commit`, in this order."""

    ROLL_BACK = "roll back the halves of this attempt"
    DECIDE = "write the open marker"
    END = "commit the halves of this attempt"
    SETTLE = "commit the halves of the open marker that are not yet messages"
    CLOSE = "write the closed marker"


@dataclass(frozen=True, slots=True)
class Marker:
    """The durable decision about one batch of a query. While it is open, half messages may be left to commit."""

    query: str
    batch: int
    is_closed: bool
    tokens: tuple[str, ...] = ()
    pages: tuple[str, ...] = ()
    """Ids of the messages that list the half messages."""
    written: int = 0
    """When the broker stored the marker, in milliseconds."""


def valid_marker(markers: Iterable[Marker]) -> Marker | None:
    """The marker that counts: that of the newest batch; of several the first decision, closed if any is closed."""
    found = list(markers)
    if not found:
        return None
    batch = max(marker.batch for marker in found)
    of_batch = [marker for marker in found if marker.batch == batch]
    # Two drivers of one query may have decided. The check-back used the tokens of the first decision.
    first = min(of_batch, key=lambda marker: marker.written)
    return next((marker for marker in of_batch if marker.is_closed and marker.tokens == first.tokens), first)


def is_delivered(marker: Marker | None, batch: int) -> bool:
    """Whether tasks have nothing to send because the batch, or a later one, was decided before."""
    return marker is not None and marker.batch >= batch


def commit_steps(level: Level, marker: Marker | None, batch: int, *, rows: int) -> tuple[Step, ...]:
    """The steps of `commit` for a batch whose tasks sent `rows` messages, given the marker that counts now."""
    match level:
        case Level.AT_LEAST_ONCE:
            return ()
        case Level.IDEMPOTENT:
            return (Step.CLOSE,) if rows and not is_delivered(marker, batch) else ()
        case Level.TRANSACTIONAL:
            if not is_delivered(marker, batch):
                return (Step.DECIDE, Step.END, Step.CLOSE) if rows else ()
            assert marker is not None
            # Tasks that sent although the batch was decided lost a race against another driver of the query.
            undo = (Step.ROLL_BACK,) if rows else ()
            is_open = marker.batch == batch and not marker.is_closed
            return (*undo, Step.SETTLE, Step.CLOSE) if is_open else undo


def may_roll_back(*, all_tasks_ended: bool) -> bool:
    """Whether `abort` may roll back the half messages of the tasks it knows.

    Spark calls `abort` after a failed task and after a failed `commit`. In the second case the marker may be written or
    under way, and its half messages must stay: the next run of the batch, or the check-back, decides by the marker.
    """
    return not all_tasks_ended


def verdict(of_batch: Marker | None, newest: Marker | None, batch: int, token: str, now: int) -> LocalTransactionState:
    """How to end a half message, by the marker of its batch and the newest marker of its query."""
    if of_batch is None:
        # A later batch exists only if this one was decided, and then without a half message of this attempt.
        return (
            LocalTransactionState.ROLLBACK
            if newest is not None and newest.batch > batch
            else LocalTransactionState.UNKNOWN
        )
    if token not in of_batch.tokens:
        return LocalTransactionState.ROLLBACK
    # While the marker is open the driver ends half messages; a second end would deliver the message twice.
    if of_batch.is_closed or now - of_batch.written > HANDOVER_MILLIS:
        return LocalTransactionState.COMMIT
    return LocalTransactionState.UNKNOWN
