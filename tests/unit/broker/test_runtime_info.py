from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from downrange.broker.config import BrokerConfig
from downrange.broker.live_config import LiveConfig
from downrange.broker.runtime_info import java_double, readable_bytes, runtime_info
from downrange.broker.statistics import Statistics
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.kv_config import KVTable
from downrange.protocol.framing import FrameDecoder
from downrange.store.message_store import MessageStore
from tests.support.golden import scenarios
from tests.unit.broker.counted_puts import put
from tests.unit.store.small_store import NOW, open_store
from tests.unit.store.small_store import put as store_one

RATES = {"putTps", "getFoundTps", "getMissTps", "getTotalTps", "getTransferedTps"}


def captured() -> dict[str, str]:
    """What the genuine broker answered to the first `clusterList`."""
    row = next(row for row in scenarios()["498-json/cluster_admin"] if "response to GET_BROKER_RUNTIME" in row.note)
    return decode_body(KVTable, FrameDecoder().feed(row.frame)[0].body_bytes).table


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MessageStore]:
    with open_store(tmp_path, disk_use=lambda path: 0.35) as store:
        yield store


def info(store: MessageStore, statistics: Statistics, now: int = NOW, **options: object) -> dict[str, str]:
    config = LiveConfig(BrokerConfig(broker_name="broker-a"), store.config)
    return runtime_info(config, store, statistics, now, path_use=lambda path: 0.35, **options)  # type: ignore[arg-type]


def test_the_keys_are_those_of_a_genuine_broker(store: MessageStore) -> None:
    ours = info(store, Statistics(NOW), delay_offsets={1: (2, 2)})
    path = f"commitLogDiskRatio_{store.config.commit_log_paths[0]}"
    assert path in ours
    wanted = {re.sub(r"^commitLogDiskRatio_.*", path, key) for key in captured()}
    assert ours.keys() == wanted


def test_the_texts_have_the_form_of_a_genuine_broker(store: MessageStore) -> None:
    """Every value of the capture that holds digits reads like ours with other digits."""

    def shape(text: str) -> str:
        return re.sub(r"[0-9.]+", "#", text)

    statistics = Statistics(NOW - 117_000)
    for second in range(116):
        put(statistics, "A", 1, 200)
        statistics.got("A", "g", 1, 200)
        statistics.get_missed()
        statistics.sample(NOW - 116_000 + second * 1001)
    ours = info(store, statistics, delay_offsets={1: (2, 2)})
    for key, text in captured().items():
        if key.startswith("commitLogDiskRatio_") or key == "commitLogDirCapacity":
            continue
        assert shape(ours[key]).removeprefix("-") == shape(text).removeprefix("-"), key


def test_statistics_of_the_captured_minute_read_the_same(store: MessageStore) -> None:
    golden = captured()
    statistics = Statistics(int(golden["bootTimestamp"]))
    put(statistics, "A", 50, 12_069)
    statistics.got("A", "g", 72, 9000)
    statistics.get_latency(7.4)
    for millis, count in ((0, 14), (1, 7), (2, 2), (12, 1)):
        for _ in range(count):
            statistics.sent_together(310, 1, millis)
    now = statistics.started_millis
    for _ in range(61):
        now += 1000
        statistics.sample(now)
    ours = info(store, statistics, statistics.started_millis + 116_900, delay_offsets={1: (2, 2)})
    # The rest depends on the store, on the machine and on when exactly the samples were taken.
    other = {key for key in golden if key.startswith(("commitLog", "earliest")) and key != "commitLogDiskRatio"}
    same = golden.keys() - other - RATES
    assert {key: ours[key] for key in same} == {key: golden[key] for key in same}


def test_a_fresh_broker(store: MessageStore) -> None:
    ours = info(store, Statistics(NOW))
    assert {ours[key] for key in RATES - {"getTotalTps"}} == {"  "}
    assert ours["getTotalTps"] == "0.0 0.0 0.0"
    assert ours["putMessageTimesTotal"] == "1"
    assert ours["putMessageSizeTotal"] == "0"
    assert ours["putMessageDistributeTime"] == "null"
    assert ours["putLatency99"] == "0.00"
    assert ours["earliestMessageTimeStamp"] == "-1"
    assert ours["runtime"] == "[ 0 days, 0 hours, 0 minutes, 0 seconds ]"
    assert not any(key.startswith("scheduleMessageOffset") for key in ours)


def test_rates_stand_side_by_side_and_empty_when_unknown(store: MessageStore) -> None:
    statistics = Statistics(NOW)
    statistics.sample(NOW + 1000)
    put(statistics, "A", 30, 3000)
    statistics.get_missed()
    for second in range(2, 12):
        statistics.sample(NOW + second * 1000)
    ours = info(store, statistics)
    assert ours["putTps"] == "3.0  "
    assert ours["getMissTps"] == "0.1  "
    assert ours["getTotalTps"] == "0.1 0.0 0.0"


def test_the_store_speaks_for_itself(store: MessageStore) -> None:
    result = store_one(store, b"x" * 2000)
    ours = info(store, Statistics(NOW), NOW + 90_061_000, waited_millis=12.7)
    assert ours["commitLogMinOffset"] == "0"
    assert ours["commitLogMaxOffset"] == str(result.size)
    assert ours["earliestMessageTimeStamp"] == str(NOW)
    assert ours["remainHowManyDataToFlush"] == readable_bytes(result.size) == "2.1 KiB"
    assert ours["runtime"] == "[ 1 days, 1 hours, 1 minutes, 1 seconds ]"
    assert ours["sendThreadPoolQueueHeadWaitTimeMills"] == "12"
    assert re.fullmatch(r"Total : [\d.]+ [KMGTPE]?i?B, Free : [\d.]+ [KMGTPE]?i?B\.", ours["commitLogDirCapacity"])
    assert "remainHowManyDataToCommit" not in ours


def test_with_the_transient_pool_what_waits_for_its_commit_is_told(tmp_path: Path) -> None:
    with open_store(tmp_path, transient_store_pool_enable=True) as store:
        result = store_one(store)
        ours = info(store, Statistics(NOW), transient_buffers=4)
        assert ours["remainHowManyDataToCommit"] == f"{result.size} B"
        assert ours["remainTransientStoreBufferNumbs"] == "4"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0"),
        (-1, "-1.0"),
        (0.35, "0.35"),
        (1.1995201919232308, "1.1995201919232308"),
        (0.001, "0.001"),
        (0.00012345, "1.2345E-4"),
        (0.0001, "1.0E-4"),
        (9_999_999.9, "9999999.9"),
        (1e7, "1.0E7"),
        (-12_345_678.9, "-1.23456789E7"),
        (1.5e300, "1.5E300"),
    ],
)
def test_numbers_as_java_writes_them(value: float, text: str) -> None:
    assert java_double(value) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (252 << 30, "252.0 GiB"),
        (1 << 60, "1.0 EiB"),
    ],
)
def test_sizes_as_rocketmq_writes_them(count: int, text: str) -> None:
    assert readable_bytes(count) == text
