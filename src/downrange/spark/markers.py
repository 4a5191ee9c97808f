"""Markers, with which the levels idempotent and transactional remember finished batches, as messages of a topic.

In a topic, because the driver and every task can reach it over the connection they have anyway, without a shared file
system, and because a marker is then exactly as safe as the messages of its batch. Each marker has the keys `query` and
`query/batch` and is found by them with an ordinary message query, on any RocketMQ.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

import msgspec

from downrange.client.admin.messages import MessageAdmin
from downrange.client.compression import plain_body as _plain
from downrange.client.errors import NoRoute
from downrange.client.producer.producer import AsyncProducer
from downrange.clock import Clock
from downrange.model.errors import MQError
from downrange.model.message import Message, StoredMessage
from downrange.spark.delivery import Marker, valid_marker
from downrange.spark.half_message_lists import Half, halves_of
from downrange.spark.sink_sending import check_safe, unless_busy

_MARKER_TAG: Final = "marker"
_PAGE_TAG: Final = "page"
_REMEMBERED_SECONDS: Final = 1.0


class MarkersUnreadable(MQError):
    """It cannot be known now whether a batch was delivered before; sending it might deliver it twice."""

    retriable = True


class _Body(msgspec.Struct):
    query: str
    batch: int
    closed: bool
    tokens: tuple[str, ...] = ()
    pages: tuple[str, ...] = ()
    v: int = 1


class Markers:
    """The markers of all queries that use one topic. Any process may read; one driver at a time writes for a query.

    Holds always: a later read finds every marker whose `write` returned, or raises MarkersUnreadable.
    """

    def __init__(self, topic: str, producer: AsyncProducer, messages: MessageAdmin) -> None:
        self._topic = topic
        self._producer = producer
        self._messages = messages

    async def newest(self, query: str) -> Marker | None:
        """The marker of the last batch that was decided."""
        return valid_marker(await self._found(query, query))

    async def of_batch(self, query: str, batch: int) -> Marker | None:
        markers = await self._found(query, f"{query}/{batch}")
        return valid_marker(marker for marker in markers if marker.batch == batch)

    async def write(self, marker: Marker) -> None:
        """Write a marker; returns when a broker has stored it."""
        body = _Body(marker.query, marker.batch, marker.is_closed, marker.tokens, marker.pages)
        await self._send(
            Message(
                self._topic,
                msgspec.json.encode(body),
                tags=_MARKER_TAG,
                keys=f"{marker.query} {marker.query}/{marker.batch}",
            )
        )

    async def write_pages(self, query: str, pages: Iterable[bytes]) -> tuple[str, ...]:
        """Store lists of half messages; return the ids by which `read_pages` finds them."""
        return tuple(
            [await self._send(Message(self._topic, page, tags=_PAGE_TAG, keys=f"{query}/pages")) for page in pages]
        )

    async def read_pages(self, ids: Iterable[str]) -> list[Half]:
        pages = await asyncio.gather(*map(self._messages.by_offset_id, ids))
        return halves_of(map(_plain, pages))

    async def _send(self, message: Message) -> str:
        stored = ""

        async def send() -> None:
            nonlocal stored
            result = await self._producer.send(message)
            check_safe([result])
            stored = result.offset_message_id

        await unless_busy(send, self._producer.config.send_timeout_seconds)
        return stored

    async def _found(self, query: str, key: str) -> list[Marker]:
        try:
            answers = await self._messages.by_key(self._topic, key)
        except NoRoute:
            return []  # no marker was ever written
        for broker, error in answers.failed.items():
            raise MarkersUnreadable(
                f"{broker} cannot be asked for the markers of {query} in {self._topic}: {error}"
            ) from error
        stored = [message for messages in answers.done.values() for message in messages]
        return [marker for message in stored if (marker := _marker(message)).query == query]


class AskedMarkers:
    """Caches markers for answers to brokers, which ask about thousands of half messages of one batch at a time.

    A marker is kept for a second: an outdated one at worst leaves a question open, which the broker asks again.
    """

    def __init__(self, markers: Markers, clock: Clock) -> None:
        self._markers = markers
        self._clock = clock
        self._known: dict[tuple[str, int], tuple[float, asyncio.Task[tuple[Marker | None, Marker | None]]]] = {}

    async def get(self, query: str, batch: int) -> tuple[Marker | None, Marker | None]:
        """The marker of a batch, and the newest marker of its query."""
        now = self._clock.monotonic()
        since, reading = self._known.get((query, batch), (-_REMEMBERED_SECONDS, None))
        if reading is None or now - since >= _REMEMBERED_SECONDS:
            self._known = {key: one for key, one in self._known.items() if now - one[0] < _REMEMBERED_SECONDS}
            reading = asyncio.ensure_future(self._read(query, batch))
            self._known[query, batch] = (now, reading)
        return await asyncio.shield(reading)

    async def _read(self, query: str, batch: int) -> tuple[Marker | None, Marker | None]:
        of_batch = await self._markers.of_batch(query, batch)
        return of_batch, of_batch or await self._markers.newest(query)


def _marker(message: StoredMessage) -> Marker:
    try:
        body = msgspec.json.decode(_plain(message), type=_Body)
    except msgspec.DecodeError as error:
        raise MarkersUnreadable(
            f"{message.topic} holds a message that is no marker: {message.message_id}: {error}"
        ) from None
    if body.v != 1:
        raise MarkersUnreadable(f"{message.topic} holds a marker of version {body.v}; this sink knows version 1")
    return Marker(body.query, body.batch, body.closed, body.tokens, body.pages, message.store_timestamp)
