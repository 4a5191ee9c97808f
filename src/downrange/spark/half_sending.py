"""Sends the half messages of a task, and ends them when the driver has decided."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, TypeVar

from downrange.client.errors import ClientCode, code_of
from downrange.client.producer.transaction_producer import AsyncTransactionProducer, HalfSent, LocalTransactionState
from downrange.model.errors import MQError
from downrange.model.message import Message, MessageQueue
from downrange.spark.half_message_lists import Half, HalfList
from downrange.spark.sink_sending import check_safe, queue_of, unless_busy

log = logging.getLogger(__name__)

HALVES_PER_REQUEST: Final = 32
"""Half messages cannot be sent in batches; this many count as one request in flight."""
MAX_ENDS: Final = 256

_OUR_CODES: Final = frozenset(map(int, ClientCode))

T = TypeVar("T")


class HalfSending:
    """Sends the half messages of one task, each alone, and remembers them so that they can be ended.

    Holds always: when `put` returns or raises, no send is under way. Used on one event loop.
    """

    def __init__(self, producer: AsyncTransactionProducer, *, max_in_flight: int, check_after_seconds: int) -> None:
        self._producer = producer
        self._max_in_flight = max_in_flight * HALVES_PER_REQUEST
        self._check_after_seconds = check_after_seconds
        self._queues: dict[str, tuple[MessageQueue, ...]] = {}
        self.sent = HalfList()

    async def put(self, messages: Iterable[Message]) -> None:
        ordered: dict[MessageQueue, list[tuple[Message, MessageQueue | None]]] = {}
        chains: list[Sequence[tuple[Message, MessageQueue | None]]] = []
        for message in messages:
            if message.sharding_key:
                queue = await queue_of(message, self._producer, self._queues)
                ordered.setdefault(queue, []).append((message, queue))
            else:
                chains.append(((message, None),))
        await in_chains([*ordered.values(), *chains], self._send, self._max_in_flight)

    async def finish(self) -> None:
        """Nothing to do: all sends were acknowledged when `put` returned."""

    async def give_up(self) -> None:
        """Nothing to do: no send is under way."""

    async def _send(self, one: tuple[Message, MessageQueue | None]) -> None:
        message, queue = one

        async def send() -> None:
            sent = await self._producer.send_half(message, queue, check_immunity_seconds=self._check_after_seconds)
            self.sent.add(Half(sent, queue is not None))
            check_safe([sent.result])

        await unless_busy(send, self._producer.config.send_timeout_seconds)


async def end_halves(
    producer: AsyncTransactionProducer,
    halves: Iterable[Half],
    state: LocalTransactionState,
    is_to_end: Callable[[HalfSent], Awaitable[bool]] | None = None,
) -> int:
    """End transactions, ordered ones of a queue one after the other; return how many. Raises the first error at last.

    A transaction that a broker refuses to end is left to the check, in which the broker asks about it.
    """
    ordered: dict[MessageQueue, list[HalfSent]] = {}
    chains: list[Sequence[HalfSent]] = []
    for half in halves:
        if half.is_ordered and state is LocalTransactionState.COMMIT:
            ordered.setdefault(half.sent.result.queue, []).append(half.sent)
        else:
            chains.append((half.sent,))
    for chain in ordered.values():  # a broker has one queue of half messages: offsets in it are the order of sending
        chain.sort(key=lambda sent: sent.state_table_offset)
    ended = refused = 0

    async def end(sent: HalfSent) -> None:
        nonlocal ended, refused
        if is_to_end is not None and not await is_to_end(sent):
            return
        try:
            await unless_busy(lambda: producer.end(sent, state, confirm=True), producer.config.send_timeout_seconds)
            ended += 1
        except MQError as error:
            code = code_of(error)
            if code is None or code in _OUR_CODES:
                raise
            refused += 1
            if refused == 1:
                log.warning("transaction not ended, left to the check id=%s reason=%s", sent.transaction_id, error)

    await in_chains([*ordered.values(), *chains], end, MAX_ENDS)
    if refused:
        log.warning("transactions left to the check count=%d of=%d", refused, ended + refused)
    return ended


async def in_chains(chains: Sequence[Sequence[T]], work: Callable[[T], Awaitable[None]], max_at_once: int) -> None:
    """Call `work` for the members of many chains at a time, but for the members of each chain one after the other.

    After an error no more work is started; the error is raised when all work that was started has ended.
    """
    waiting = iter(chains)
    errors: list[MQError] = []

    async def worker() -> None:
        for chain in waiting:
            for one in chain:
                if errors:
                    return
                try:
                    await work(one)
                except MQError as error:
                    errors.append(error)

    await asyncio.gather(*(worker() for _ in range(min(len(chains), max_at_once))))
    if errors:
        raise errors[0]
