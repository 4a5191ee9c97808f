"""Messages by their properties: a condition that is asked about each record."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from downrange.compiled import steps
from downrange.model.properties import find_property
from downrange.model.record import properties_of
from downrange.store.queue.backlog import Backlog, Picked

# The value of the property with this name, or None.
Properties = Callable[[str], str | None]
Condition = Callable[[Properties], bool | None]

_MOST_NAMES: Final = 16


class PropertyFilter:
    """A test that a record passes if `condition` says True of its properties: neither False, None nor ValueError.

    `names` are all properties that `condition` may ask for; without them the compiled step cannot be used. Immutable.
    """

    __slots__ = ("_condition", "_names")

    def __init__(self, condition: Condition, names: tuple[str, ...] = ()) -> None:
        self._condition = condition
        self._names = tuple((name, name.encode()) for name in names) if len(names) <= _MOST_NAMES else ()

    def __call__(self, record: memoryview | bytes) -> bool:
        return self.matches(properties_of(record))

    def matches(self, properties: str) -> bool:
        """Whether a record with this text of properties passes."""
        try:
            return self._condition(partial(find_property, properties)) is True
        except ValueError:
            return False

    def pick(self, backlog: Backlog, most: int) -> Picked | None:
        """The entries whose records pass, as many as a reply may have; None when the records have to be read singly.

        The compiled step reads only the properties in `names` and makes no object of a record.
        """
        if steps is None or not self._names:
            return None
        return steps.pick_by_properties(backlog, most, self._names, self._condition)
