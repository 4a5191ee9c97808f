"""Traces of sends and deliveries, written to the trace topic in the background. Encoding: client/trace.py."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, NamedTuple

from downrange.client.namespace import unwrap
from downrange.client.producer.hooks import SendContext
from downrange.client.producer.retry import SendKind
from downrange.client.trace import DEFAULT_REGION, encode_end_transaction, encode_pub
from downrange.clock import Clock
from downrange.model.errors import MQError
from downrange.model.message import Message
from downrange.model.properties import KEY_SEPARATOR

log = logging.getLogger(__name__)

MAX_TRACE_BYTES: Final = 128_000
FLUSH_SECONDS: Final = 0.5
MAX_WAITING: Final = 20_000
_MAX_BODY_CHARACTERS: Final = 118_000
_MAX_KEYS_CHARACTERS: Final = 10_000  # three bytes each at worst, and properties end at 32,767


class _Report(NamedTuple):
    text: str
    keys: tuple[str, ...]


class TraceWriter:
    """Writes trace entries, several in one message; for producers it is a send hook.

    Holds always: it never makes a send or a callback fail or wait. What cannot be written, or comes faster than it can
    be, is dropped with a warning. Made on the client's event loop; `add` may be called from any thread.
    """

    def __init__(
        self,
        send: Callable[[Message], Awaitable[object]],
        close: Callable[[], Awaitable[None]],
        clock: Clock,
        topic: str,
    ) -> None:
        self._send = send
        self._close = close
        self._clock = clock
        self._topic = topic
        self._waiting: deque[_Report] = deque()
        self._loop = asyncio.get_running_loop()
        self._has_work = asyncio.Event()
        self._dropped = 0
        self._task = asyncio.create_task(self._run(), name="downrange trace")

    def __repr__(self) -> str:
        return f"<TraceWriter {self._topic} waiting={len(self._waiting)} dropped={self._dropped}>"

    def before_send(self, context: SendContext) -> None:
        """Nothing is traced before the attempt has ended."""

    def after_send(self, context: SendContext) -> None:
        if context.kind is SendKind.ONEWAY or not context.results or not context.trace_on:
            return
        group = unwrap(context.namespace, context.producer_group)
        for message, result in zip(context.messages, context.results, strict=True):
            text = encode_pub(
                timestamp=context.started,
                region_id=context.region_id or DEFAULT_REGION,
                group=group,
                message=message,
                message_id=result.message_id,
                store_host=context.broker_address,
                cost_millis=round(context.cost_millis),
                offset_message_id=result.offset_message_id,
                is_half=context.is_half,
            )
            self.add(text, result.message_id, message.keys)

    def transaction_ended(
        self,
        *,
        group: str,
        topic: str,
        message_id: str,
        tags: str | None = None,
        keys: str | None = None,
        broker_address: str,
        transaction_id: str,
        state: str,
        from_check: bool,
    ) -> None:
        """Trace the end of a transaction; `state` is RocketMQ's name for it: COMMIT_MESSAGE, …"""
        text = encode_end_transaction(
            timestamp=self._clock.now(),
            group=group,
            topic=topic,
            message_id=message_id,
            tags=tags,
            keys=keys,
            store_host=broker_address,
            transaction_id=transaction_id,
            state=state,
            from_check=from_check,
        )
        self.add(text, message_id, keys)

    def add(self, text: str, message_id: str, keys: str | None) -> None:
        """Write an entry soon, to be found by the message's id and by each of its keys."""
        if len(self._waiting) >= MAX_WAITING:
            self._dropped += 1
            return
        found_by = tuple(key for key in (message_id, *(keys or "").split(KEY_SEPARATOR)) if key)
        self._waiting.append(_Report(text, found_by))
        if not self._has_work.is_set():
            with contextlib.suppress(RuntimeError):  # the loop is closed: a callback outlived its consumer
                self._loop.call_soon_threadsafe(self._has_work.set)

    async def flush(self) -> None:
        """Write all waiting entries."""
        self._has_work.clear()
        if self._dropped:
            log.warning("traces dropped count=%d reason=they come faster than they can be written", self._dropped)
            self._dropped = 0
        for message in self._messages():
            try:
                await self._send(message)
            except MQError as error:
                log.warning("trace not written topic=%s reason=%s", self._topic, error)

    async def close(self) -> None:
        """Write all waiting entries, then stop."""
        self._task.cancel()
        await asyncio.wait([self._task])
        await self.flush()
        await self._close()

    async def _run(self) -> None:
        while True:
            await self._has_work.wait()
            await self._clock.sleep(FLUSH_SECONDS)
            await self.flush()

    def _messages(self) -> Iterator[Message]:
        """All waiting reports, in as few messages as their size allows; found by message id and key."""
        while self._waiting:
            body: list[str] = []
            keys: dict[str, None] = {}
            size = key_size = 0
            while self._waiting:
                report = self._waiting[0]
                size += len(report.text)
                key_size += sum(len(key) + 1 for key in report.keys)
                if body and (size > _MAX_BODY_CHARACTERS or key_size > _MAX_KEYS_CHARACTERS):
                    break
                body.append(report.text)
                keys |= dict.fromkeys(report.keys)
                self._waiting.popleft()
            yield Message(self._topic, "".join(body).encode(), keys=" ".join(keys))
