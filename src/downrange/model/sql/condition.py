"""A condition on the properties of one message, which are asked for by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Properties: TypeAlias = Callable[[str], str | None]
"""The value of the property with this name, or None."""
Condition: TypeAlias = Callable[[Properties], bool | None]
"""True: the message matches. False, None (unknown) and a ValueError: it does not."""
