"""What a mirror is asked to do, and both of its clusters for the driver."""

from __future__ import annotations

import math
import re
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from downrange.client import background_loop
from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.client.errors import NoRoute
from downrange.client.pipeline_status import PIPELINES_TOPIC
from downrange.client.producer.outgoing import check_consumer_group
from downrange.model.message import MessageQueue
from downrange.model.topics import TRACE_TOPIC, TopicConfig, is_system_topic
from downrange.spark.errors import OptionError
from downrange.spark.mirror_rows import QueueMap
from downrange.spark.options import SourceOptions, parse_options
from downrange.spark.pipelines.errors import PipelineError, PipelineFailed
from downrange.spark.pipelines.mirror_groups import GroupPlace, Sides, carry_over, places
from downrange.spark.sink_options import SinkOptions, sink_options

NAME: Final = "mirror"
BATCH: Final = 20_000
# Topics that a pattern leaves out: what clusters and pipelines say about themselves.
_OF_EACH_CLUSTER: Final = (PIPELINES_TOPIC, TRACE_TOPIC, "SPARK_SINK_MARKERS")
_CLUSTER_NAME: Final = re.compile(r"[^\s,/]{1,100}")
T = TypeVar("T")


@dataclass(frozen=True)
class Mirror:
    """What to mirror. `source` are options of our source, `target` options of our sink: each names its name servers."""

    source: Mapping[str, str]
    target: Mapping[str, str]
    checkpoint: str
    """Directory or URL where Spark keeps the progress."""
    name: str = NAME
    source_cluster: str | None = None
    """The name of the source in the path of a message; the cluster's own name unless given."""
    target_cluster: str | None = None
    groups: tuple[str, ...] = ()
    """Groups whose offsets are carried over."""
    batch: int = BATCH
    """The most messages of one batch, which is what may be under way when a process dies."""

    def __repr__(self) -> str:  # options may have secrets
        return f"<Mirror {self.name} to {self.target.get('namesrv')}>"

    @property
    def group(self) -> str:
        """The consumer group that shows the progress at the source."""
        return f"mirror_{self.name}"

    @property
    def topics_text(self) -> str:
        """The topics or the pattern of topics, as they were given."""
        return self.source.get("subscribe") or self.source.get("subscribePattern") or ""


class TopicPlan(NamedTuple):
    """What a mirror would do for one topic and broker of the source."""

    topic: str
    broker: str
    queues: int
    messages: int
    target_broker: str
    target_queues: int
    """The queues that the topic has there; 0: it would be created."""
    needed_queues: int


def checked(wanted: Mirror, seconds_between_batches: float = 1.0) -> tuple[SourceOptions, SinkOptions]:
    """The options of source and sink; raises an error when they are wrong."""
    source = parse_options(source_options(wanted, 1))
    if source.store_path is not None:
        raise OptionError("storePath: a mirror reads from brokers")
    sink = sink_options({**wanted.target, "mirror": QueueMap("-", {}).text()})
    if sink.topic is not None or sink.write_id is not None or "deliverylevel" in {key.lower() for key in wanted.target}:
        raise OptionError("a mirror keeps topics and has its own delivery: leave out topic, writeId and deliveryLevel")
    for group in wanted.groups:
        check_consumer_group(group)
    for name in (wanted.source_cluster, wanted.target_cluster):
        if name is not None and not _CLUSTER_NAME.fullmatch(name):
            raise PipelineError(f"cluster name {name!r}: expected no blanks, commas and slashes")
    if not wanted.checkpoint:
        raise PipelineError("a mirror needs a checkpoint: a directory or URL of its own")
    if wanted.batch < 1 or not 0 < seconds_between_batches < math.inf:
        raise PipelineError("a batch has at least one message, and there is some time between batches")
    return source, sink


def source_options(wanted: Mirror, parallelism: int) -> dict[str, str]:
    """The options of the source: whole queues, so that order is kept, and offsets committed as a group."""
    given = {key.lower(): key for key in wanted.source}
    options = {
        "startingOffsets": "group",  # a lost checkpoint does not mean to begin again
        "minPartitions": str(parallelism),
        **wanted.source,
        "maxOffsetsPerTrigger": str(wanted.batch),
        "wholeQueues": "true",
        "includeProperties": "true",
        "group": wanted.group,
        "commitGroupOffsets": "true",
    }
    if {"startingtimestamp", "startingoffsetsbytimestamp"} & given.keys():
        del options["startingOffsets"]
    if "subscribepattern" in given:
        key = given["subscribepattern"]
        left_out = "|".join(map(re.escape, _OF_EACH_CLUSTER))
        options[key] = f"(?!(?:{left_out})$)(?:{wanted.source[key]})"
    return options


class Clusters:
    """Both clusters, for the driver. Blocking; belongs to one thread."""

    def __init__(self, wanted: Mirror) -> None:
        source, sink = checked(wanted)
        self._wanted = wanted
        self._options = source
        self.configs: tuple[ClientConfig, ClientConfig] = (source.client_config(), sink.client_config())
        self._background = background_loop.hold()

    def __enter__(self) -> Clusters:
        try:
            self._source, self._target = self._run(self._open())
            self.sides = self._run(self._look())
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        for admin in (getattr(self, "_source", None), getattr(self, "_target", None)):
            if admin is not None:
                self._run(admin.session.close())
        background_loop.let_go(self._background)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._background.run(work)

    async def _open(self) -> tuple[Admin, Admin]:
        return Admin(self.configs[0]), Admin(self.configs[1])

    async def _look(self) -> Sides:
        wanted = self._wanted
        names = []
        brokers = []
        for admin, given, side in (
            (self._source, wanted.source_cluster, "source"),
            (self._target, wanted.target_cluster, "target"),
        ):
            masters = await admin.session.masters()
            clusters = sorted({master.cluster for master in masters})
            if given is None and len(clusters) != 1:
                raise PipelineError(
                    f"the {side} has {len(clusters)} clusters ({', '.join(clusters) or 'no broker is registered'}): "
                    f"name the {side} with --{'from' if side == 'source' else 'to'}-cluster"
                )
            names.append(given or clusters[0])
            brokers.append([master.name for master in masters])
        if names[0] == names[1]:
            raise PipelineError(
                f"source and target are both called {names[0]}, so a loop could not be seen: "
                "tell them apart by --from-cluster and --to-cluster"
            )
        return Sides(self._source, self._target, QueueMap.of(names[0], brokers[0], brokers[1]), names[1])

    async def _topics(self) -> list[str]:
        options = self._options
        if options.subscribe_pattern is None:
            return list(options.topics or options.assigned)
        pattern = re.compile(options.subscribe_pattern)
        return [
            topic
            for topic in await self._source.topics.names()
            if pattern.fullmatch(topic)
            and not is_system_topic(topic)
            and (not topic.startswith("%") or "%" in pattern.pattern)
        ]

    def planned(self) -> list[TopicPlan]:
        return self._run(self._planned())

    async def _planned(self) -> list[TopicPlan]:
        found = []
        for topic in await self._topics():
            try:
                route = await self._source.topics.route(topic)
            except NoRoute:
                raise PipelineError(f"the source has no topic {topic}") from None
            there = await self._queues_there(topic)
            for data in route.queue_datas:
                last = MessageQueue(topic, data.broker_name, data.read_queue_nums - 1)
                target = self.sides.queues.target(last)
                have = there.get(target.broker_name, 0)
                waiting = await self._waiting(topic, data.broker_name)
                found.append(
                    TopicPlan(
                        topic,
                        data.broker_name,
                        data.read_queue_nums,
                        waiting,
                        target.broker_name,
                        have,
                        target.queue_id + 1,
                    )
                )
        return found

    async def _queues_there(self, topic: str) -> dict[str, int]:
        try:
            route = await self._target.topics.route(topic)
        except NoRoute:
            return {}
        return {data.broker_name: min(data.read_queue_nums, data.write_queue_nums) for data in route.queue_datas}

    async def _waiting(self, topic: str, broker_name: str) -> int:
        """The messages of a topic on one broker that the group of the mirror has not committed yet."""
        broker = await self._source.session.broker(broker_name)
        stats = await self._source.topics.status_on(broker, topic)
        progress = await self._source.groups.progress_on(broker, self._wanted.group, topic)
        done = {queue: one.consumer_offset for queue, one in progress.offset_table.items()}
        return sum(
            max(0, reach.max_offset - max(reach.min_offset, done.get(queue, 0)))
            for queue, reach in stats.offset_table.items()
        )

    def create_topics(self) -> None:
        """Create missing topics at the target, and give others as many queues as their queues at the source need."""
        self._run(self._create_topics())

    async def _create_topics(self) -> None:
        needed: dict[tuple[str, str], int] = {}
        for one in await self._planned():
            if one.target_queues < one.needed_queues:
                place = (one.topic, one.target_broker)
                needed[place] = max(needed.get(place, 0), one.needed_queues)
        for (topic, broker), queues in needed.items():
            config = TopicConfig(topic, queues, queues)
            outcome = await self._target.topics.create(config, broker=broker)
            for error in outcome.failed.values():
                raise PipelineFailed(f"topic {topic} with {queues} queues could not be created at the target: {error}")

    def group_places(self) -> list[GroupPlace]:
        async def find() -> list[GroupPlace]:
            topics = await self._topics()
            there = [topic for topic in topics if await self._queues_there(topic)]
            return [place for group in self._wanted.groups for place in await places(self.sides, group, there)]

        return self._run(find())

    def carry_over_groups(self) -> int:
        async def carry() -> int:
            topics = await self._topics()
            return sum([await carry_over(self.sides, group, topics) for group in self._wanted.groups])

        return self._run(carry()) if self._wanted.groups else 0
