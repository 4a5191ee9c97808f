"""What the broker counts, and how fast it goes: totals, rates, and the windows RocketMQ's tools ask for.

Counting happens for every message and is a few additions. Everything else is worked out when the clock ticks or when
somebody asks. Time comes in as an argument.

| window | samples | kept | asked for by |
|---|---|---|---|
| seconds | every second | 601 | rates over 10, 60 and 600 s (request 28) |
| minute | every 10 s | 7 | request 315, per topic and per topic and group |
| hour | every 10 min | 7 | 315 |
| day | every hour | 25 | 315 |
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple, Protocol

from downrange.broker.put_latencies import PutLatencies
from downrange.broker.rates import Rates, SecondSample, SecondSamples
from downrange.broker.tallies import DAY, HOUR, MINUTE, SIZE_BOUNDS, PutTally, Tallies, Tally, Window
from downrange.clock import Clock
from downrange.model.histogram import RPC_MILLIS_BOUNDS, Histogram
from downrange.protocol.bodies.statistics import BrokerStatsData, StatsItem
from downrange.protocol.codes import RequestCode, ResponseCode

# (size - 1).bit_length() -> the first bound that is not below the size. A table look-up costs half of a bisection.
_SIZE_BUCKET: Final = tuple(bisect_left(SIZE_BOUNDS, 1 << bits) for bits in range(65))
LARGE: Final = SIZE_BOUNDS[0]  # from here on a message is not in the first bucket
DELAY_SECONDS_BOUNDS: Final = (60, 600, 3600, 12 * 3600, 24 * 3600, 3 * 24 * 3600)

_LATENCY_TICKS: Final = 60
_SHORTEST_WINDOW: Final = 10
_QUARTER_MILLIS: Final = 15 * 60 * 1000
"""In every time zone midnight is at the end of a quarter of an hour."""
_PULL: Final = int(RequestCode.PULL_MESSAGE)
_SUCCESS: Final = int(ResponseCode.SUCCESS)


class DayTotals(NamedTuple):
    """A total yesterday at midnight, today at midnight, and now."""

    yesterday_morning: int
    today_morning: int
    now: int


def local_day(now: int) -> int:
    """A number that grows by at least one at every local midnight."""
    moment = time.localtime(now / 1000)
    return moment.tm_year * 366 + moment.tm_yday


class GrpcFigures(Protocol):
    """The part of a gRPC server that metrics read."""

    calls: dict[tuple[str, str], Histogram]

    @property
    def connections(self) -> int: ...
    @property
    def clients(self) -> Mapping[str, int]: ...


class Statistics:
    """Everything one broker counts, since it started.

    Handlers call the counting methods; `sample` must be called once a second (`run_statistics` does). For one thread.
    Memory follows what is in use: a topic or group that was idle for a day is forgotten until it counts again.
    """

    def __init__(self, now: int, cluster: str = "DefaultCluster", *, day_of: Callable[[int], int] = local_day) -> None:
        self.started_millis = now
        self.failed_puts = 0
        self.missed_gets = 0
        self.put_millis_max = 0
        self.get_millis_max = 0
        self.to_dlq: defaultdict[str, int] = defaultdict(int)
        self.commits: defaultdict[str, int] = defaultdict(int)
        self.rollbacks: defaultdict[str, int] = defaultdict(int)
        self.delays = Histogram(DELAY_SECONDS_BOUNDS)
        self.rpcs: dict[tuple[int, int], Histogram] = {}
        self.grpc: GrpcFigures | None = None
        """The calls of gRPC clients, if there is a gRPC port in this process."""
        self._send_times: dict[int, Histogram] = {}
        self._cluster = cluster
        self._day_of = day_of
        self._day = day_of(now)
        self._quarter = now // _QUARTER_MILLIS
        self._puts: Tallies[str, PutTally] = Tallies(PutTally)
        self._gets: Tallies[tuple[str, str], Tally] = Tallies(Tally)
        self._sent_back: Tallies[tuple[str, str], Tally] = Tallies(Tally)
        self._put_tallies = self._puts.by_key
        # Stored messages are counted by the store, queue by queue, until they are asked for: topic, messages, bytes.
        self.take_puts: Callable[[], Iterable[tuple[str, int, int]]] = tuple
        self.new_puts = 0
        """Messages that were stored and not asked for yet."""
        self._get_tallies = self._gets.by_key
        self._windows = (Window(_SHORTEST_WINDOW, 7, now), Window(600, 7, now), Window(3600, 25, now))
        self._seconds = SecondSamples()
        self._ticks = 0
        self.latencies = PutLatencies()
        self._yesterday_morning = (0, 0)
        self._today_morning = (0, 0)

    def __repr__(self) -> str:
        return f"<Statistics topics={len(self._put_tallies)} put={self.put_messages} got={self.got_messages}>"

    # Counting: called for every message or request.

    def put_large(self, topic: str, size: int) -> None:
        """A message was stored that is larger than `LARGE`; puts count as smaller than that otherwise."""
        by_size = self._put_tallies[topic].by_size
        by_size[0] -= 1
        by_size[_SIZE_BUCKET[(size - 1).bit_length()]] += 1

    def put_as_one(self, topic: str, messages: int) -> None:
        """So many messages were stored by one request: they count as one call."""
        self._put_tallies[topic].calls -= messages - 1

    def _count_puts(self) -> None:
        self.new_puts = 0
        for topic, messages, size in self.take_puts():
            tally = self._put_tallies[topic]
            tally.calls += messages
            tally.messages += messages
            tally.bytes += size
            tally.by_size[0] += messages

    def sent_together(self, code: int, requests: int, millis: float) -> None:
        """So many sends of one code came at once and were answered together: each took its share of the time."""
        histogram = self._send_times.get(code)
        if histogram is None:
            histogram = self._send_times[code] = self._histogram(code, _SUCCESS)
        if millis < 1:
            histogram.counts[0] += requests
            histogram.sum += millis
            self.latencies.counting[0] += requests
            return
        each = millis / requests
        histogram.observe(each, requests)
        self.latencies.counting[int(each)] += requests
        if each > self.put_millis_max:
            self.put_millis_max = int(each)

    def got(self, topic: str, group: str, messages: int, size: int) -> None:
        """One pull found messages."""
        tally = self._get_tallies[topic, group]
        tally.calls += 1
        tally.messages += messages
        tally.bytes += size

    def pulled_together(self, requests: int, millis: float) -> None:
        """So many pulls (11) came at once and were answered together: each took its share of the time."""
        each = millis / requests
        self._histogram(_PULL, _SUCCESS).observe(each, requests)
        self.get_latency(each)

    def get_missed(self) -> None:
        """One pull found nothing."""
        self.missed_gets += 1

    def get_latency(self, millis: float) -> None:
        if millis > self.get_millis_max:
            self.get_millis_max = int(millis)

    def sent_back(self, topic: str, group: str) -> None:
        """A consumer gave a message back to be retried."""
        tally = self._sent_back.by_key[topic, group]
        tally.calls += 1
        tally.messages += 1

    def sent_to_dlq(self, group: str) -> None:
        self.to_dlq[group] += 1

    def committed(self, topic: str, messages: int = 1) -> None:
        self.commits[topic] += messages

    def rolled_back(self, topic: str, messages: int = 1) -> None:
        self.rollbacks[topic] += messages

    def delayed(self, seconds: float, messages: int) -> None:
        """Messages were stored that ask to be delivered so much later."""
        self.delays.observe(seconds, messages)

    def rpc(self, request_code: int, response_code: int, millis: float, requests: int = 1) -> None:
        """A request was answered, or several together, which took so long each."""
        self._histogram(request_code, response_code).observe(millis, requests)

    def _histogram(self, request_code: int, response_code: int) -> Histogram:
        histogram = self.rpcs.get((request_code, response_code))
        if histogram is None:
            histogram = self.rpcs[request_code, response_code] = Histogram(RPC_MILLIS_BOUNDS)
        return histogram

    # The clock.

    def sample(self, now: int) -> None:
        """One second is over."""
        self._ticks += 1
        self._seconds.add(SecondSample(now, self.put_messages, self.found_gets, self.missed_gets, self.got_messages))
        if self._ticks % _LATENCY_TICKS == 0:
            self.latencies.end_minute()
        # By ticks, not by the wall clock: that one may jump.
        windows = self._windows if self._ticks % _SHORTEST_WINDOW == 0 else ()
        for number, window in enumerate(windows):
            if self._ticks % window.every_seconds == 0:
                window.times.append(now)
                self._count_puts()
                for tallies in (self._puts, self._gets, self._sent_back):
                    tallies.sample(number, window.kept)
        if now // _QUARTER_MILLIS != self._quarter:
            self._quarter = now // _QUARTER_MILLIS
            self._pass_midnight(self._day_of(now))

    def _pass_midnight(self, day: int) -> None:
        if day > self._day:
            self._yesterday_morning = self._today_morning
            self._today_morning = (self.put_messages, self.got_messages)
            self._day = day
        elif day < self._day - 1:
            # The clock was far ahead and has been set right. One that only wobbles at midnight must not count it twice.
            self._day = day

    def forget_topic(self, topic: str) -> None:
        """The topic was deleted."""
        self._count_puts()
        self._puts.forget_where(lambda name: name == topic)
        for tallies in (self._gets, self._sent_back):
            tallies.forget_where(lambda key: key[0] == topic)
        self.commits.pop(topic, None)
        self.rollbacks.pop(topic, None)

    def forget_group(self, group: str) -> None:
        """The group was deleted."""
        for tallies in (self._gets, self._sent_back):
            tallies.forget_where(lambda key: key[1] == group)
        self.to_dlq.pop(group, None)

    # Asking.

    @property
    def put_messages(self) -> int:
        return self._puts.messages + self.new_puts

    @property
    def put_bytes(self) -> int:
        self._count_puts()
        return self._puts.bytes

    @property
    def got_messages(self) -> int:
        return self._gets.messages

    @property
    def found_gets(self) -> int:
        return self._gets.calls

    def puts(self) -> Iterator[tuple[str, PutTally]]:
        self._count_puts()
        return iter(tuple(self._put_tallies.items()))

    def gets(self) -> Iterator[tuple[tuple[str, str], Tally]]:
        return iter(tuple(self._get_tallies.items()))

    @property
    def put_rates(self) -> Rates:
        return self._seconds.rates(lambda sample: sample.put)

    @property
    def found_rates(self) -> Rates:
        return self._seconds.rates(lambda sample: sample.found)

    @property
    def missed_rates(self) -> Rates:
        return self._seconds.rates(lambda sample: sample.missed)

    @property
    def transferred_rates(self) -> Rates:
        return self._seconds.rates(lambda sample: sample.transferred)

    @property
    def put_days(self) -> DayTotals:
        return DayTotals(self._yesterday_morning[0], self._today_morning[0], self.put_messages)

    @property
    def get_days(self) -> DayTotals:
        return DayTotals(self._yesterday_morning[1], self._today_morning[1], self.got_messages)

    def get_tps(self, topic: str, group: str) -> float:
        """Messages a second that went out to a group over the last minute."""
        tally = self._get_tallies.get((topic, group))
        return 0.0 if tally is None else self._rate(tally, MINUTE, 1).tps

    def data(self, name: str, key: str) -> BrokerStatsData | None:
        """Request 315: one counter by its RocketMQ name and key; None when there is no such counter or key."""
        found = self._find(name, key)
        if found is None:
            return None
        tally, field = found
        return BrokerStatsData(
            stats_minute=self._rate(tally, MINUTE, field),
            stats_hour=self._rate(tally, HOUR, field),
            stats_day=self._rate(tally, DAY, field),
        )

    def _find(self, name: str, key: str) -> tuple[Tally, int] | None:
        self._count_puts()
        topic, _, group = key.partition("@")
        tally: Tally | None
        match name:
            case "TOPIC_PUT_NUMS" | "TOPIC_PUT_SIZE":
                tally = self._put_tallies.get(key)
            case "GROUP_GET_NUMS" | "GROUP_GET_SIZE":
                tally = self._get_tallies.get((topic, group))
            case "SNDBCK_PUT_NUMS":
                tally = self._sent_back.by_key.get((topic, group))
            case "BROKER_PUT_NUMS":
                tally = self._puts.whole if key == self._cluster else None
            case "BROKER_GET_NUMS":
                tally = self._gets.whole if key == self._cluster else None
            case _:
                return None
        return None if tally is None else (tally, 2 if name.endswith("_SIZE") else 1)

    def _rate(self, tally: Tally, window: int, field: int) -> StatsItem:
        return self._windows[window].rate_of(tally.windows[window], field)


async def run_statistics(statistics: Statistics, clock: Clock) -> None:
    """Let the statistics see every second, for ever."""
    while True:
        await clock.sleep(1)
        statistics.sample(clock.now())
