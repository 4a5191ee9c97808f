from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from downrange.broker.rates import Rates
from downrange.broker.statistics import DayTotals, Statistics, local_day, run_statistics
from downrange.broker.tallies import SIZE_BOUNDS
from downrange.clock import ManualClock
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.statistics import BrokerStatsData, StatsItem
from downrange.protocol.framing import FrameDecoder
from tests.support.golden import scenarios
from tests.unit.broker.counted_puts import put

NOW = 1_794_732_390_000
NOTHING = StatsItem()


class Seconds:
    """Statistics and a clock that moves in seconds."""

    def __init__(self) -> None:
        self.now = NOW
        self.statistics = Statistics(NOW)

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1000
            self.statistics.sample(self.now)

    def data(self, name: str, key: str) -> BrokerStatsData:
        found = self.statistics.data(name, key)
        assert found is not None
        return found


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


def test_rates_are_unknown_until_there_are_samples_enough(seconds: Seconds) -> None:
    assert seconds.statistics.put_rates == Rates(None, None, None)
    seconds.run(10)
    assert seconds.statistics.put_rates == Rates(None, None, None)
    seconds.run(1)
    assert seconds.statistics.put_rates == Rates(0.0, None, None)
    seconds.run(50)
    assert seconds.statistics.put_rates == Rates(0.0, 0.0, None)
    seconds.run(539)
    assert seconds.statistics.put_rates == Rates(0.0, 0.0, None)
    seconds.run(1)
    assert seconds.statistics.put_rates == Rates(0.0, 0.0, 0.0)


def test_rates_cover_their_span_and_no_more(seconds: Seconds) -> None:
    seconds.run(1)
    put(seconds.statistics, "A", 30, 3000)
    put(seconds.statistics, "B", 30, 3000)
    seconds.run(10)
    assert seconds.statistics.put_rates == Rates(6.0, None, None)
    seconds.run(1)
    assert seconds.statistics.put_rates == Rates(0.0, None, None)
    seconds.run(49)
    assert seconds.statistics.put_rates == Rates(0.0, 1.0, None)
    seconds.run(540)
    assert seconds.statistics.put_rates == Rates(0.0, 0.0, 0.1)
    seconds.run(1)
    assert seconds.statistics.put_rates == Rates(0.0, 0.0, 0.0)


def test_pulls_count_found_missed_and_messages_apart(seconds: Seconds) -> None:
    seconds.run(1)
    seconds.statistics.got("A", "g", messages=32, size=9000)
    seconds.statistics.got("A", "h", messages=8, size=2000)
    for _ in range(5):
        seconds.statistics.get_missed()
    seconds.run(10)
    assert seconds.statistics.found_rates.ten_seconds == 0.2
    assert seconds.statistics.missed_rates.ten_seconds == 0.5
    assert seconds.statistics.transferred_rates.ten_seconds == 4.0


def test_a_clock_that_stands_still_or_runs_back_gives_no_rate(seconds: Seconds) -> None:
    for step in range(11):
        put(seconds.statistics, "A", 1, 100)
        seconds.statistics.sample(NOW - step)
    assert seconds.statistics.put_rates.ten_seconds == 0.0
    assert seconds.data("TOPIC_PUT_NUMS", "A").stats_minute == StatsItem(sum=10, tps=0.0, avgpt=1.0)


def test_a_minute_holds_six_times_ten_seconds(seconds: Seconds) -> None:
    put(seconds.statistics, "A", 12, 1200)
    assert seconds.data("TOPIC_PUT_NUMS", "A").stats_minute == NOTHING
    seconds.run(10)
    assert seconds.data("TOPIC_PUT_NUMS", "A").stats_minute == StatsItem(sum=12, tps=1.2, avgpt=12.0)
    put(seconds.statistics, "A", 48, 4800)
    seconds.run(10)
    assert seconds.data("TOPIC_PUT_NUMS", "A").stats_minute == StatsItem(sum=60, tps=3.0, avgpt=30.0)
    seconds.run(40)
    assert seconds.data("TOPIC_PUT_NUMS", "A").stats_minute == StatsItem(sum=60, tps=1.0, avgpt=30.0)
    seconds.run(10)
    assert seconds.data("TOPIC_PUT_NUMS", "A").stats_minute == StatsItem(sum=48, tps=0.8, avgpt=48.0)
    seconds.run(10)
    assert seconds.data("TOPIC_PUT_NUMS", "A").stats_minute == NOTHING
    assert seconds.data("TOPIC_PUT_NUMS", "A").stats_hour == NOTHING


def test_a_key_is_measured_from_its_own_beginning(seconds: Seconds) -> None:
    put(seconds.statistics, "old", 1, 100)
    seconds.run(25)
    put(seconds.statistics, "new", 6, 600)
    seconds.run(15)
    assert seconds.data("TOPIC_PUT_NUMS", "new").stats_minute == StatsItem(sum=6, tps=0.3, avgpt=6.0)  # 20 s, not 40
    assert seconds.data("TOPIC_PUT_NUMS", "old").stats_minute == StatsItem(sum=1, tps=1 / 40, avgpt=1.0)


def test_hours_and_days_have_their_own_samples(seconds: Seconds) -> None:
    put(seconds.statistics, "A", 7200, 720_000)
    seconds.run(600)
    data = seconds.data("TOPIC_PUT_NUMS", "A")
    assert (data.stats_hour, data.stats_day) == (StatsItem(sum=7200, tps=12.0, avgpt=7200.0), NOTHING)
    seconds.run(3000)
    data = seconds.data("TOPIC_PUT_NUMS", "A")
    item = StatsItem(sum=7200, tps=2.0, avgpt=7200.0)
    assert (data.stats_minute, data.stats_hour, data.stats_day) == (NOTHING, item, item)
    seconds.run(600)
    assert seconds.data("TOPIC_PUT_NUMS", "A").stats_hour == NOTHING
    seconds.run(23 * 3600 - 600 - 1)
    assert seconds.data("TOPIC_PUT_NUMS", "A").stats_day == StatsItem(sum=7200, tps=7200 / (23 * 3600), avgpt=7200.0)


def test_an_idle_key_that_wakes_up_counts_right(seconds: Seconds) -> None:
    """Samples of idle keys are left out: nobody must see that."""
    put(seconds.statistics, "A", 5, 500)
    seconds.run(400)
    put(seconds.statistics, "A", 6, 600)
    seconds.run(10)
    assert seconds.data("TOPIC_PUT_NUMS", "A").stats_minute == StatsItem(sum=6, tps=0.1, avgpt=6.0)


def test_sizes_groups_and_send_backs_have_their_names(seconds: Seconds) -> None:
    statistics = seconds.statistics
    put(statistics, "A", 2, 500)
    put(statistics, "B", 1, 100)
    statistics.got("A", "g", 4, 1000)
    statistics.got("A", "h", 1, 50)
    statistics.sent_back("A", "g")
    seconds.run(10)
    sums = {
        (name, key): seconds.data(name, key).stats_minute.sum
        for name, key in [
            ("TOPIC_PUT_NUMS", "A"),
            ("TOPIC_PUT_SIZE", "A"),
            ("GROUP_GET_NUMS", "A@g"),
            ("GROUP_GET_SIZE", "A@g"),
            ("SNDBCK_PUT_NUMS", "A@g"),
            ("BROKER_PUT_NUMS", "DefaultCluster"),
            ("BROKER_GET_NUMS", "DefaultCluster"),
        ]
    }
    assert list(sums.values()) == [2, 500, 4, 1000, 1, 3, 5]
    assert (statistics.get_tps("A", "g"), statistics.get_tps("A", "x")) == (0.4, 0.0)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("TOPIC_PUT_NUMS", "B"),
        ("GROUP_GET_NUMS", "A"),
        ("GROUP_GET_NUMS", "A@other"),
        ("BROKER_PUT_NUMS", "OtherCluster"),
        ("NO_SUCH_NUMS", "A"),
    ],
)
def test_what_was_never_counted_does_not_exist(seconds: Seconds, name: str, key: str) -> None:
    put(seconds.statistics, "A", 1, 100)
    seconds.statistics.got("A", "g", 1, 100)
    seconds.run(10)
    assert seconds.statistics.data(name, key) is None
    assert seconds.statistics.data("TOPIC_PUT_NUMS", "B") is None


def test_windows_agree_with_a_genuine_broker() -> None:
    """A group that began to pull less than a minute ago: 21 messages in 5 pulls over 50 s, as captured."""
    (captured,) = [
        decode_body(BrokerStatsData, FrameDecoder().feed(row.frame)[0].body_bytes)
        for row in scenarios()["498-json/cluster_admin"]
        if "response to VIEW_BROKER_STATS_DATA" in row.note and b'"sum":21,' in row.frame
    ]
    seconds = Seconds()
    seconds.run(60)
    for messages in (1, 2, 3, 5, 10):
        seconds.statistics.got("gsTopicA", "gscg_two", messages, 100 * messages)
    seconds.run(50)
    assert seconds.data("GROUP_GET_NUMS", "gsTopicA@gscg_two") == captured


def test_keys_idle_for_a_day_are_forgotten_but_totals_stay(seconds: Seconds) -> None:
    put(seconds.statistics, "idle", 5, 500)
    seconds.statistics.got("idle", "g", 3, 300)
    seconds.run(10)
    for _ in range(8639):
        put(seconds.statistics, "busy", 1, 100)
        seconds.run(10)
    assert seconds.statistics.data("TOPIC_PUT_NUMS", "idle") is not None
    seconds.run(10)
    assert seconds.statistics.data("TOPIC_PUT_NUMS", "idle") is None
    assert [topic for topic, _ in seconds.statistics.puts()] == ["busy"]
    assert list(seconds.statistics.gets()) == []
    assert (seconds.statistics.put_messages, seconds.statistics.put_bytes) == (8644, 864_400)
    assert (seconds.statistics.got_messages, seconds.statistics.found_gets) == (3, 1)


def test_deleted_topics_and_groups_are_forgotten(seconds: Seconds) -> None:
    statistics = seconds.statistics
    for topic in ("A", "B"):
        put(statistics, topic, 1, 100)
        statistics.committed(topic)
        statistics.rolled_back(topic)
        for group in ("g", "h"):
            statistics.got(topic, group, 1, 100)
            statistics.sent_back(topic, group)
    statistics.sent_to_dlq("g")
    statistics.forget_topic("A")
    assert [key for key, _ in statistics.gets()] == [("B", "g"), ("B", "h")]
    assert [key for key, _ in statistics.puts()] == ["B"]
    assert (dict(statistics.commits), dict(statistics.rollbacks)) == ({"B": 1}, {"B": 1})
    statistics.forget_group("g")
    assert [key for key, _ in statistics.gets()] == [("B", "h")]
    assert statistics.data("SNDBCK_PUT_NUMS", "B@g") is None
    assert dict(statistics.to_dlq) == {}
    assert statistics.put_messages == 2


def test_memory_follows_what_is_in_use(seconds: Seconds) -> None:
    put(seconds.statistics, "A", 1, 100)
    seconds.run(3600 * 23)
    ((_, tally),) = seconds.statistics.puts()
    assert [len(rows) // 3 for rows in tally.windows] == [7, 7, 24]


@pytest.mark.parametrize(
    ("size", "bucket"),
    [(0, 0), (1, 0), (1024, 0), (1025, 1), (4096, 1), (4097, 2), (1 << 22, 5), ((1 << 22) + 1, 6), (1 << 40, 6)],
)
def test_sizes_fall_under_the_first_bound_not_below_them(size: int, bucket: int) -> None:
    statistics = Statistics(NOW)
    put(statistics, "A", 1, size)
    ((_, tally),) = statistics.puts()
    assert [place for place, count in enumerate(tally.by_size) if count] == [bucket]
    assert len(tally.by_size) == len(SIZE_BOUNDS) + 1


def test_latencies_are_those_of_the_last_full_minute(seconds: Seconds) -> None:
    statistics = seconds.statistics
    assert statistics.latencies.counts() is None
    assert statistics.latencies.percentile(0.99) == 0.0
    for millis in (0, 0.9, 1, 9.9, 10, 49, 50, 99, 100, 200, 500, 1000, 2000, 3000, 4000, 5000, 9999, 10_000):
        statistics.sent_together(310, 1, millis)
    seconds.run(59)
    assert statistics.latencies.counts() is None
    seconds.run(1)
    assert statistics.latencies.counts() == (2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 2, 1)
    assert statistics.put_millis_max == 10_000
    seconds.run(60)
    assert statistics.latencies.counts() == (0,) * 13
    assert statistics.put_millis_max == 10_000


def test_percentiles_agree_with_a_genuine_broker(seconds: Seconds) -> None:
    """Captured: of 24 puts 14 took no time, 9 less than 10 ms, 1 longer; both percentiles were 2 ms."""
    for millis, count in ((0, 14), (1, 7), (2, 2), (12, 1)):
        for _ in range(count):
            seconds.statistics.sent_together(310, 1, millis)
    seconds.run(60)
    assert seconds.statistics.latencies.percentile(0.99) == 2.0
    assert seconds.statistics.latencies.percentile(0.999) == 2.0
    assert seconds.statistics.latencies.percentile(1.0) == 12.0
    assert seconds.statistics.latencies.percentile(0.5) == 0.0


def test_totals_are_copied_at_midnight() -> None:
    day = 86_400_000
    statistics = Statistics(3 * day + 1000, day_of=lambda now: now // day)
    put(statistics, "A", 5, 500)
    statistics.got("A", "g", 2, 200)
    statistics.sample(4 * day - 1)
    assert (statistics.put_days, statistics.get_days) == (DayTotals(0, 0, 5), DayTotals(0, 0, 2))
    statistics.sample(4 * day)
    put(statistics, "A", 1, 100)
    statistics.sample(4 * day + 1000)
    assert (statistics.put_days, statistics.get_days) == (DayTotals(0, 5, 6), DayTotals(0, 2, 2))
    statistics.sample(4 * day - 1)  # the clock wobbles around midnight
    statistics.sample(4 * day)
    assert statistics.put_days == DayTotals(0, 5, 6)
    statistics.sample(5 * day)
    assert statistics.put_days == DayTotals(5, 6, 6)


def test_a_clock_set_back_by_days_does_not_stop_the_midnights() -> None:
    day = 86_400_000
    statistics = Statistics(300 * day, day_of=lambda now: now // day)
    put(statistics, "A", 5, 500)
    statistics.sample(10 * day)
    statistics.sample(11 * day)
    assert statistics.put_days == DayTotals(0, 5, 5)


def test_days_grow_at_local_midnight() -> None:
    noon = int(time.mktime((2026, 12, 31, 12, 0, 0, 0, 0, -1))) * 1000
    hours = [local_day(noon + hour * 3_600_000) for hour in (0, 11, 13, 36)]
    assert hours[0] == hours[1] < hours[2] < hours[3]


def test_requests_are_counted_by_code_and_time() -> None:
    statistics = Statistics(NOW)
    for millis in (0.2, 1.0, 1.1, 99.0, 5000.0):
        statistics.rpc(310, 0, millis)
    statistics.rpc(11, 19, 15_000.0)
    assert statistics.rpcs[310, 0].counts == [2, 1, 0, 0, 0, 1, 0, 0, 0, 1]
    assert statistics.rpcs[310, 0].sum == pytest.approx(5101.3)
    assert statistics.rpcs[11, 19].counts[-1] == 1


async def test_the_service_samples_every_second() -> None:
    clock = ManualClock(NOW)
    statistics = Statistics(clock.now())
    service = asyncio.create_task(run_statistics(statistics, clock))
    await asyncio.sleep(0)
    await clock.advance(1)
    put(statistics, "A", 20, 2000)
    await clock.advance(9)
    assert statistics.put_rates == Rates(None, None, None)
    await clock.advance(1)
    assert statistics.put_rates.ten_seconds == 2.0
    service.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await service


def test_requests_that_were_answered_together_share_the_time() -> None:
    statistics = Statistics(0)
    statistics.sent_together(310, 64, 0.9)
    statistics.sent_together(310, 4, 8.0)
    statistics.sent_together(310, 1, 12.5)
    sends = statistics.rpcs[310, 0]
    assert sends.counts == [64, 4, 0, 0, 0, 1, 0, 0, 0, 0]
    assert sends.sum == pytest.approx(21.4)
    assert statistics.put_millis_max == 12
    for _ in range(60):
        statistics.sample(0)
    assert statistics.latencies.counts() == (64, 4, 1, *[0] * 10)

    statistics.pulled_together(8, 4.0)
    statistics.pulled_together(1, 6.5)
    assert statistics.rpcs[11, 0].counts == [8, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert statistics.get_millis_max == 6


def test_puts_are_counted_at_once_and_by_topic_when_somebody_asks(seconds: Seconds) -> None:
    statistics = seconds.statistics
    stored = [("A", 3, 5400), ("B", 1, 100), ("A", 2, 200)]

    def take() -> list[tuple[str, int, int]]:
        taken = stored[:]
        stored.clear()
        return taken

    statistics.take_puts = take
    statistics.new_puts += 6
    statistics.put_large("A", 5200)
    assert statistics.put_messages == 6
    assert stored
    tallies = {
        topic: (tally.calls, tally.messages, tally.bytes, tally.by_size[:3]) for topic, tally in statistics.puts()
    }
    assert tallies == {"A": (5, 5, 5600, [4, 0, 1]), "B": (1, 1, 100, [1, 0, 0])}
    assert statistics.put_messages == 6
    stored.append(("B", 6, 600))
    statistics.new_puts += 6
    seconds.run(10)
    assert seconds.data("TOPIC_PUT_NUMS", "B").stats_minute.sum == 7
    stored.append(("B", 1, 100))
    statistics.new_puts += 1
    statistics.forget_topic("B")
    assert statistics.put_messages == 13
    assert [topic for topic, _ in statistics.puts()] == ["A"]
