"""How large a message may be, and what else keeps one out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from downrange.model.properties import MAX_PROPERTIES_BYTES, find_in_bytes
from downrange.model.record import FIXED_SIZE, IPV6_EXTRA
from downrange.model.topics import MAX_TOPIC_LENGTH
from downrange.store.config import BLANK_SIZE, RECORD_OVERHEAD, StoreConfig
from downrange.store.new_message import AppendResult, BatchUnit, NewMessage, PutMessageStatus

_HOSTS: Final = 16  # bytes of two IPv4 hosts, part of the fixed size


class MessageLimits:
    """Checks a message against the sizes the log can hold and those the operator allows."""

    def __init__(self, config: StoreConfig) -> None:
        self._file_room = config.mapped_file_size_commit_log - BLANK_SIZE
        self.max_message_size = 0
        self.surely_fits = 0
        """A body and properties that together have no more bytes than this break no limit."""
        self.set_max_message_size(config.max_message_size)

    def set_max_message_size(self, size: int) -> None:
        """Change the largest body; values below 10 are ignored, as RocketMQ does."""
        if size < 10:
            return
        self.max_message_size = size
        self._largest_record = min(size + RECORD_OVERHEAD, self._file_room)
        largest_rest = FIXED_SIZE + 2 * IPV6_EXTRA + MAX_TOPIC_LENGTH
        self.surely_fits = min(size, MAX_PROPERTIES_BYTES, self._largest_record - largest_rest)

    def check(self, message: NewMessage) -> AppendResult | None:
        """Why this message is refused; None when it is not."""
        properties = len(message.properties)
        if properties > MAX_PROPERTIES_BYTES:
            characters = len(message.properties.decode("utf-8", "replace"))
            status = (
                PutMessageStatus.MESSAGE_ILLEGAL
                if characters > MAX_PROPERTIES_BYTES
                else PutMessageStatus.PROPERTIES_SIZE_EXCEEDED
            )
            return AppendResult(status, reason=f"properties of {properties} bytes, at most {MAX_PROPERTIES_BYTES}")
        if len(message.body) > self.max_message_size:
            return _illegal(f"body of {len(message.body)} bytes, maxMessageSize is {self.max_message_size}")
        size = _size_without_body(message) + len(message.body)
        if size > self._largest_record:
            return _illegal(f"a record of {size} bytes, at most {self._largest_record} are stored")
        return None

    def check_batch(self, message: NewMessage, units: Sequence[BatchUnit]) -> AppendResult | None:
        """Why this batch is refused, which must also fit one file as a whole; None when it is not refused."""
        if not units:
            return _illegal("a batch without messages")
        if message.sys_flag & 12:
            return _illegal("a batch cannot be transactional")
        delay = find_in_bytes(message.properties, b"DELAY")
        if delay is not None and delay.isdigit() and int(delay) > 0:
            return _illegal("a batch cannot be delayed")
        shared = len(message.properties) + 1  # and the separator before them
        fixed = _size_without_body(message) + 1
        bodies = total = 0
        for unit in units:
            if len(unit.properties) + shared > MAX_PROPERTIES_BYTES:
                reason = f"properties of {len(unit.properties) + shared} bytes, at most {MAX_PROPERTIES_BYTES}"
                return AppendResult(PutMessageStatus.PROPERTIES_SIZE_EXCEEDED, reason=reason)
            bodies += len(unit.body)
            total += fixed + len(unit.body) + len(unit.properties)
        if bodies > self.max_message_size:
            return _illegal(f"bodies of {bodies} bytes, maxMessageSize is {self.max_message_size}")
        if total > self._file_room:
            return _illegal(f"a batch of {total} bytes does not fit a commit-log file of {self._file_room}")
        return None


def _size_without_body(message: NewMessage) -> int:
    hosts = len(message.born_host) + len(message.store_host)
    topic = len(message.topic.encode("utf-8", "replace"))
    return FIXED_SIZE - _HOSTS + hosts + topic + len(message.properties)


def _illegal(reason: str) -> AppendResult:
    return AppendResult(PutMessageStatus.MESSAGE_ILLEGAL, reason=reason)
