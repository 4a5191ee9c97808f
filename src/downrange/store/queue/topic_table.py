"""A table of topics for compiled steps."""

from __future__ import annotations

from downrange.compiled import accelerated


@accelerated
class TopicTable:
    """Remembers topics and the rows of their queues for compiled steps; without those it stays empty."""

    def __len__(self) -> int:
        return 0

    def forget(self, topic: str) -> None:
        """A topic has changed."""

    def clear(self) -> None:
        """All topics may have changed."""
