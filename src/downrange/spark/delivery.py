"""What a batch may promise and what has to be done to keep it; pure decisions, no connection, no clock.

A *batch* is one micro-batch of a streaming query, or one batch write. Spark runs its tasks, then calls `commit` on the
driver, then writes its own checkpoint. The driver may die between any two of these, and then runs the same batch again.

at-least-once   Tasks await every acknowledgement. Nothing is remembered: what runs again is sent again.
idempotent      `commit` writes a marker. A batch whose marker is there is not sent again.
transactional   Tasks send half messages, which nobody can consume. Then, on the driver:

    DECIDE      an open marker with the tokens of the task attempts that count: the commit point
    END         every half message of these attempts becomes a message
    CLOSE       a closed marker: whatever is still a half message is now the broker's check-back to finish

    A driver that died after DECIDE finds the open marker when it runs the batch again. Its tasks send nothing, and it
    does SETTLE instead of END: a broker would deliver a message twice whose transaction is ended twice, so each is
    looked for in its topic first.

The token is new for each task attempt. Without it, halves of an attempt that failed could not be told from those of the
attempt that took its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final

HANDOVER_MILLIS: Final = 10 * 60 * 1000
"""After this time an open marker counts as left behind: its driver has died and nobody ran the batch again."""


class Level(StrEnum):
    AT_LEAST_ONCE = "at-least-once"
    IDEMPOTENT = "idempotent"
    TRANSACTIONAL = "transactional"


class Step(Enum):
    """What `commit` does, in this order."""

    ROLL_BACK = "roll back the halves of this attempt"
    DECIDE = "write the open marker"
    END = "commit the halves of this attempt"
    SETTLE = "commit the halves of the open marker that are not yet messages"
    CLOSE = "write the closed marker"


class Verdict(Enum):
    """The answer to a broker that asks what became of a half message."""

    COMMIT = "commit"
    ROLL_BACK = "roll back"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Marker:
    """The durable word on one batch of a query. Open: decided, but its halves may not all be messages yet."""

    query: str
    batch: int
    is_closed: bool
    tokens: tuple[str, ...] = ()
    pages: tuple[str, ...] = ()
    """Ids of the messages that list the halves."""
    written: int = 0
    """When the broker stored it, in milliseconds."""


def valid_marker(markers: Iterable[Marker]) -> Marker | None:
    """The marker that counts: of the newest batch; of one batch what was decided first, and closed before open."""
    found = list(markers)
    if not found:
        return None
    batch = max(marker.batch for marker in found)
    of_batch = [marker for marker in found if marker.batch == batch]
    # Two drivers of one query may have decided. The tokens of the first are what the check-back went by.
    first = min(of_batch, key=lambda marker: marker.written)
    return next((marker for marker in of_batch if marker.is_closed and marker.tokens == first.tokens), first)


def is_delivered(marker: Marker | None, batch: int) -> bool:
    """Whether tasks have nothing to send, because the batch, or a later one, was decided before."""
    return marker is not None and marker.batch >= batch


def commit_steps(level: Level, marker: Marker | None, batch: int, *, rows: int) -> tuple[Step, ...]:
    """What `commit` has to do for a batch whose tasks sent `rows` messages, given the marker that counts now."""
    match level:
        case Level.AT_LEAST_ONCE:
            return ()
        case Level.IDEMPOTENT:
            return (Step.CLOSE,) if rows and not is_delivered(marker, batch) else ()
        case Level.TRANSACTIONAL:
            if not is_delivered(marker, batch):
                return (Step.DECIDE, Step.END, Step.CLOSE) if rows else ()
            assert marker is not None
            # Tasks that sent although the batch was decided lost a race with another driver of the same query.
            undo = (Step.ROLL_BACK,) if rows else ()
            is_open = marker.batch == batch and not marker.is_closed
            return (*undo, Step.SETTLE, Step.CLOSE) if is_open else undo


def may_roll_back(*, all_tasks_ended: bool) -> bool:
    """Whether `abort` may undo the halves of the tasks it knows.

    Spark calls it after a failed task, and after a failed `commit` as well. Then the marker may be written or still be
    on its way, and its halves must stay: the next run of the batch, or the check-back, decides by the marker.
    """
    return not all_tasks_ended


def verdict(of_batch: Marker | None, newest: Marker | None, batch: int, token: str, now: int) -> Verdict:
    """What became of a half message, by the marker of its batch and the newest of its query."""
    if of_batch is None:
        # A query goes on only when a batch is decided: this one was, and without any half of this attempt.
        return Verdict.ROLL_BACK if newest is not None and newest.batch > batch else Verdict.UNKNOWN
    if token not in of_batch.tokens:
        return Verdict.ROLL_BACK
    # While the marker is open the driver is at work; a second END would deliver the message twice.
    if of_batch.is_closed or now - of_batch.written > HANDOVER_MILLIS:
        return Verdict.COMMIT
    return Verdict.UNKNOWN
