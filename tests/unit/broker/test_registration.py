"""When a broker registers, and that it stops doing so when told."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from downrange.broker.config import BrokerConfig
from downrange.broker.json_file import JsonFile
from downrange.broker.live_config import LiveConfig
from downrange.broker.services.registration import Registration
from downrange.broker.topics import Topics
from downrange.clock import ManualClock
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.registration import RegisterBrokerBody
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command
from downrange.store.config import StoreConfig
from downrange.transport.pool import Pool


@pytest.mark.parametrize("turns", range(6))
async def test_it_stops_also_when_a_topic_changes_at_that_moment(tmp_path: Path, turns: int) -> None:
    config = LiveConfig(BrokerConfig(broker_name="broker-a"), StoreConfig(store_path_root_dir=tmp_path))
    topics = Topics(JsonFile(tmp_path / "topics.json"), config.broker, ManualClock())
    service = asyncio.create_task(Registration(config, topics, Pool()).run())
    await asyncio.sleep(0)
    topics.ensure("new", 1)
    for _ in range(turns):
        await asyncio.sleep(0)
    service.cancel()
    done, _ = await asyncio.wait([service], timeout=1)
    assert done, "the service runs on"
    assert service.cancelled()


class HeldNamesrv(Pool):
    """Keeps every registration until it is let go, and remembers how many topics each told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[set[str]] = []
        self.asked = asyncio.Event()
        self.go = asyncio.Event()

    async def request(self, address: str, command: Command, timeout: float) -> Command:
        if command.code == RequestCode.REGISTER_BROKER:
            table = decode_body(RegisterBrokerBody, command.body_bytes).topic_config_serialize_wrapper
            self.told.append({name for name in table.topic_config_table if name.startswith("new")})
            self.asked.set()
            await self.go.wait()
        return command.reply()


async def turns() -> None:
    """More turns of the loop than a registration takes that is answered at once."""
    for _ in range(30):
        await asyncio.sleep(0)


@pytest.fixture
def namesrv() -> HeldNamesrv:
    return HeldNamesrv()


@pytest.fixture
def topics(tmp_path: Path) -> Topics:
    return Topics(JsonFile(tmp_path / "topics.json"), BrokerConfig(), ManualClock())


@pytest.fixture
def registration(tmp_path: Path, topics: Topics, namesrv: HeldNamesrv) -> Registration:
    broker = BrokerConfig(broker_name="broker-a", namesrv_addr="127.0.0.1:1")
    return Registration(LiveConfig(broker, StoreConfig(store_path_root_dir=tmp_path)), topics, namesrv)


async def test_changes_during_a_registration_share_the_next_one(
    registration: Registration, topics: Topics, namesrv: HeldNamesrv
) -> None:
    waiting = []
    for number in range(50):
        topics.ensure(f"new-{number}", 1)
        waiting.append(asyncio.create_task(registration.register_changes()))
        if number == 0:
            await namesrv.asked.wait()
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    namesrv.go.set()
    assert await asyncio.gather(*waiting) == [1] * 50
    assert [len(names) for names in namesrv.told] == [1, 50]


async def test_a_name_server_that_does_not_answer_keeps_no_change_from_another(tmp_path: Path, topics: Topics) -> None:
    class OneIsSilent(HeldNamesrv):
        async def request(self, address: str, command: Command, timeout: float) -> Command:
            if address == "127.0.0.1:2":
                await asyncio.Event().wait()
            return await super().request(address, command, timeout)

    namesrv = OneIsSilent()
    namesrv.go.set()
    broker = BrokerConfig(broker_name="broker-a", namesrv_addr="127.0.0.1:1;127.0.0.1:2")
    registration = Registration(LiveConfig(broker, StoreConfig(store_path_root_dir=tmp_path)), topics, namesrv)
    service = asyncio.create_task(registration.run())
    for number in range(3):
        await turns()
        topics.ensure(f"new-{number}", 1)
    await turns()
    assert [len(names) for names in namesrv.told] == [1, 2, 3]
    service.cancel()
    await asyncio.wait([service], timeout=1)
    assert service.cancelled()


async def test_a_change_that_somebody_registers_is_not_registered_twice(
    registration: Registration, topics: Topics, namesrv: HeldNamesrv
) -> None:
    namesrv.go.set()
    service = asyncio.create_task(registration.run())
    await turns()
    topics.ensure("new-1", 1)
    assert await registration.register_changes() == 1
    await turns()
    assert namesrv.told == [{"new-1"}]
    topics.ensure("new-2", 1)  # and nobody asks
    await turns()
    assert namesrv.told == [{"new-1"}, {"new-1", "new-2"}]
    service.cancel()
    await asyncio.wait([service], timeout=1)


async def test_who_waits_while_the_broker_leaves_does_not_bring_it_back(
    registration: Registration, namesrv: HeldNamesrv
) -> None:
    first = asyncio.create_task(registration.register_changes())
    await namesrv.asked.wait()
    second = asyncio.create_task(registration.register_changes())
    await asyncio.sleep(0)
    await registration.unregister()
    namesrv.go.set()
    assert (await first, await second) == (1, 0)
    assert len(namesrv.told) == 1


async def test_a_registration_shows_the_topics_and_the_permission_of_its_moment(
    registration: Registration, topics: Topics
) -> None:
    def told() -> dict[str, int]:
        table = decode_body(RegisterBrokerBody, registration._registration().body_bytes).topic_config_serialize_wrapper
        return {name: config.perm for name, config in table.topic_config_table.items() if name.startswith("new")}

    topics.ensure("new-1", 1)
    assert told() == told() == {"new-1": 6}
    topics.ensure("new-2", 1)
    assert told() == {"new-1": 6, "new-2": 6}
    registration._config.broker = replace(registration._config.broker, broker_permission=4)
    assert told() == {"new-1": 4, "new-2": 4}
    topics.delete("new-1")
    assert told() == {"new-2": 4}
