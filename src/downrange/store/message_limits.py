"""How large a message, and a group of messages, may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from downrange.model.properties import MAX_PROPERTIES_BYTES
from downrange.model.record import FIXED_SIZE, IPV6_EXTRA
from downrange.model.topics import MAX_TOPIC_LENGTH
from downrange.store.config import BLANK_SIZE, RECORD_OVERHEAD, StoreConfig
from downrange.store.new_message import NewMessage, PutMessageStatus, Refusal

_HOSTS: Final = 16  # bytes of two IPv4 hosts, part of the fixed size


class MessageLimits:
    """Checks messages against the sizes that the log can hold and those that the operator allows."""

    def __init__(self, config: StoreConfig) -> None:
        self._file_room = config.mapped_file_size_commit_log - BLANK_SIZE
        self.max_message_size = 0
        self.surely_fits = 0
        """A body and properties that together have no more bytes than this break no limit."""
        self.group_surely_fits = 0
        """A group whose records together have no more bytes than this breaks no limit."""
        self.set_max_message_size(config.max_message_size)

    def set_max_message_size(self, size: int) -> None:
        """Change the largest body; values below 10 are ignored, as RocketMQ does."""
        if size < 10:
            return
        self.max_message_size = size
        self._largest_record = min(size + RECORD_OVERHEAD, self._file_room)
        largest_rest = FIXED_SIZE + 2 * IPV6_EXTRA + MAX_TOPIC_LENGTH
        self.group_surely_fits = min(size, self._file_room)
        self.surely_fits = min(size, MAX_PROPERTIES_BYTES, self._largest_record - largest_rest)

    def check(self, group: Sequence[NewMessage]) -> Refusal | None:
        """Why messages that must be stored together are refused; None when they are not."""
        bodies = total = 0
        for message in group:
            properties = len(message.properties)
            if properties > MAX_PROPERTIES_BYTES:
                characters = len(message.properties.decode("utf-8", "replace"))
                status = (
                    PutMessageStatus.MESSAGE_ILLEGAL
                    if characters > MAX_PROPERTIES_BYTES
                    else PutMessageStatus.PROPERTIES_SIZE_EXCEEDED
                )
                return Refusal(status, f"properties of {properties} bytes, at most {MAX_PROPERTIES_BYTES}")
            hosts = len(message.born_host) + len(message.store_host)
            topic = len(message.topic.encode("utf-8", "replace"))
            size = FIXED_SIZE - _HOSTS + hosts + topic + properties + len(message.body)
            if size > self._largest_record:
                return _illegal(f"a record of {size} bytes, at most {self._largest_record} are stored")
            bodies += len(message.body)
            total += size
        if bodies > self.max_message_size:
            return _illegal(f"bodies of {bodies} bytes, maxMessageSize is {self.max_message_size}")
        if total > self._file_room:
            return _illegal(f"messages of {total} bytes do not fit a commit-log file of {self._file_room}")
        return None


def _illegal(reason: str) -> Refusal:
    return Refusal(PutMessageStatus.MESSAGE_ILLEGAL, reason)
