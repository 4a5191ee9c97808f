"""The figures of a broker as Prometheus metric families with the names and labels of RocketMQ 5.

Imported at the first scrape only, see `metrics.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from downrange.broker.metrics import MetricSources, PopFigures
from downrange.broker.tallies import SIZE_BOUNDS, PutTally
from downrange.model.histogram import RPC_MILLIS_BOUNDS
from downrange.model.topics import DLQ_PREFIX, RETRY_PREFIX, SYSTEM_GROUP_PREFIX, is_system_topic
from downrange.protocol.codes import LanguageCode, RequestCode, ResponseCode

PREFIX: Final = "rocketmq_"
OWN_PREFIX: Final = "downrange_"  # of what RocketMQ does not have
Labels = dict[str, str]
_PIECE: Final = 64  # samples per piece of text
_NORMAL: Final = {"message_type": "normal"}  # the type of all messages: they are counted by topic alone
_STORAGE: Final = {"storage_type": "local", "storage_medium": "disk"}
_TIMER_BOUNDS: Final = (5, 60, 300, 900, 3600, 14_400, 28_800, 86_400)
_TIMER_GAUGES: Final = {
    "timer_enqueue_lag": "Timer messages that are stored and not on the wheel yet.",
    "timer_enqueue_latency": "Age of the oldest of them in ms.",
    "timer_dequeue_lag": "Timer messages that are due and not delivered yet.",
    "timer_dequeue_latency": "How late the oldest of them is in ms.",
    "timing_messages": "Timer messages that wait.",
    "timer_message_snapshot": "Timer messages that are due within this time.",
}
_CONSUME_MODES: Final = {"CONSUME_ACTIVELY": "pull", "CONSUME_PASSIVELY": "push"}
_REQUEST_NAMES: Final = {int(code): code.name.lower() for code in RequestCode}
# Of two names for one code the later one counts, as in RocketMQ: 209 and 210 are answers to pops.
_RESPONSE_NAMES: Final = {int(code): name.lower() for name, code in ResponseCode.__members__.items()}
_LANGUAGE_NAMES: Final = {int(code): code.name.lower() for code in LanguageCode}


class _Families(Collector):
    """Wraps finished families for `generate_latest`."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class BrokerCollector:
    """Reads the sources at a scrape and makes the text of the page. For the broker's thread.

    Every family is on the page of every scrape, even without a sample.
    """

    content_type: Final = CONTENT_TYPE_LATEST

    def __init__(self, sources: MetricSources) -> None:
        self._sources = sources
        self._process = ProcessCollector(registry=None)
        broker = sources.config.broker
        self._base = {"cluster": broker.broker_cluster_name, "node_type": "broker", "node_id": broker.broker_name}

    def pieces(self) -> Iterator[bytes]:
        """Yield the page in pieces that take a millisecond to make: between two, the broker can serve requests."""
        yield from self._broker()
        yield from self._incoming()
        yield from self._outgoing()
        yield from self._connections()
        yield from self._lag()
        yield from self._transactions()
        yield from self._timer()
        yield from self._pop()
        yield from self._storage()
        yield from self._latencies()
        yield from self._acceleration()
        yield from self._refused()
        yield from self._replica()
        yield generate_latest(_Families(self._process.collect()))

    # Each of these makes one family and adds the labels that all samples have.

    def _gauge(
        self, name: str, text: str, rows: Iterable[tuple[Labels, float]], prefix: str = PREFIX
    ) -> Iterator[bytes]:
        samples = (Sample(prefix + name, self._base | labels, value) for labels, value in rows)
        return _texts(GaugeMetricFamily(prefix + name, text), samples)

    def _counter(
        self, name: str, text: str, rows: Iterable[tuple[Labels, float]], prefix: str = PREFIX
    ) -> Iterator[bytes]:
        samples = (Sample(f"{prefix}{name}_total", self._base | labels, value) for labels, value in rows)
        return _texts(CounterMetricFamily(prefix + name, text), samples)

    def _histogram(
        self, name: str, text: str, bounds: Sequence[int], rows: Iterable[tuple[Labels, Sequence[int], float]]
    ) -> Iterator[bytes]:
        ends = (*map(str, bounds), "+Inf")

        def samples() -> Iterator[Sample]:
            for labels, counts, total in rows:
                merged = self._base | labels
                passed = 0
                for end, count in zip(ends, tuple(counts), strict=True):
                    passed += count
                    yield Sample(f"{PREFIX}{name}_bucket", {**merged, "le": end}, passed)
                yield Sample(f"{PREFIX}{name}_count", merged, passed)
                yield Sample(f"{PREFIX}{name}_sum", merged, total)

        return _texts(HistogramMetricFamily(PREFIX + name, text), samples())

    # Each of these makes the families of one subject.

    def _broker(self) -> Iterator[bytes]:
        sources = self._sources
        yield from self._gauge("topic_number", "Topics of this broker.", [({}, len(sources.tables.topics))])
        yield from self._gauge(
            "consumer_group_number", "Consumer groups of this broker.", [({}, len(sources.tables.groups))]
        )
        permission = sources.config.broker.broker_permission
        yield from self._gauge("broker_permission", "4 read, 2 write, 6 both.", [({}, permission)])

    def _incoming(self) -> Iterator[bytes]:
        def rows() -> Iterator[tuple[Labels, PutTally]]:
            for topic, tally in self._sources.traffic.statistics.puts():
                yield {"topic": topic, "is_system": _flag(is_system_topic(topic))}, tally

        messages = ((labels | _NORMAL, tally.messages) for labels, tally in rows())
        yield from self._counter("messages_in", "Messages stored.", messages)
        sizes = ((labels | _NORMAL, tally.bytes) for labels, tally in rows())
        yield from self._counter("throughput_in", "Bytes of messages stored.", sizes)
        counts = ((labels, tally.by_size, tally.bytes) for labels, tally in rows())
        yield from self._histogram("message_size", "Sizes of the messages stored, in bytes.", SIZE_BOUNDS, counts)

    def _outgoing(self) -> Iterator[bytes]:
        statistics = self._sources.traffic.statistics
        messages = ((_group_labels(*key), tally.messages) for key, tally in statistics.gets())
        yield from self._counter("messages_out", "Messages pulled.", messages)
        sizes = ((_group_labels(*key), tally.bytes) for key, tally in statistics.gets())
        yield from self._counter("throughput_out", "Bytes pulled.", sizes)
        dead = [
            ({"consumer_group": group, "is_system": _flag(_is_system_group(group))}, count)
            for group, count in statistics.to_dlq.items()
        ]
        yield from self._counter("send_to_dlq_messages", "Messages that ended in the dead-letter queue.", dead)

    def _connections(self) -> Iterator[bytes]:
        remoting = {"protocol_type": "remoting"}
        producers = Counter(
            (client.language, client.version) for _, clients in self._sources.tables.producers for client in clients
        )
        samples = [({**remoting, **_client_labels(*key)}, count) for key, count in producers.items()]
        yield from self._gauge("producer_connections", "Connected producers.", samples)
        consumers = Counter(
            (group.name, group.consume_type, client.language, client.version)
            for group in self._sources.tables.consumers
            for client in group.members.values()
        )
        consumer_samples = [
            (
                {
                    **remoting,
                    **_client_labels(language, version),
                    "consumer_group": group,
                    "consume_mode": _CONSUME_MODES.get(mode, mode.lower()),
                    "is_system": _flag(_is_system_group(group)),
                },
                count,
            )
            for (group, mode, language, version), count in consumers.items()
        ]
        yield from self._gauge("consumer_connections", "Connected consumers.", consumer_samples)
        grpc = self._sources.traffic.statistics.grpc
        open_ones: list[tuple[Labels, float]] = [] if grpc is None else [({}, grpc.connections)]
        yield from self._gauge("grpc_connections", "Open connections of gRPC clients.", open_ones, OWN_PREFIX)
        kinds = {} if grpc is None else grpc.clients
        by_type = [({"client_type": kind}, count) for kind, count in kinds.items()]
        yield from self._gauge("grpc_clients", "gRPC clients by type.", by_type, OWN_PREFIX)

    def _lag(self) -> Iterator[bytes]:
        lags, latencies = [], []
        for number, (name, offsets) in enumerate(self._sources.tables.offsets.table().offset_table.items()):
            if number % _PIECE == 0:
                yield b""
            topic, _, group = name.partition("@")
            labels = _group_labels(topic, group)
            behind, millis = self._behind(topic, offsets)
            lags.append((labels, behind))
            latencies.append((labels, millis))
        yield from self._gauge("consumer_lag_messages", "Messages that a group has not consumed.", lags)
        yield from self._gauge("consumer_lag_latency", "Age of the oldest message not consumed, in ms.", latencies)
        # A broker does not know which of these messages are pulled already, so all of them count as ready.
        yield from self._gauge("consumer_ready_messages", "Messages a group can still consume.", lags)

    def _behind(self, topic: str, offsets: Mapping[int, int]) -> tuple[int, int]:
        """How many messages are not consumed, and the age of the oldest one in milliseconds."""
        store = self._sources.store
        behind = millis = 0
        now = self._sources.clock.now()
        for queue_id, committed in offsets.items():
            end = store.max_offset_of(topic, queue_id)
            position = max(committed, store.min_offset_of(topic, queue_id))  # expired messages cannot be consumed
            if position >= end:
                continue
            behind += end - position
            stored = store.store_time_of(topic, queue_id, position)
            if stored >= 0:
                millis = max(millis, now - stored)
        return behind, millis

    def _transactions(self) -> Iterator[bytes]:
        statistics, half = self._sources.traffic.statistics, self._sources.traffic.half_messages
        waiting = _by_topic(half() if half is not None else {})
        yield from self._gauge("half_messages", "Transactional messages neither committed nor rolled back.", waiting)
        yield from self._counter("commit_messages", "Transactional messages committed.", _by_topic(statistics.commits))
        yield from self._counter("rollback_messages", "Transactions rolled back.", _by_topic(statistics.rollbacks))

    def _timer(self) -> Iterator[bytes]:
        timer = self._sources.timer
        figures: dict[str, list[tuple[Labels, float]]] = {name: [] for name in _TIMER_GAUGES}
        enqueued: Mapping[str, int] = {}
        dequeued: Mapping[str, int] = {}
        if timer is not None:
            figures["timer_enqueue_lag"] = [({}, timer.enqueue_behind)]
            figures["timer_enqueue_latency"] = [({}, timer.enqueue_behind_millis)]
            figures["timer_dequeue_lag"] = [({}, timer.count_overdue())]
            figures["timer_dequeue_latency"] = [({}, timer.read_behind_millis)]
            figures["timing_messages"] = [*_by_topic(timer.metrics.waiting_by_topic())]
            for bound in _TIMER_BOUNDS:
                yield b""
                figures["timer_message_snapshot"].append(({"timer_bound_s": str(bound)}, timer.count_within(bound)))
            enqueued, dequeued = timer.metrics.enqueue_total, timer.metrics.dequeue_total
        for name, text in _TIMER_GAUGES.items():
            yield from self._gauge(name, text, figures[name])
        yield from self._counter("timer_enqueue", "Timer messages put on the wheel.", _by_topic(enqueued))
        yield from self._counter("timer_dequeue", "Timer messages taken from the wheel.", _by_topic(dequeued))

    def _pop(self) -> Iterator[bytes]:
        pop = self._sources.traffic.pop
        stored = {} if pop is None else {"CK": pop.checkpoints, "ACK": pop.acknowledgements}
        done = {} if pop is None else {"CK": pop.leases.ended, "ACK": pop.acknowledgements}
        for name, text, records in (
            ("pop_revive_in_message", "Records of leases, and of ended leases.", stored),
            ("pop_revive_out_message", "Records that nobody waits for any more.", done),
        ):
            kinds = [({"revive_message_type": kind}, count) for kind, count in records.items()]
            yield from self._counter(name, text, kinds)
        again = [
            ({"topic": topic, "consumer_group": group}, count)
            for (topic, group), count in ({} if pop is None else pop.revived).items()
        ]
        yield from self._counter("pop_revive_retry_messages", "Messages that came again, not acknowledged.", again)
        gauges: dict[str, tuple[str, Callable[[PopFigures], int]]] = {
            "pop_checkpoint_buffer_size": ("Leases of messages that consumers hold.", lambda of: len(of.leases)),
            "pop_offset_buffer_size": ("Messages that consumers hold.", lambda of: of.leases.messages),
            "pop_revive_latency": ("How late the oldest lease ends in ms.", lambda of: of.overdue_millis),
        }
        for name, (text, value) in gauges.items():
            yield from self._gauge(name, text, [] if pop is None else [({}, value(pop))])
        lags = [
            ({"queue_id": str(queue_id)}, end - needed)
            for queue_id, (needed, end) in ({} if pop is None else pop.needed_records()).items()
        ]
        yield from self._gauge("pop_revive_lag", "Records from the oldest one on that is still needed.", lags)
        if pop is not None:
            scans = pop.scan_millis
            text = "Time to look for leases that are due in ms."
            rows: list[tuple[Labels, Sequence[int], float]] = [({}, scans.counts, scans.sum)]
            yield from self._histogram("pop_buffer_scan_time_consume", text, scans.bounds, rows)

    def _storage(self) -> Iterator[bytes]:
        store = self._sources.store
        size = store.max_offset - max(0, store.min_offset)
        yield from self._gauge("storage_size", "Bytes of the commit log.", [(_STORAGE, size)])
        unsafe = store.max_offset - store.flushed_offset
        yield from self._gauge("storage_flush_behind_bytes", "Bytes not flushed yet.", [(_STORAGE, unsafe)])
        behind = store.dispatch_behind_bytes
        yield from self._gauge(
            "storage_dispatch_behind_bytes", "Bytes not in the consume queues yet.", [(_STORAGE, behind)]
        )
        lags = self._sources.traffic.slave_lags() if self._sources.traffic.slave_lags is not None else {}
        samples = [({**_STORAGE, "slave": address}, lag) for address, lag in lags.items()]
        yield from self._gauge("storage_slave_behind_bytes", "Bytes a slave does not have yet.", samples)
        earliest = store.earliest_store_time
        age = [(_STORAGE, self._sources.clock.now() - earliest)] if earliest > 0 else []
        yield from self._gauge("storage_message_reserve_time", "Age of the oldest message in ms.", age)

    def _latencies(self) -> Iterator[bytes]:
        statistics = self._sources.traffic.statistics
        rpcs = [
            (
                {
                    "protocol_type": "remoting",
                    "request_code": _REQUEST_NAMES.get(request, str(request)),
                    "response_code": _RESPONSE_NAMES.get(response, str(response)),
                },
                histogram.counts,
                histogram.sum,
            )
            for (request, response), histogram in statistics.rpcs.items()
        ]
        rpcs += [
            ({"protocol_type": "grpc", "request_code": method, "response_code": code}, histogram.counts, histogram.sum)
            for (method, code), histogram in (statistics.grpc.calls if statistics.grpc is not None else {}).items()
        ]
        yield from self._histogram("rpc_latency", "Time to answer a request in ms.", RPC_MILLIS_BOUNDS, rpcs)
        delays = statistics.delays
        text = "Delays of delayed messages in seconds."
        yield from self._histogram(
            "delay_message_latency", text, delays.bounds, [(_STORAGE, delays.counts, delays.sum)]
        )

    def _acceleration(self) -> Iterator[bytes]:
        families = self._sources.traffic.families.items()
        taken = [({"family": name}, family.accelerated) for name, family in families]
        yield from self._counter("requests_accelerated", "Requests that a compiled step has served.", taken, OWN_PREFIX)
        left = [({"family": name}, family.not_accelerated) for name, family in families]
        yield from self._counter("requests_not_accelerated", "Requests that it has not.", left, OWN_PREFIX)

    def _refused(self) -> Iterator[bytes]:
        refused = self._sources.traffic.refused
        figures = [({"reason": reason}, count) for reason, count in (refused() if refused is not None else {}).items()]
        yield from self._counter("refused", "What access control refused, by reason.", figures, OWN_PREFIX)

    def _replica(self) -> Iterator[bytes]:
        """A broker without a controller has none of these."""
        figures = None if self._sources.traffic.replica is None else self._sources.traffic.replica()
        found = [] if figures is None else [figures]
        for name, text, rows in (
            ("replica_epoch", "Epoch of the role that the controller gave.", [({}, one.epoch) for one in found]),
            ("replica_role", "1 for the role that this broker has.", [({"role": one.role}, 1) for one in found]),
            ("sync_state_set_size", "Members of a master's set.", [({}, one.sync_state_set_size) for one in found]),
            (
                "lease_left_seconds",
                "What is left of a master's lease.",
                [({}, one.lease_left_seconds) for one in found],
            ),
        ):
            yield from self._gauge(name, text, rows, OWN_PREFIX)
        won: list[tuple[Labels, float]] = [({}, one.elections_won) for one in found]
        yield from self._counter("elections_won", "How often this process was elected master.", won, OWN_PREFIX)


def _texts(family: Metric, samples: Iterator[Sample]) -> Iterator[bytes]:
    """Yield one family in pieces; the first begins with help and type, and comes even if there is no sample."""
    is_first = True
    while (batch := list(islice(samples, _PIECE))) or is_first:
        family.samples = batch
        text = generate_latest(_Families([family]))
        yield text if is_first else text.split(b"\n", 2)[2]
        is_first = False


def _by_topic(counts: Mapping[str, int]) -> list[tuple[Labels, int]]:
    return [({"topic": topic}, count) for topic, count in counts.items()]


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _is_system_group(group: str) -> bool:
    return group.upper().startswith(SYSTEM_GROUP_PREFIX)


def _group_labels(topic: str, group: str) -> Labels:
    return {
        "topic": topic,
        "consumer_group": group,
        "is_retry": _flag(topic.startswith((RETRY_PREFIX, DLQ_PREFIX))),
        "is_system": _flag(is_system_topic(topic) or _is_system_group(group)),
    }


def _client_labels(language: int, version: int) -> Labels:
    return {"language": _LANGUAGE_NAMES.get(language, str(language)), "version": str(version)}
