"""Why a slave cannot follow its master."""

from __future__ import annotations

from downrange.model.errors import MQError


class ReplicationError(MQError):
    """The two logs, or the bytes between them, do not fit together."""


class SlaveAhead(ReplicationError):
    """The slave has bytes that its master lost: which of the two is right is for an operator to say."""


class SlaveTooFarBehind(ReplicationError):
    """The master has deleted the files the slave still needs."""


class LogsDiffer(ReplicationError):
    """At the same place of the log, master and slave have different records."""
