from __future__ import annotations

from pathlib import Path
from typing import cast

from downrange.broker.config import BrokerConfig
from downrange.broker.groups import CommittedOffsets, Groups
from downrange.broker.json_file import JsonFile
from downrange.broker.pop.assignment import RequestModes
from downrange.broker.services.delay import DelayService
from downrange.broker.services.registration import Registration
from downrange.broker.services.slave_sync import SlaveSync
from downrange.broker.services.timer import TimerService
from downrange.broker.tables import Tables
from downrange.broker.topics import Topics
from downrange.clock import ManualClock
from downrange.protocol.bodies.body import encode_body
from downrange.protocol.bodies.offsets import DelayOffsets
from downrange.protocol.bodies.pop import MessageRequestMode
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.store.timer.timer_checkpoint import TimerCheckpoint
from downrange.transport.pool import Pool


class Copies:
    """The topics, groups and offsets of one broker, and the answers of a master that has them."""

    def __init__(self, root: Path, clock: ManualClock) -> None:
        self.topics = Topics(JsonFile(root / "topics.json"), BrokerConfig(), clock)
        self.groups = Groups(JsonFile(root / "groups.json"), clock)
        self.offsets = CommittedOffsets(JsonFile(root / "offsets.json"))
        self.modes = RequestModes(JsonFile(root / "modes.json"))
        self.knows_modes = True
        self.master_address = "master:10911"

    async def request(self, address: str, command: Command, timeout: float) -> Command:
        if command.code == RequestCode.GET_TIMER_CHECK_POINT:
            return command.reply(body=TimerCheckpoint(read_time=1000).encoded)
        if command.code == RequestCode.GET_ALL_MESSAGE_REQUEST_MODE and not self.knows_modes:
            return command.reply(ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
        body = {
            RequestCode.GET_ALL_TOPIC_CONFIG: self.topics.table(),
            RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: self.groups.table(),
            RequestCode.GET_ALL_CONSUMER_OFFSET: self.offsets.table(),
            RequestCode.GET_ALL_DELAY_OFFSET: DelayOffsets(),
            RequestCode.GET_ALL_MESSAGE_REQUEST_MODE: self.modes.table(),
        }[RequestCode(command.code)]
        return command.reply(body=encode_body(body))

    def take_over(self, table: DelayOffsets) -> None: ...

    def follow(self, master: TimerCheckpoint) -> None: ...


def copier(slave: Copies, master: Copies) -> SlaveSync:
    return SlaveSync(
        cast(Tables, slave),
        cast(DelayService, slave),
        cast(TimerService, slave),
        slave.modes,
        cast(Registration, slave),
        cast(Pool, master),
    )


async def test_a_topic_guessed_from_messages_is_asked_for_even_if_the_versions_are_the_same(tmp_path: Path) -> None:
    clock = ManualClock()
    master, slave = Copies(tmp_path / "master", clock), Copies(tmp_path / "slave", clock)
    sync = copier(slave, master)
    master.topics.ensure("orders", 4)
    sync.received([("orders", 0)])
    guessed = slave.topics.get("orders")
    assert guessed is not None
    assert guessed.read_queue_nums == 1
    assert slave.topics.data_version == master.topics.data_version
    await sync.sync()
    assert slave.topics.get("orders") == master.topics.get("orders") != guessed


async def test_request_modes_are_copied_from_a_master_that_has_them(tmp_path: Path) -> None:
    clock = ManualClock()
    master, slave = Copies(tmp_path / "master", clock), Copies(tmp_path / "slave", clock)
    mode = MessageRequestMode(topic="orders", consumer_group="billing", mode="POP")
    slave.modes.put(MessageRequestMode(topic="orders", consumer_group="unknown to the master", mode="POP"))
    master.modes.put(mode)
    assert await copier(slave, master).sync()
    slave.modes.save()
    kept = RequestModes(JsonFile(tmp_path / "slave" / "modes.json"))
    assert kept.table() == master.modes.table()
    assert kept.get("orders", "billing") == mode
    master.knows_modes = False
    assert await copier(slave, master).sync(), "a master of 4.x does not know the request"
    assert slave.modes.get("orders", "billing") == mode
