"""The version of a table: tells a slave or a name server whether it must copy the table again."""

from __future__ import annotations

from downrange.protocol.bodies.body import Body
from downrange.protocol.bodies.fields import Int64


class DataVersion(Body, frozen=True, kw_only=True):
    """The version of a table; equal versions mean equal tables. Only 5.x has `state_version`."""

    counter: Int64 = 0
    timestamp: Int64 = 0
    state_version: Int64 | None = None

    @property
    def state(self) -> int:
        """The epoch of the master that made the table, in controller mode; 0 for every other broker."""
        return self.state_version or 0

    def bumped(self, now_millis: int) -> DataVersion:
        """The version after one more change."""
        return DataVersion(counter=self.counter + 1, timestamp=now_millis, state_version=self.state_version)
