"""Reasons why a slave cannot follow its master."""

from __future__ import annotations

from downrange.model.errors import MQError


class ReplicationError(MQError):
    """The logs of master and slave do not fit together, or the bytes between them are no replication stream."""


class SlaveAhead(ReplicationError):
    """The slave has bytes that its master lost: an operator must decide which of the two logs is right."""


class SlaveTooFarBehind(ReplicationError):
    """The master has deleted files that the slave still needs."""


class LogsDiffer(ReplicationError):
    """Master and slave have different records at the same offset."""
