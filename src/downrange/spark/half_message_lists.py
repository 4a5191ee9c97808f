"""Lists of half messages as bytes, which tasks send to the driver, and which the marker topic keeps for later drivers.

A page is zlib over JSON: `{"v":1,"group":…,"queues":[[topic, wire topic, broker, address, queue id],…],"halves":[[queue
number, offset in the half topic, offset in the commit log, message id, 0 or 1 for ordered],…]}`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from downrange.client.producer.send_result import SendResult, SendStatus
from downrange.client.producer.transaction_producer import HalfSent
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue

PAGE_HALVES: Final = 20_000
"""About 500 KiB: well below the largest message of a broker."""
_MAX_PAGE_BYTES: Final = 64 << 20


class Half(NamedTuple):
    """A half message that was sent. Ordered half messages of a queue are ended in the order of sending."""

    sent: HalfSent
    is_ordered: bool


class BadPage(MQError):
    """A message of the marker topic is not a list of half messages."""


class _Page(msgspec.Struct):
    group: str
    queues: list[tuple[str, str, str, str, int]]
    halves: list[tuple[int, int, int, str, bool]]
    v: int = 1


class HalfList:
    """The half messages of a task, as tuples: this many objects would keep the garbage collector busy."""

    def __init__(self) -> None:
        self._group = ""
        self._queues: dict[tuple[str, str, str, str, int], int] = {}
        self._rows: list[tuple[int, int, int, str, bool]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, half: Half) -> None:
        sent, is_ordered = half
        queue = sent.result.queue
        place = (queue.topic, sent.topic, queue.broker_name, sent.broker_address, queue.queue_id)
        number = self._queues.setdefault(place, len(self._queues))
        self._rows.append((number, sent.state_table_offset, sent.commit_log_offset, sent.transaction_id, is_ordered))
        self._group = sent.producer_group

    def pages(self) -> tuple[bytes, ...]:
        queues = list(self._queues)
        return tuple(
            zlib.compress(msgspec.json.encode(_Page(self._group, queues, self._rows[at : at + PAGE_HALVES])), 1)
            for at in range(0, len(self._rows), PAGE_HALVES)
        )


def unpack_halves(page: bytes) -> list[Half]:
    """The half messages of a page; raises BadPage if it is not a page."""
    try:
        inflate = zlib.decompressobj()
        found = msgspec.json.decode(inflate.decompress(page, _MAX_PAGE_BYTES), type=_Page)
        if found.v != 1 or inflate.unconsumed_tail:
            raise BadPage(f"a list of half messages of version {found.v}; this sink knows version 1")
        return [
            Half(_sent(found.group, *found.queues[number], offset, physical, message_id), is_ordered)
            for number, offset, physical, message_id, is_ordered in found.halves
        ]
    except (zlib.error, msgspec.DecodeError, IndexError) as error:
        raise BadPage(f"a message of the marker topic is not a list of half messages: {error}") from None


def halves_of(pages: Iterable[bytes]) -> list[Half]:
    return [half for page in pages for half in unpack_halves(page)]


def _sent(
    group: str,
    topic: str,
    wire_topic: str,
    broker_name: str,
    address: str,
    queue_id: int,
    offset: int,
    physical_offset: int,
    message_id: str,
) -> HalfSent:
    # The offset message id is left empty: ending a transaction does not need it.
    result = SendResult(SendStatus.SEND_OK, message_id, "", MessageQueue(topic, broker_name, queue_id), offset)
    return HalfSent(
        result=result,
        producer_group=group,
        topic=wire_topic,
        broker_address=address,
        commit_log_offset=physical_offset,
    )
