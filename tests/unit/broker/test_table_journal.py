"""Changes of tables in the log: whoever has the log has the tables, from whatever point it reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from downrange.auth.accounts import Accounts
from downrange.auth.user_access_control import AccessSettings, UserAccessControl
from downrange.auth.users import User
from downrange.broker.json_file import JsonFile
from downrange.broker.live_config import LiveConfig
from downrange.broker.pop.assignment import RequestModes
from downrange.broker.pop.orders import OrderStates
from downrange.broker.table_journal import JournaledTables, TableJournal
from downrange.broker.tables import Tables
from downrange.clock import ManualClock
from downrange.model.message import MessageQueue
from downrange.model.topics import TABLE_TOPIC, SubscriptionGroupConfig, TopicConfig
from downrange.protocol.bodies.pop import MessageRequestMode
from downrange.store.message_store import MessageStore
from tests.unit.broker.wired import BROKER, WiredBroker
from tests.unit.store.small_store import NOW, small_config


class Replica:
    """The tables of one broker over a log that all replicas share here."""

    def __init__(
        self, root: Path, store: MessageStore, clock: ManualClock, access: UserAccessControl | None = None
    ) -> None:
        root.mkdir(exist_ok=True)
        self.broker = WiredBroker(root, store, clock, BROKER)
        broker = self.broker
        self.tables = Tables(
            broker.topics, broker.groups, broker.offsets, broker.consumers, broker.producers, broker.filters
        )
        self.delay = broker.delay_service()
        self.orders = OrderStates(JsonFile(root / "orders.json"))
        self.modes = RequestModes(JsonFile(root / "modes.json"))
        journaled = JournaledTables(self.tables, self.delay, self.orders, broker.locks, self.modes, access)
        self.journal = TableJournal(LiveConfig(BROKER, store.config), journaled, broker.writer, clock)

    def state(self) -> tuple[object, ...]:
        tables = self.tables
        return tables.topics.table(), tables.groups.table(), tables.offsets.table(), self.delay.table()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MessageStore]:
    with MessageStore.open(small_config(tmp_path / "store"), clock=ManualClock(NOW)) as store:
        yield store


async def test_a_replica_has_what_its_master_changed(tmp_path: Path, store: MessageStore) -> None:
    clock = ManualClock(NOW)
    master, slave = Replica(tmp_path / "a", store, clock), Replica(tmp_path / "b", store, clock)
    topics, groups, offsets = master.tables.topics, master.tables.groups, master.tables.offsets
    topics.put(TopicConfig("T", 4, 4))
    topics.put(TopicConfig("gone", 1, 1))
    topics.delete("gone")
    groups.put(SubscriptionGroupConfig("G", consume_enable=False))
    groups.put(SubscriptionGroupConfig("left"))
    groups.delete("left")
    offsets.commit("T", "G", 3, 17)
    offsets.commit("T", "left", 0, 5)
    master.journal.write_offsets()
    offsets.remove_group("left")
    master.journal.write_offsets()
    master.delay.on_moved(3, 9)
    master.delay.follow({3: 9})
    slave.journal.apply()
    assert slave.state() == master.state()
    assert slave.tables.topics.get("T") == TopicConfig("T", 4, 4)
    assert slave.tables.offsets.get("T", "G", 3) == 17


async def test_records_may_be_applied_again(tmp_path: Path, store: MessageStore) -> None:
    clock = ManualClock(NOW)
    master, slave = Replica(tmp_path / "a", store, clock), Replica(tmp_path / "b", store, clock)
    for queues in range(1, 20):
        master.tables.topics.put(TopicConfig("T", queues, queues))
        master.tables.offsets.commit("T", "G", 0, queues)
        master.journal.write_offsets()
    slave.journal.apply()
    before = slave.state()
    slave.tables.topics.replace_all(Replica(tmp_path / "old", store, clock).tables.topics.table())
    slave.journal.apply_from(7)
    assert slave.state() == before == master.state()


async def test_a_request_that_changes_a_table_moves_the_end(tmp_path: Path, store: MessageStore) -> None:
    master = Replica(tmp_path / "a", store, ManualClock(NOW))
    before = master.journal.end_offset
    master.tables.offsets.commit("T", "G", 0, 1)
    assert master.journal.end_offset == before
    master.tables.groups.put(SubscriptionGroupConfig("G"))
    assert master.journal.end_offset == store.max_offset > before
    assert store.max_offset_of(TABLE_TOPIC, 0) == 1
    await master.journal.safe()


async def test_a_lock_is_known_to_whoever_becomes_master(tmp_path: Path, store: MessageStore) -> None:
    clock = ManualClock(NOW)
    master, slave = Replica(tmp_path / "a", store, clock), Replica(tmp_path / "b", store, clock)
    queue, other = MessageQueue("T", "broker-a", 0), MessageQueue("T", "broker-a", 1)
    assert master.broker.locks.lock("G", "first", [queue, other], clock.now()) == [queue, other]
    master.broker.locks.unlock("G", "first", [other])
    clock.tick(50)
    records = store.max_offset_of(TABLE_TOPIC, 0)
    master.broker.locks.lock("G", "first", [queue], clock.now())
    assert store.max_offset_of(TABLE_TOPIC, 0) == records, "who goes on holding a queue costs nothing"
    slave.journal.apply()
    clock.tick(20)
    locks = slave.broker.locks
    locks.renew_all(clock.now())
    assert locks.lock("G", "second", [queue, other], clock.now()) == [other]
    assert locks.lock("G", "first", [queue], clock.now()) == [queue]


async def test_a_mode_is_in_the_log_before_the_operator_is_answered(tmp_path: Path, store: MessageStore) -> None:
    clock = ManualClock(NOW)
    master, slave = Replica(tmp_path / "a", store, clock), Replica(tmp_path / "b", store, clock)
    pop = MessageRequestMode(topic="T", consumer_group="G", mode="POP", pop_share_queue_num=2)
    pull = MessageRequestMode(topic="T", consumer_group="other", mode="PULL")
    for mode in (pull, MessageRequestMode(topic="T", consumer_group="G", mode="PULL"), pop):
        master.modes.put(mode)
    assert master.journal.end_offset == store.max_offset
    slave.journal.apply()
    assert slave.modes.table() == master.modes.table()
    assert slave.modes.get("T", "G") == pop
    assert store.max_offset_of(TABLE_TOPIC, 0) == 3, "a slave writes nothing"


def access(secret: str) -> UserAccessControl:
    return UserAccessControl(Accounts(), AccessSettings("c"), User("inner", secret))


async def test_users_follow_at_once_and_nobody_else_can_read_them(tmp_path: Path, store: MessageStore) -> None:
    clock = ManualClock(NOW)
    on_master, on_slave, of_stranger = access("one"), access("one"), access("another")
    master = Replica(tmp_path / "a", store, clock, on_master)
    on_master.accounts.put_user(User("gone", "password of gone"))
    on_master.accounts.put_user(User("anna", "password of anna"))
    on_master.accounts.delete_user("gone")
    assert master.journal.end_offset == store.max_offset, "the operator is answered when all members have it"
    Replica(tmp_path / "b", store, clock, on_slave).journal.apply_from(0)
    assert on_slave.accounts.users == {"anna": User("anna", "password of anna")}
    Replica(tmp_path / "c", store, clock, of_stranger).journal.apply_from(0)
    assert of_stranger.accounts.users == {}
    log = b"".join(path.read_bytes() for path in (tmp_path / "store" / "commitlog").iterdir())
    assert b"password of" not in log
    assert b"anna" not in log
