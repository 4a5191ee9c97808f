"""Configuration for operators: 25 and 26."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from downrange.broker.app import load_config
from downrange.broker.config import BLACK_LIST, REMOTELY_CHANGEABLE, BrokerConfig, shown_without_effect
from downrange.broker.services.flushing import Flusher
from downrange.protocol.bodies.admin import GetBrokerConfigResponse
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.settings import MASK, Property, configure, parse_properties, read_properties, settings_of, to_properties
from downrange.store.config import StoreConfig
from tests.unit.broker.admin_broker import AdminBroker, golden_reply

UPDATE = RequestCode.UPDATE_BROKER_CONFIG


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[AdminBroker]:
    made = AdminBroker(tmp_path)
    yield made
    made.store.close()


async def shown(broker: AdminBroker) -> dict[str, str]:
    reply = await broker.ask(RequestCode.GET_BROKER_CONFIG)
    assert reply.code == 0
    return {key: given.value for key, given in parse_properties(reply.body_bytes.decode()).items()}


async def version(broker: AdminBroker) -> int:
    reply = await broker.ask(RequestCode.GET_BROKER_CONFIG)
    return reply.header(GetBrokerConfigResponse).data_version.counter


def test_every_key_that_may_be_changed_exists() -> None:
    known = {one.key for one in (*settings_of(BrokerConfig), *settings_of(StoreConfig))}
    assert known >= REMOTELY_CHANGEABLE
    assert BLACK_LIST.isdisjoint(REMOTELY_CHANGEABLE)


async def test_the_whole_configuration_is_shown_with_its_version(broker: AdminBroker) -> None:
    expected = to_properties(broker.config.broker) | to_properties(broker.config.store)
    expected["storePathCommitLog"] = str(broker.config.store.commit_log_paths[0])
    assert expected.items() <= (await shown(broker)).items()
    assert await version(broker) == 0
    captured = golden_reply("498-json/cluster_admin", 26)
    reply = await broker.ask(RequestCode.GET_BROKER_CONFIG)
    assert reply.ext_fields.keys() == captured.ext_fields.keys()
    assert parse_properties(captured.body_bytes.decode()).keys() <= (await shown(broker)).keys()


async def test_every_key_of_the_genuine_broker_is_listed(broker: AdminBroker) -> None:
    genuine = parse_properties(golden_reply("498-json/cluster_admin", 26).body_bytes.decode()).keys()
    assert genuine - (await shown(broker)).keys() - {"brokerIP2", "namesrvAddr"} == set()  # these two were given there


async def test_keys_without_effect_are_shown_as_the_file_has_them(tmp_path: Path) -> None:
    file = tmp_path / "broker.conf"
    file.write_text("sendMessageThreadPoolNums=7\nobjectStoreSecretKey=hidden\n")
    file.chmod(0o600)
    config, _, warnings = load_config(file, {"storePathRootDir": Property(str(tmp_path / "store"))})
    table = shown_without_effect(config.without_effect)
    assert (table["sendMessageThreadPoolNums"], table["transferMsgByHeap"]) == ("7", "true")
    assert table["objectStoreSecretKey"] == MASK
    assert len(warnings) == 2


async def test_a_change_takes_effect_everywhere_at_once_and_survives_a_restart(broker: AdminBroker) -> None:
    body = b"autoCreateTopicEnable=false\nfileReservedTime=24\nmaxMessageSize=1000\ndeleteWhen=02;03\n"
    reply = await broker.ask(UPDATE, body=body)
    assert (reply.code, reply.body) == (0, b"")
    assert broker.config.broker.auto_create_topic_enable is False
    assert broker.config.store.file_reserved_time == 24
    assert broker.store.config is broker.config.store
    assert broker.store.max_message_size == 1000
    assert (await shown(broker))["fileReservedTime"] == "24"
    assert await version(broker) == 1

    saved = read_properties(broker.settings_path)
    assert saved.keys() == {"autoCreateTopicEnable", "fileReservedTime", "maxMessageSize", "deleteWhen"}
    assert configure(BrokerConfig, saved).auto_create_topic_enable is False
    assert configure(StoreConfig, saved).delete_hours() == {2, 3}


async def test_changes_of_several_requests_add_up_in_the_file(broker: AdminBroker) -> None:
    for body in (b"fileReservedTime=24", b"brokerPermission=4", b"fileReservedTime=12"):
        assert (await broker.ask(UPDATE, body=body)).code == 0
    saved = {key: given.value for key, given in read_properties(broker.settings_path).items()}
    assert saved == {"fileReservedTime": "12", "brokerPermission": "4"}
    assert await version(broker) == 3
    assert not list(broker.settings_path.parent.glob("*.tmp"))


async def test_a_file_that_was_edited_by_hand_smuggles_nothing_in(broker: AdminBroker) -> None:
    broker.settings_path.parent.mkdir(exist_ok=True)
    broker.settings_path.write_text("storePathRootDir=/elsewhere\nfileReservedTime=24\n")
    await broker.ask(UPDATE, body=b"brokerPermission=4")
    assert read_properties(broker.settings_path).keys() == {"fileReservedTime", "brokerPermission"}


@pytest.mark.parametrize("key", sorted(BLACK_LIST))
async def test_black_listed_keys_are_refused_as_captured(broker: AdminBroker, key: str) -> None:
    captured = golden_reply("498-json/cluster_admin", 25, lambda reply: reply.code != 0)
    assert captured.code == ResponseCode.NO_PERMISSION
    body = f"fileReservedTime=24\n{key}=x".encode()
    assert await broker.refused(UPDATE, body=body) == (captured.code, captured.remark)
    assert broker.config.store.file_reserved_time == 72


@pytest.mark.parametrize(
    ("body", "code", "part_of_remark"),
    [
        (b"fileReservedTime=24\nlistenPort=1", 16, "listenPort can not be updated while running; these keys can: "),
        (b"storePathRootDir=/tmp/x", 16, "storePathRootDir can not be updated"),
        (b"noSuchKey=1\nfileReservedTime=24", 16, "noSuchKey can not be updated"),
        (b"fileReservedTime=soon\nbrokerPermission=4", 1, "fileReservedTime=soon: expected a whole number"),
        (b"brokerPermission=4\nfileReservedTime=-1", 1, "fileReservedTime=-1: expected a whole number of at least 0"),
        (b"brokerPermission=8", 1, "brokerPermission=8: expected a whole number from 0 to 7"),
        (b"brokerPermission=4\ndeleteWhen=25", 1, "deleteWhen=25: expected hours from 00 to 23"),
        (b"brokerPermission=4\nmaxMessageSize=2000000", 1, "maxMessageSize=2000000: expected at most"),
        (b"autoCreateTopicEnable=perhaps", 1, "autoCreateTopicEnable=perhaps: expected true or false"),
        (b"=4", 1, "not a key=value line"),
        (b"brokerPermission=\xff", 1, "the configuration is not UTF-8 text"),
    ],
)
async def test_a_request_with_anything_wrong_changes_nothing(
    broker: AdminBroker, body: bytes, code: int, part_of_remark: str
) -> None:
    before, topics_version = await shown(broker), broker.topics.data_version
    refused_with, remark = await broker.refused(UPDATE, body=body)
    assert refused_with == code
    assert part_of_remark in remark
    assert await shown(broker) == before
    assert await version(broker) == 0
    assert broker.topics.data_version == topics_version
    assert not broker.settings_path.exists()


async def test_what_cannot_be_saved_is_not_changed(broker: AdminBroker) -> None:
    broker.settings_path.mkdir(parents=True)  # a directory where the file should be: renaming onto it fails
    (broker.settings_path / "x").touch()
    before = await shown(broker)
    code, remark = await broker.refused(UPDATE, body=b"fileReservedTime=24")
    assert code == ResponseCode.SYSTEM_ERROR
    assert str(broker.settings_path) in remark
    assert await shown(broker) == before


async def test_an_empty_request_changes_nothing(broker: AdminBroker) -> None:
    assert (await broker.ask(UPDATE, body=b"# only a comment\n")).code == 0
    assert await version(broker) == 0
    assert not broker.settings_path.exists()


async def test_a_new_permission_is_registered_at_once(broker: AdminBroker) -> None:
    announced: list[object] = []
    broker.topics.on_change = announced.append
    before = broker.topics.data_version.counter
    await broker.ask(UPDATE, body=b"fileReservedTime=24")
    assert announced == []
    await broker.ask(UPDATE, body=b"brokerPermission=2")
    assert announced == [None]
    assert broker.topics.data_version.counter == before + 1


async def test_a_new_flush_interval_counts_after_the_round_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = AdminBroker(tmp_path, flush_interval_commit_log=60_000, flush_interval_consume_queue=3_600_000)
    loop = asyncio.get_running_loop()
    flushed = asyncio.Event()

    def flush(least_pages: int) -> int:
        loop.call_soon_threadsafe(flushed.set)
        return 0

    async def flushes_within(seconds: int) -> None:
        """Moves the clock second by second; the flusher's thread may need a moment in between."""
        flushed.clear()
        for _ in range(seconds):
            broker.clock.tick(1)
            await asyncio.sleep(0.001)
        await asyncio.wait_for(flushed.wait(), 5)

    monkeypatch.setattr(broker.store, "flush_commit_log", flush)
    monkeypatch.setattr(broker.store, "log_needs_flush", lambda least_pages: True)
    flusher = Flusher(broker.store, broker.config, broker.clock)
    running = asyncio.create_task(flusher.run(lambda: None))
    while 60 not in broker.clock.sleeping:  # the first round begins before the clock moves
        await asyncio.sleep(0)
    await broker.ask(UPDATE, body=b"flushIntervalCommitLog=1000")
    await flushes_within(60)
    await flushes_within(30)
    running.cancel()
    await asyncio.wait([running])
    flusher.close()
    monkeypatch.undo()
    broker.store.close()
