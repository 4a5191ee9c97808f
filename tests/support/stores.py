"""Storing messages in tests: one, a group, or a batch of groups; all by the one way in, `MessageStore.append`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from downrange.store.message_store import MessageStore
from downrange.store.new_message import AppendResult, NewMessage, PutMessageStatus, Refusal
from downrange.store.new_messages import NewMessages


def append(store: MessageStore, message: NewMessage) -> AppendResult:
    """Store one message."""
    stored = append_group(store, message)
    return AppendResult(stored.status, reason=stored.reason) if isinstance(stored, Refusal) else stored[0]


def append_group(store: MessageStore, *group: NewMessage) -> list[AppendResult] | Refusal:
    """Store messages together or not at all."""
    stored, refusal = append_batch(store, [group])
    return stored if refusal is None else refusal


def append_batch(
    store: MessageStore, groups: Iterable[Sequence[NewMessage]]
) -> tuple[list[AppendResult], Refusal | None]:
    """Store groups of messages, which the store must not refuse before; what was stored, and why the rest was not."""
    messages = NewMessages()
    for group in groups:
        refusal = store.add(messages, group)
        if refusal is not None:
            return [], refusal
    refusal = store.append(messages)
    assert refusal is not None or messages.stored == len(messages)
    return [AppendResult(PutMessageStatus.PUT_OK, *place) for place in messages.places], refusal
