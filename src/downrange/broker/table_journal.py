"""Changes of a master's tables as records of its log: a slave that is elected has what was acknowledged, tables too.

A slave of RocketMQ copies whole tables every ten seconds; what changed since then is lost with its master. Here each
change of a topic, a group, a request mode, a user or an ACL is appended to a topic of its own when it is made, before
the first message that needs it, and whoever asked for it is answered when the record is as safe as a message. Committed
offsets follow in batches, a few times a second. The offset of a delay level follows the messages that were delivered: a
slave never takes messages for delivered that it does not have, and one that is elected in between finds them in its
log. Users and ACLs are sealed with the secret of the brokers' own account, as they are when a slave asks for them.

Records have absolute values and are applied in their order. So it does no harm to apply some of them again, from any
point on up to the end.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from base64 import b64decode, b64encode
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from downrange.auth.account_table import accounts_of, encoded_accounts
from downrange.auth.user_access_control import UserAccessControl
from downrange.auth.users import AccessRuleError
from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import MessageWriter
from downrange.broker.pop.assignment import RequestModes
from downrange.broker.pop.orders import OrderInfoTable, OrderStates
from downrange.broker.queue_locks import LockChange, QueueLocks
from downrange.broker.services.delay import DelayService
from downrange.broker.tables import Tables
from downrange.clock import Clock
from downrange.model.message import MessageQueue, TopicQueue
from downrange.model.message_id import pack_host
from downrange.model.record import CorruptRecord
from downrange.model.topics import TABLE_TOPIC, SubscriptionGroupConfig, TopicConfig
from downrange.protocol.bodies.body import Body, BodyError, decode_body, encode_body
from downrange.protocol.bodies.data_version import DataVersion
from downrange.protocol.bodies.fields import Int32, Int64
from downrange.protocol.bodies.offsets import ConsumerOffsets
from downrange.protocol.bodies.pop import MessageRequestMode
from downrange.protocol.bodies.users import AccountTable
from downrange.protocol.codes import ResponseCode
from downrange.protocol.errors import BrokerError
from downrange.protocol.sealing import NONCE_SIZE, SealError, seal, unseal
from downrange.store.config import BrokerRole
from downrange.store.kept_message import read_kept
from downrange.store.new_message import NewMessage, PutMessageStatus

log = logging.getLogger(__name__)

_QUEUE: Final = TopicQueue(TABLE_TOPIC, 0)
_OFFSETS_SECONDS: Final = 0.05
_READ: Final = 256
# Tables are saved seconds after they changed: after a crash, changes of the last minutes may not be in their files.
_UNSAVED_MILLIS: Final = 120_000
# How many records are applied again when this broker's log may have been cut.
_CUT_RECORDS: Final = 2000


class LockedQueue(Body, frozen=True, kw_only=True):
    """A queue that a consumer of a group holds, or none if `client_id` is missing."""

    group: str
    topic: str
    broker_name: str
    queue_id: Int32
    client_id: str | None = None


class TableChange(Body, frozen=True, kw_only=True):
    """One record: what changed. Members that did not are missing."""

    topics: dict[str, TopicConfig] | None = None
    deleted_topics: tuple[str, ...] | None = None
    topic_version: DataVersion | None = None
    groups: dict[str, SubscriptionGroupConfig] | None = None
    deleted_groups: tuple[str, ...] | None = None
    group_version: DataVersion | None = None
    offsets: ConsumerOffsets | None = None
    delay_offsets: dict[int, Int64] | None = None
    orders: OrderInfoTable | None = None
    accounts: str | None = None
    """All users and ACLs, sealed, in base 64."""
    locks: tuple[LockedQueue, ...] | None = None
    request_modes: tuple[MessageRequestMode, ...] | None = None


@dataclass(frozen=True, slots=True)
class JournaledTables:
    """The tables whose changes are written."""

    tables: Tables
    delay: DelayService
    orders: OrderStates
    locks: QueueLocks
    modes: RequestModes
    access: UserAccessControl | None = None


class TableJournal:
    """Writes changes on a master, and applies them on a slave. For the loop's thread."""

    def __init__(self, config: LiveConfig, journaled: JournaledTables, writer: MessageWriter, clock: Clock) -> None:
        self._config = config
        tables, delay, orders = journaled.tables, journaled.delay, journaled.orders
        self._tables = tables
        self._delay = delay
        self._orders = orders
        self._locks = journaled.locks
        self._modes = journaled.modes
        self._access = journaled.access
        self._is_copying = False
        self._writer = writer
        self._clock = clock
        self._host = pack_host(config.broker.broker_ip1, config.broker.listen_port)
        self.end_offset = 0
        """The end of the last record that a change of a topic, a group, a mode, an account or a lock made."""
        store = writer.store
        since = store.commit_log.last_store_timestamp - _UNSAVED_MILLIS
        self._applied = int(store.offset_by_time(*_QUEUE, since)) if store.max_offset_of(*_QUEUE) else 0
        tables.topics.on_table_change = self._topic_changed
        tables.groups.on_table_change = self._group_changed
        tables.offsets.changed = set()
        delay.on_moved = self._delivered
        orders.on_save = self._orders_saved
        journaled.locks.on_changes = self._locks_changed
        journaled.modes.on_put = self._mode_set
        if journaled.access is not None:
            journaled.access.accounts.on_change = self._accounts_changed

    def __repr__(self) -> str:
        return f"<TableJournal applied={self._applied} end={self._writer.store.max_offset_of(*_QUEUE)}>"

    # --- on a master ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write the offsets that were committed, for as long as the broker is a master."""
        self._tables.offsets.changed = set()
        while True:
            await self._clock.sleep(_OFFSETS_SECONDS)
            self.write_offsets()

    def write_offsets(self) -> None:
        """Write the offsets that were committed since the last time."""
        if self._tables.offsets.changed:
            self._write(TableChange(offsets=self._tables.offsets.take_changed()))

    async def safe(self) -> None:
        """Wait until all changes of topics, groups and locks are as safe as messages that were acknowledged."""
        future: asyncio.Future[PutMessageStatus] = asyncio.get_running_loop().create_future()

        def tell(status: PutMessageStatus) -> None:
            if not future.done():
                future.set_result(status)

        if not self._writer.makes_wait:
            return
        self._writer.tell_when_safe(self.end_offset, tell)
        status = await future
        if status is not PutMessageStatus.PUT_OK:
            raise BrokerError(
                f"the change was made and is perhaps lost again if this broker fails now: {status.value}",
                ResponseCode.FLUSH_SLAVE_TIMEOUT,
            )

    def _topic_changed(self, topic: str, config: TopicConfig | None) -> None:
        version = self._tables.topics.data_version
        if config is None:
            self._write_at_once(TableChange(deleted_topics=(topic,), topic_version=version))
        else:
            self._write_at_once(TableChange(topics={topic: config}, topic_version=version))

    def _group_changed(self, group: str, config: SubscriptionGroupConfig | None) -> None:
        version = self._tables.groups.data_version
        if config is None:
            self._write_at_once(TableChange(deleted_groups=(group,), group_version=version))
        else:
            self._write_at_once(TableChange(groups={group: config}, group_version=version))

    def _locks_changed(self, changes: Sequence[LockChange]) -> None:
        locks = tuple(
            LockedQueue(
                group=change.group,
                topic=change.queue.topic,
                broker_name=change.queue.broker_name,
                queue_id=change.queue.queue_id,
                client_id=change.client_id,
            )
            for change in changes
        )
        self._write_at_once(TableChange(locks=locks))

    def _mode_set(self, mode: MessageRequestMode) -> None:
        self._write_at_once(TableChange(request_modes=(mode,)))

    def _accounts_changed(self) -> None:
        access = self._access
        if access is not None and access.inner is not None and not self._is_copying:
            text = encoded_accounts(access.accounts.users.values(), access.accounts.acls.values())
            sealed = seal(text, access.inner.password.encode(), TABLE_TOPIC, secrets.token_bytes(NONCE_SIZE))
            self._write_at_once(TableChange(accounts=b64encode(sealed).decode()))

    def _delivered(self, level: int, offset: int) -> None:
        self._write(TableChange(delay_offsets={level: offset}))

    def _orders_saved(self) -> None:
        self._write(TableChange(orders=self._orders.table()))

    def _write_at_once(self, change: TableChange) -> None:
        self.end_offset = self._write(change) or self.end_offset

    def _write(self, change: TableChange) -> int | None:
        """Append a record; the end of it. A slave has no changes of its own."""
        if self._config.store.broker_role is BrokerRole.SLAVE:
            return None
        now = self._clock.now()
        message = NewMessage(*_QUEUE, encode_body(change), b"", now, self._host, self._host)
        result = self._writer.append_one(message)
        if result.status is not PutMessageStatus.PUT_OK:
            log.error("change of a table not written for slaves reason=%s %s", result.status.value, result.reason)
            return None
        return result.end_offset

    # --- from slave to master -------------------------------------------------------------------------------------

    def take_over(self) -> None:
        """This broker is about to be master: apply everything, and find what its predecessor delivered last.

        Whoever held a queue has a minute to say so here.
        """
        self.apply()
        self._locks.renew_all(self._clock.now())
        self._delay.skip_delivered()

    def took_over(self) -> None:
        """This broker is master now, and nothing else was stored yet: what `take_over` found is for its slaves, too."""
        self._write(TableChange(delay_offsets=self._delay.table().offset_table))

    # --- on a slave -----------------------------------------------------------------------------------------------

    def dispatched(self, queues: Collection[TopicQueue]) -> None:
        """Records are in their queues now; those of a slave came from its master, whose own tables are newer."""
        if _QUEUE in queues and self._config.store.broker_role is BrokerRole.SLAVE:
            self.apply()

    @property
    def applied(self) -> int:
        """The number of the next record to apply."""
        return self._applied

    def apply_from(self, number: int) -> None:
        """Apply records again that came while older tables were copied."""
        self._applied = min(self._applied, number)
        self.apply()

    def log_may_be_cut(self) -> None:
        """This broker was master: the next records may replace some that it wrote."""
        self._applied = max(0, self._writer.store.max_offset_of(*_QUEUE) - _CUT_RECORDS)

    @property
    def is_used(self) -> bool:
        """Whether the master writes changes at all; a master of RocketMQ does not."""
        return self._writer.store.max_offset_of(*_QUEUE) > 0

    def apply(self) -> None:
        """Apply the records that were not applied yet."""
        store = self._writer.store
        self._applied = max(self._applied, store.min_offset_of(*_QUEUE))
        while entries := store.entries(*_QUEUE, self._applied, _READ):
            for entry in entries:
                record = store.record_at(entry.physical_offset)
                try:
                    if record is not None:
                        self._apply(decode_body(TableChange, read_kept(record).message.body))
                except (CorruptRecord, BodyError, SealError, AccessRuleError) as error:
                    log.error("change of a table ignored offset=%d reason=%s", entry.physical_offset, error)
            self._applied += len(entries)

    def _apply(self, change: TableChange) -> None:
        tables = self._tables
        if change.topic_version is not None:
            tables.topics.follow(change.topics or {}, change.deleted_topics or (), change.topic_version)
        if change.group_version is not None:
            tables.groups.follow(change.groups or {}, change.deleted_groups or (), change.group_version)
        if change.offsets is not None:
            tables.offsets.follow(change.offsets)
        if change.delay_offsets is not None:
            self._delay.follow(change.delay_offsets)
        if change.orders is not None:
            self._orders.follow(change.orders)
        if change.accounts is not None and self._access is not None and self._access.inner is not None:
            text = unseal(b64decode(change.accounts), self._access.inner.password.encode(), TABLE_TOPIC)
            self._is_copying = True
            try:
                self._access.accounts.replace_all(*accounts_of(decode_body(AccountTable, text)))
            finally:
                self._is_copying = False
        for mode in change.request_modes or ():
            self._modes.follow(mode)
        for lock in change.locks or ():
            queue = MessageQueue(lock.topic, lock.broker_name, lock.queue_id)
            self._locks.follow(LockChange(lock.group, queue, lock.client_id), self._clock.now())
