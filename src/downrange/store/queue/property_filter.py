"""Messages by their properties: a condition that is asked about each record."""

from __future__ import annotations

from functools import partial

from downrange.compiled import accelerated
from downrange.model.properties import find_property
from downrange.model.record import properties_of
from downrange.model.sql.condition import Condition
from downrange.store.queue.backlog import Backlog, Picked


class PropertyFilter:
    """A test that a record passes if `condition` says True of its properties: neither False, None nor ValueError.

    `names` are all properties that `condition` may ask for; without them the compiled step cannot be used. Immutable.
    """

    __slots__ = ("_condition", "_names")

    def __init__(self, condition: Condition, names: tuple[str, ...] = ()) -> None:
        self._condition = condition
        self._names = tuple((name, name.encode()) for name in names)

    def __call__(self, record: memoryview | bytes) -> bool:
        return self.matches(properties_of(record))

    def matches(self, properties: str) -> bool:
        """Whether a record with this text of properties passes."""
        try:
            return self._condition(partial(find_property, properties)) is True
        except ValueError:
            return False

    def pick(self, backlog: Backlog, most: int, most_bytes: int) -> Picked | None:
        """The entries whose records pass, as many as a reply may have; None: they have to be looked at one by one."""
        return pick_by_properties(backlog, most, most_bytes, self._names, self._condition) if self._names else None


@accelerated
def pick_by_properties(
    backlog: Backlog, most: int, most_bytes: int, names: tuple[tuple[str, bytes], ...], condition: Condition
) -> Picked | None:
    """`PropertyFilter.pick` for these names, each also as bytes.

    Compiled, only what is asked for is taken out of a record, and a record is no object. Python has no way that is
    quicker than one record after the other, which is how `MessageReader` reads.
    """
    return None
