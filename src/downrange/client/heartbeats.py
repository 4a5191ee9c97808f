"""Heartbeats: they tell brokers that a client lives, and which groups it belongs to."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from downrange.client.per_server import PerServer, ask_each
from downrange.clock import Clock, sleep_or_set
from downrange.protocol.bodies.body import encode_body
from downrange.protocol.bodies.groups import ConsumerData, HeartbeatData, ProducerData, UnregisterClientRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request

log = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_SECONDS: Final = 3.0

Ask = Callable[[str, Command, float], Awaitable[Command]]


class Heartbeats:
    """The groups of one client and the beats that announce them: to masters, with consumers to slaves too.

    One beat carries all groups of the client. `addresses(masters_only)` gives the brokers that the routes in use name:
    a new one gets a beat at once (`beat_soon`), all of them every `period_seconds`. Used on the session's event loop.
    """

    def __init__(
        self, client_id: str, addresses: Callable[[bool], Iterable[str]], ask: Ask, clock: Clock, period_seconds: float
    ) -> None:
        self.client_id = client_id
        self._addresses = addresses
        self._ask = ask
        self._clock = clock
        self._period_seconds = period_seconds
        self._producers: Counter[str] = Counter()
        self._consumers: dict[str, Callable[[], ConsumerData]] = {}
        self._due = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Heartbeats {self.client_id} producers={sorted(self._producers)} consumers={sorted(self._consumers)}>"

    def add_producer(self, group: str) -> None:
        """Announce a producer group; several producers of one client may share it."""
        self._producers[group] += 1
        self.beat_soon()

    async def remove_producer(self, group: str) -> None:
        """Leave the group when the last producer does; brokers that cannot be told notice the end of the connection."""
        self._producers[group] -= 1
        if self._producers[group] <= 0:
            del self._producers[group]
            header = UnregisterClientRequest(client_id=self.client_id, producer_group=group)
            await self._leave(header, masters_only=not self._consumers)

    def add_consumer(self, group: str, describe: Callable[[], ConsumerData]) -> None:
        """Announce a consumer group; `describe` is asked before every beat."""
        self._consumers[group] = describe
        self.beat_soon()

    async def remove_consumer(self, group: str) -> None:
        if self._consumers.pop(group, None) is not None:
            header = UnregisterClientRequest(client_id=self.client_id, consumer_group=group)
            await self._leave(header, masters_only=False)

    def beat_soon(self) -> None:
        """Beat at once, because a group was joined or a broker appeared."""
        self._due.set()

    async def beat(self) -> PerServer[str, Command]:
        """Tell every broker now."""
        self._due.clear()
        if not self._producers and not self._consumers:
            return PerServer()
        body = encode_body(
            HeartbeatData(
                client_id=self.client_id,
                producer_data_set=tuple(ProducerData(group) for group in sorted(self._producers)),
                consumer_data_set=tuple(describe() for describe in self._consumers.values()),
            )
        )
        outcomes = await self._tell(request(RequestCode.HEART_BEAT, body=body), not self._consumers)
        for address, error in outcomes.failed.items():
            log.info("heartbeat failed broker=%s reason=%s", address, error)
        return outcomes

    async def run(self) -> None:
        """Beat for ever: at once when due, and every period."""
        while True:
            await self.beat()
            await sleep_or_set(self._clock, self._period_seconds, self._due)

    async def _leave(self, header: UnregisterClientRequest, *, masters_only: bool) -> None:
        outcomes = await self._tell(request(RequestCode.UNREGISTER_CLIENT, header), masters_only)
        for address, error in outcomes.failed.items():
            log.info("unregister failed broker=%s reason=%s", address, error)

    async def _tell(self, command: Command, masters_only: bool) -> PerServer[str, Command]:
        return await ask_each(
            self._addresses(masters_only),
            lambda address: self._ask(address, command, HEARTBEAT_TIMEOUT_SECONDS),
        )
