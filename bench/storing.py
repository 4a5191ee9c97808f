"""Storing messages as brokers do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from downrange.store.message_store import MessageStore
from downrange.store.new_message import NewMessage
from downrange.store.new_messages import NewMessages


def append(store: MessageStore, groups: Iterable[Sequence[NewMessage]]) -> None:
    """Store a batch; the messages of a group together or not at all."""
    messages = NewMessages()
    for group in groups:
        refusal = store.add(messages, group)
        assert refusal is None, refusal
    refusal = store.append(messages)
    assert refusal is None, refusal
