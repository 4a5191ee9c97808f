from __future__ import annotations

from pathlib import Path
from typing import cast

from downrange.broker.config import BrokerConfig
from downrange.broker.groups import CommittedOffsets, Groups
from downrange.broker.json_file import JsonFile
from downrange.broker.services.delay import DelayService
from downrange.broker.services.registration import Registration
from downrange.broker.services.slave_sync import SlaveSync
from downrange.broker.services.timer import TimerService
from downrange.broker.tables import Tables
from downrange.broker.topics import Topics
from downrange.clock import ManualClock
from downrange.protocol.bodies.body import encode_body
from downrange.protocol.bodies.offsets import DelayOffsets
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command
from downrange.store.timer.timer_checkpoint import TimerCheckpoint
from downrange.transport.pool import Pool


class Copies:
    """The topics, groups and offsets of one broker, and the answers of a master that has them."""

    def __init__(self, root: Path, clock: ManualClock) -> None:
        self.topics = Topics(JsonFile(root / "topics.json"), BrokerConfig(), clock)
        self.groups = Groups(JsonFile(root / "groups.json"), clock)
        self.offsets = CommittedOffsets(JsonFile(root / "offsets.json"))
        self.master_address = "master:10911"

    async def request(self, address: str, command: Command, timeout: float) -> Command:
        if command.code == RequestCode.GET_TIMER_CHECK_POINT:
            return command.reply(body=TimerCheckpoint(read_time=1000).encoded)
        body = {
            RequestCode.GET_ALL_TOPIC_CONFIG: self.topics.table(),
            RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: self.groups.table(),
            RequestCode.GET_ALL_CONSUMER_OFFSET: self.offsets.table(),
            RequestCode.GET_ALL_DELAY_OFFSET: DelayOffsets(),
        }[RequestCode(command.code)]
        return command.reply(body=encode_body(body))

    def take_over(self, table: DelayOffsets) -> None: ...

    def follow(self, master: TimerCheckpoint) -> None: ...


async def test_a_topic_guessed_from_messages_is_asked_for_even_if_the_versions_are_the_same(tmp_path: Path) -> None:
    clock = ManualClock()
    master, slave = Copies(tmp_path / "master", clock), Copies(tmp_path / "slave", clock)
    sync = SlaveSync(
        cast(Tables, slave),
        cast(DelayService, slave),
        cast(TimerService, slave),
        cast(Registration, slave),
        cast(Pool, master),
    )
    master.topics.ensure("orders", 4)
    sync.received([("orders", 0)])
    guessed = slave.topics.get("orders")
    assert guessed is not None
    assert guessed.read_queue_nums == 1
    assert slave.topics.data_version == master.topics.data_version
    await sync.sync()
    assert slave.topics.get("orders") == master.topics.get("orders") != guessed
