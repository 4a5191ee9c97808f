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
    """A test that records pass of whose properties `condition` says True: neither no nor unknown nor ValueError.

    `names` are all properties it may ask for; without them each record is looked at by itself. A value.
    """

    __slots__ = ("_condition", "_names")

    def __init__(self, condition: Condition, names: tuple[str, ...] = ()) -> None:
        self._condition = condition
        self._names = tuple((name, name.encode()) for name in names) if len(names) <= _MOST_NAMES else ()

    def __call__(self, record: memoryview | bytes) -> bool:
        return self.matches(properties_of(record))

    def matches(self, properties: str) -> bool:
        """The same for the text of the properties."""
        try:
            return self._condition(partial(find_property, properties)) is True
        except ValueError:
            return False

    def pick(self, backlog: Backlog, most: int) -> Picked | None:
        """The entries whose records pass, as many as a reply may have; None when the records have to be read singly.

        Compiled, only what is asked for is taken out of a record, and a record is no object.
        """
        if steps is None or not self._names:
            return None
        return steps.pick_by_properties(backlog, most, self._names, self._condition)
