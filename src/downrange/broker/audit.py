"""The audit log: one line for each refused request and each request that changes something, without any secret."""

from __future__ import annotations

import logging

from downrange.auth.guard import Outcome
from downrange.clock import Clock

log = logging.getLogger(__name__)


class AuditLog:
    """Writes what the guard decided."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def note(self, outcome: Outcome) -> None:
        if outcome.refusal is not None:
            log.warning(
                "refused code=%d peer=%s account=%s reason=%s",
                outcome.command.code,
                outcome.origin.peer,
                outcome.account or "-",
                outcome.refusal.remark,
            )
