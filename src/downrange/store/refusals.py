"""The reasons why a store takes no messages at present."""

from __future__ import annotations

from typing import Final

from downrange.store.errors import StoreClosed

# Reasons to refuse messages that do not keep a slave from following its master.
_MASTERS_BUSINESS: Final = frozenset(("slave", "disk full", "fence"))


class Refusals:
    """Reasons by name, each with a text for the operator; there may be several at once.

    Holds always: `any`, which is read for every message, says whether there is one. Worker threads may add reasons.
    """

    __slots__ = ("any", "texts")

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.any = False

    def __repr__(self) -> str:
        return f"<Refusals {self}>"

    def __str__(self) -> str:
        return "; ".join(self.texts.values())

    def refuse(self, reason: str, text: str) -> None:
        self.texts[reason] = text
        self.any = True

    def allow(self, reason: str) -> None:
        self.texts.pop(reason, None)
        self.any = bool(self.texts)

    def __contains__(self, reason: str) -> bool:
        return reason in self.texts

    def get(self, reason: str) -> str | None:
        return self.texts.get(reason)

    @property
    def has_broken_files(self) -> bool:
        """Whether the disk refused a write without which the files do not agree with each other."""
        return "flush" in self.texts or "dispatch" in self.texts

    def check_takes_data(self) -> None:
        """Raise StoreClosed when no more of a master's log can be taken, or when the part taken cannot be read."""
        if not self.texts.keys() <= _MASTERS_BUSINESS:
            raise StoreClosed("; ".join(text for reason, text in self.texts.items() if reason not in _MASTERS_BUSINESS))
