"""Copies a master's tables to its slave: topics, groups, offsets, request modes, progress of delays and timers.

[SlaveSynchronize] Offsets that consumers committed at the slave while the master was away are sent to the master first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar, cast

import msgspec

from downrange.broker.pop.assignment import RequestModes
from downrange.broker.replication.lineage import check_lineage
from downrange.broker.services.delay import DelayService
from downrange.broker.services.registration import Registration
from downrange.broker.services.timer import TimerService
from downrange.broker.table_journal import TableJournal
from downrange.broker.tables import Tables
from downrange.model.errors import MQError
from downrange.model.message import TopicQueue
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.groups import SubscriptionGroupTable
from downrange.protocol.bodies.offsets import ConsumerOffsets, DelayOffsets, UpdateConsumerOffsetRequest
from downrange.protocol.bodies.pop import MessageRequestModes
from downrange.protocol.bodies.topics import TopicConfigTable
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from downrange.protocol.errors import RequestCodeNotSupported, broker_error
from downrange.store.message_store import MessageStore
from downrange.store.timer.timer_checkpoint import TimerCheckpoint
from downrange.transport.pool import Pool

log = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

_PERIOD_SECONDS: Final = 10.0
_RETRY_SECONDS: Final = 1.0
_TIMEOUT_SECONDS: Final = 3.0


@dataclass(eq=False)
class SlaveSync:
    """Keeps the tables of a slave a copy of its master's; `run` must run for as long as the broker is a slave."""

    _tables: Tables
    _delay: DelayService
    _timer: TimerService
    _modes: RequestModes
    _registration: Registration
    _pool: Pool
    _wanted: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _has_guessed: bool = field(init=False, default=False)
    """Whether topics were made from messages. Our data version then equals the master's only by chance."""
    _told: ConsumerOffsets | None = field(init=False, default=None)
    """The committed offsets that the master sent last."""
    _read: dict[RequestCode, tuple[bytes, msgspec.Struct]] = field(init=False, default_factory=dict)
    """The tables that the master sent last, as bytes and as values."""
    journal: TableJournal | None = field(init=False, default=None)
    """Applies the changes that are in the log, under a controller."""
    copy_accounts: Callable[[str], Awaitable[None]] | None = field(init=False, default=None)
    """Copies users and ACLs from the master at an address; None without ACL 2.0."""

    def received(self, queues: Iterable[tuple[str, int]]) -> None:
        """Create missing topics and queues of messages that came, so that consumers can read them at once."""
        is_news = False
        for topic, queue_id in queues:
            config = self._tables.topics.get(topic)
            if config is None:
                is_news |= bool(self._tables.topics.adopt([TopicQueue(topic, queue_id)]))
            elif queue_id >= max(config.read_queue_nums, config.write_queue_nums):
                count = queue_id + 1
                self._tables.topics.put(replace(config, read_queue_nums=count, write_queue_nums=count))
                is_news = True
        if is_news:
            self._has_guessed = True
            self._wanted.set()

    async def connected(self, store: MessageStore) -> None:
        """The master is back: check that its log continues ours, and copy the tables soon. With haMasterAddress alone,
        and no name server that knows the master, neither can be done."""
        master = self._registration.master_address
        if master is not None:
            await check_lineage(store, self._pool, master)
            self._wanted.set()

    async def run(self) -> None:
        trouble = None
        self._told = None  # that of another master, perhaps
        while True:
            pause = _RETRY_SECONDS
            try:
                if await self.sync():
                    pause, trouble = _PERIOD_SECONDS, None
            except MQError as error:
                if trouble is None:  # one line for many attempts that fail
                    log.warning("cannot copy tables master=%s reason=%s", self._registration.master_address, error)
                trouble = error
            try:
                async with asyncio.timeout(pause):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            else:
                await asyncio.sleep(_RETRY_SECONDS)  # new queues come several at a time
            self._wanted.clear()

    async def sync(self) -> bool:
        """Copy all tables once; False when the address of the master is unknown."""
        master = self._registration.master_address
        if master is None:
            return False
        applied = 0 if self.journal is None else self.journal.applied
        has_guessed, self._has_guessed = self._has_guessed, False
        topics = await self._table(master, RequestCode.GET_ALL_TOPIC_CONFIG, TopicConfigTable)
        if has_guessed or topics.data_version != self._tables.topics.data_version:
            self._tables.topics.replace_all(topics)
        groups = await self._table(master, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, SubscriptionGroupTable)
        if groups.data_version != self._tables.groups.data_version:
            self._tables.groups.replace_all(groups)
        await self._sync_offsets(master)
        delays = await self._table(master, RequestCode.GET_ALL_DELAY_OFFSET, DelayOffsets)
        if self.journal is None or not self.journal.is_used:
            self._delay.take_over(delays)
        await self._sync_modes(master)
        if self.journal is not None:
            self.journal.apply_from(applied)  # the tables may be older than the changes that came meanwhile
        if self.copy_accounts is not None:
            await self.copy_accounts(master)
        await self._sync_timer(master)
        return True

    async def _sync_modes(self, master: str) -> None:
        """Which groups pull and which pop; a master of 4.x has no such table, and does not know the request."""
        try:
            modes = await self._table(master, RequestCode.GET_ALL_MESSAGE_REQUEST_MODE, MessageRequestModes)
        except RequestCodeNotSupported:
            return
        self._modes.replace_all(modes)

    async def _sync_timer(self, master: str) -> None:
        """How far the master has delivered timer messages; a master of 4.x has none, and does not know the request."""
        try:
            checkpoint = TimerCheckpoint.decode(await self._ask(master, RequestCode.GET_TIMER_CHECK_POINT))
        except RequestCodeNotSupported:
            return
        if checkpoint is not None:
            self._timer.follow(checkpoint)

    async def _sync_offsets(self, master: str) -> None:
        table = await self._committed(master)
        newer = self._committed_here(table)
        for commit in newer:
            await self._request(master, request(RequestCode.UPDATE_CONSUMER_OFFSET, commit))
        if newer:
            log.info("offsets handed to the master count=%d", len(newer))
            table = await self._committed(master)
        self._tables.offsets.merge(table)
        self._told = table

    def _committed_here(self, table: ConsumerOffsets) -> list[UpdateConsumerOffsetRequest]:
        """Offsets that consumers committed here and not at the master, because it was away."""
        if self._told is None:
            return []
        found = []
        for name, ours in self._tables.offsets.table().offset_table.items():
            topic, _, group = name.partition("@")
            told, theirs = self._told.offset_table.get(name, {}), table.offset_table.get(name, {})
            found += [
                UpdateConsumerOffsetRequest(consumer_group=group, topic=topic, queue_id=queue_id, commit_offset=offset)
                for queue_id, offset in ours.items()
                if offset != told.get(queue_id) and offset > theirs.get(queue_id, -1)
            ]
        return found

    async def _committed(self, master: str) -> ConsumerOffsets:
        return await self._table(master, RequestCode.GET_ALL_CONSUMER_OFFSET, ConsumerOffsets)

    async def _table(self, master: str, code: RequestCode, table_type: type[T]) -> T:
        body = await self._ask(master, code)
        known = self._read.get(code)
        if known is None or known[0] != body:  # large tables take long to read, and rarely change
            known = self._read[code] = body, decode_body(table_type, body)
        return cast(T, known[1])

    async def _ask(self, master: str, code: RequestCode) -> bytes:
        return (await self._request(master, request(code))).body_bytes

    async def _request(self, master: str, command: Command) -> Command:
        reply = await self._pool.request(master, command, _TIMEOUT_SECONDS)
        if reply.code != 0:
            raise broker_error(reply.code, reply.remark)
        return reply
