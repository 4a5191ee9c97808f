"""Registers this broker and its topics with every name server: at start, regularly, and at once after a change."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import msgspec

from downrange.broker.live_config import LiveConfig
from downrange.broker.topics import Topics
from downrange.model.errors import MQError
from downrange.model.topics import READ_WRITE, TopicConfig
from downrange.protocol.bodies.body import decode_body, encode_body
from downrange.protocol.bodies.kv_config import KVTable
from downrange.protocol.bodies.registration import (
    BrokerIdentityRequest,
    QueryDataVersionResponse,
    RegisterBrokerBody,
    RegisterBrokerRequest,
    RegisterBrokerResponse,
    encode_registration,
)
from downrange.protocol.codes import VERSION_4_9_8, RequestCode
from downrange.protocol.command import Command, request
from downrange.protocol.errors import broker_error
from downrange.transport.pool import Pool
from downrange.transport.tls import ClientTls

log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 10.0


class OneAtATime:
    """Runs one registration with a name server at a time; at most one more waits, and covers all changes until then.

    A registration has the whole table: one for each of many new topics would cost the square of their number.
    """

    def __init__(self, register: Callable[[], Awaitable[bool]]) -> None:
        self._register = register
        self._busy = asyncio.Lock()
        self._next: asyncio.Task[bool] | None = None

    async def register(self) -> bool:
        """Register all changes until now; return whether it worked."""
        if self._next is None:
            self._next = asyncio.create_task(self._take_turn())
        return await asyncio.shield(self._next)

    async def _take_turn(self) -> bool:
        async with self._busy:
            self._next = None  # later changes need another registration
            return await self._register()


class Registration:
    """Keeps this broker registered. A name server that cannot be reached is tried again and does not delay others."""

    def __init__(self, config: LiveConfig, topics: Topics, pool: Pool) -> None:
        self._config = config
        self._topics = topics
        self._pool = pool
        self._changed = asyncio.Event()
        self._turns: dict[str, OneAtATime] = {}
        self._is_leaving = False
        self._body = b""
        self._body_shows: tuple[object, ...] = ()  # the versions from which `_body` was made
        self.is_on = not config.broker.enable_controller_mode
        """Whether name servers may know this broker: in controller mode only when it has a role."""
        self.master_address: str | None = None
        self.master_ha_address: str | None = None
        topics.on_change = lambda topic: self._changed.set()

    @property
    def tls(self) -> ClientTls | None:
        """TLS for connections to the servers that a registration names."""
        return self._pool.tls

    @property
    def _period_seconds(self) -> float:
        return max(10_000, min(self._config.broker.register_name_server_period, 60_000)) / 1000

    @property
    def _timeout_seconds(self) -> float:
        return self._config.broker.register_broker_timeout_mills / 1000

    async def run(self) -> None:
        """Register at regular intervals, and whenever a topic changed."""
        async with asyncio.TaskGroup() as registering:  # not awaited: a silent name server must not delay the others
            pause = _FIRST_PAUSE_SECONDS
            while True:
                is_forced = await self._is_changed_within(pause) or self._config.broker.force_register
                registering.create_task(self.register_changes() if is_forced else self.register(is_forced=False))
                pause = self._period_seconds

    async def _is_changed_within(self, seconds: float) -> bool:
        """Wait for a change of topics that is not registered yet; return whether one came in time."""
        try:
            # Not wait_for: in Python 3.11 it loses a cancellation that comes in the same turn as the change.
            async with asyncio.timeout(seconds):
                while True:
                    await self._changed.wait()
                    # Topics often change several at a time: one registration covers all of them.
                    await asyncio.sleep(0)
                    if self._changed.is_set():
                        self._changed.clear()
                        return True
        except TimeoutError:
            return False

    async def register_changes(self) -> int:
        """Register all changes until now with all name servers; return the number that succeeded."""
        self._changed.clear()
        servers = self._config.broker.namesrv_addresses
        return sum(await asyncio.gather(*(self._turn_of(server).register() for server in servers)))

    def _turn_of(self, server: str) -> OneAtATime:
        if server not in self._turns:
            self._turns[server] = OneAtATime(partial(self._register_with, server))
        return self._turns[server]

    async def register(self, *, is_forced: bool = True) -> int:
        """Register with all name servers at the same time; return the number that succeeded."""
        servers = self._config.broker.namesrv_addresses
        results = await asyncio.gather(*(self._register_with(server, is_forced) for server in servers))
        return sum(results)

    async def unregister(self) -> None:
        self._is_leaving = True  # registrations that still wait must not bring us back
        broker = self._config.broker
        command = request(RequestCode.UNREGISTER_BROKER, self._identity())
        for server in broker.namesrv_addresses:
            try:
                await self._ask(server, command, 3.0)
            except MQError as error:
                log.warning("cannot unregister namesrv=%s reason=%s", server, error)

    async def _register_with(self, server: str, is_forced: bool = True) -> bool:
        if self._is_leaving or not self.is_on:
            return False
        try:
            if not is_forced and not await self._has_another_version(server):
                return True
            reply = await self._ask(server, self._registration(), self._timeout_seconds)
        except MQError as error:
            log.warning("cannot register namesrv=%s reason=%s", server, error)
            return False
        header = reply.header(RegisterBrokerResponse)
        if not self._config.broker.enable_controller_mode:  # else the controller says who is master
            self.master_address = header.master_addr or self.master_address
            self.master_ha_address = header.ha_server_addr or self.master_ha_address
        if reply.body:
            self._topics.set_order_topics(set(decode_body(KVTable, reply.body_bytes).table))
        return True

    async def _has_another_version(self, server: str) -> bool:
        command = request(RequestCode.QUERY_DATA_VERSION, self._identity(), body=encode_body(self._topics.data_version))
        reply = await self._ask(server, command, self._timeout_seconds)
        return reply.header(QueryDataVersionResponse).changed

    async def _ask(self, server: str, command: Command, timeout: float) -> Command:
        reply = await self._pool.request(server, command, timeout)
        if reply.code != 0:
            raise broker_error(reply.code, reply.remark)
        return reply

    def _identity(self) -> BrokerIdentityRequest:
        broker = self._config.broker
        return BrokerIdentityRequest(
            broker_name=broker.broker_name,
            broker_addr=broker.address,
            cluster_name=broker.broker_cluster_name,
            broker_id=broker.broker_id,
        )

    def _registration(self) -> Command:
        broker = self._config.broker
        shows = self._topics.data_version, broker.broker_permission, broker.compressed_register
        if shows != self._body_shows:  # encoding thousands of topics takes longer than a sender should wait
            self._body, self._body_shows = self._encoded_topics(), shows
        header = RegisterBrokerRequest(
            broker_name=broker.broker_name,
            broker_addr=broker.address,
            cluster_name=broker.broker_cluster_name,
            ha_server_addr=self._config.ha_address,
            broker_id=broker.broker_id,
            compressed=broker.compressed_register,
            body_crc32=zlib.crc32(self._body) & 0x7FFFFFFF,
        )
        return request(RequestCode.REGISTER_BROKER, header, body=self._body)

    def _encoded_topics(self) -> bytes:
        broker = self._config.broker
        table = self._topics.table()
        if broker.broker_permission & READ_WRITE != READ_WRITE:
            # A broker that may not be read or written registers this permission for each of its topics.
            limited: dict[str, TopicConfig] = {
                name: replace(config, perm=broker.broker_permission)
                for name, config in table.topic_config_table.items()
            }
            table = msgspec.structs.replace(table, topic_config_table=limited)
        body = RegisterBrokerBody(topic_config_serialize_wrapper=table)
        return encode_registration(body, VERSION_4_9_8) if broker.compressed_register else encode_body(body)
