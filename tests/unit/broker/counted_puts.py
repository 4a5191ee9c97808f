"""Messages that were never stored, for statistics to count."""

from __future__ import annotations

from downrange.broker.statistics import LARGE, Statistics


def put(statistics: Statistics, topic: str, messages: int, size: int) -> None:
    """One request stored so many messages, of `size` bytes together, as the store and `MessageWriter` count them."""
    counts = [*statistics.take_puts(), (topic, messages, size)]

    def take() -> list[tuple[str, int, int]]:
        taken = counts.copy()
        counts.clear()
        return taken

    statistics.take_puts = take
    statistics.new_puts += messages
    if size // messages > LARGE:
        for _ in range(messages):
            statistics.put_large(topic, size // messages)
    if messages > 1:
        statistics.put_as_one(topic, messages)
