"""What is known about one cluster, in memory: the sampler writes it, pages and findings read it.

Every part says when it was asked for (`at`, milliseconds since 1970; 0: never) and with which error that failed last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from downrange.client.admin.runtime import BrokerRuntime
from downrange.client.brokers import Broker
from downrange.model.message import MessageQueue
from downrange.model.subscription import Subscription
from downrange.model.text import Text
from downrange.model.topics import DLQ_PREFIX, RETRY_PREFIX, SubscriptionGroupConfig, TopicConfig, is_system_topic

IN_FLIGHT_MILLIS = 5_000
"""Messages that wait for less than this are on their way, and their group is not behind."""
STUCK_MILLIS = 60_000
"""A queue with waiting messages and a member that has not moved for this long is stuck."""


@dataclass(slots=True)
class BrokerState:
    """One broker process: its figures, and what it serves."""

    broker: Broker
    runtime: BrokerRuntime | None = None
    at: int = 0
    error: str | None = None
    is_silent: bool = False
    """The error is that no answer came in time."""
    settings: dict[str, str] = field(default_factory=dict)
    topics: dict[str, TopicConfig] = field(default_factory=dict)
    groups: dict[str, SubscriptionGroupConfig] = field(default_factory=dict)
    producers: tuple[Producer, ...] = ()
    waiting: Waiting | None = None

    @property
    def name(self) -> str:
        return self.broker.name

    @property
    def is_master(self) -> bool:
        return self.broker.broker_id == 0


class Replicas(NamedTuple):
    """A broker set under a controller: its master, and the ids of its replicas that are in sync or not."""

    master: str
    in_sync: tuple[int, ...]
    behind: tuple[int, ...]


@dataclass(slots=True)
class Controllers:
    """The controllers that brokers name in their settings; `leader` is empty while none leads."""

    leader: str = ""
    errors: dict[str, str] = field(default_factory=dict)
    sets: dict[str, Replicas] = field(default_factory=dict)


class Waiting(NamedTuple):
    """What no consumer of a broker's topics can see yet; ages in milliseconds, None where nothing waits."""

    delayed: int
    late: int | None
    half: int
    half_oldest: int | None


class Producer(NamedTuple):
    """One producer that a broker knows."""

    group: str
    client_id: str
    address: str
    language: str
    version: int
    heard_at: int


class QueueEnds(NamedTuple):
    """The reach of one queue; `last` is the store time of its newest message, 0 while it is empty."""

    first: int
    end: int
    last: int


class Growth(NamedTuple):
    """The ends of a topic's queues on one broker, added up, when they were asked for, and their growth a second."""

    at: int
    end: int
    rate: float | None


@dataclass(slots=True)
class TopicState:
    """One topic over all brokers that serve it."""

    name: str
    queues: dict[MessageQueue, QueueEnds] = field(default_factory=dict)
    at: int = 0
    errors: dict[str, str] = field(default_factory=dict)
    rate: float | None = None
    """Messages a second, the sum of what its brokers have taken between the last two times of asking."""
    growth: dict[str, Growth] = field(default_factory=dict)
    """By the names of its brokers."""
    metered_at: int = 0
    """When the rate was last taken from metrics; 0: never."""
    kind: str = ""
    """What `kind_of` says of the name."""

    def __post_init__(self) -> None:
        self.kind = kind_of(self.name)

    @property
    def count(self) -> int:
        return sum(ends.end - ends.first for ends in self.queues.values())

    @property
    def last(self) -> int:
        return max((ends.last for ends in self.queues.values()), default=0)


@dataclass(slots=True)
class QueueProgress:
    """A group in one queue. `moved_at` is when a change of the committed offset was last seen."""

    end: int
    committed: int
    consumed_at: int = 0
    moved_at: int = 0
    oldest: int | None = None
    """Age of the oldest waiting message in milliseconds; None: not known."""
    asked_at: int = 0
    """When the broker last told these figures."""

    @property
    def behind(self) -> int:
        return max(0, self.end - self.committed)


@dataclass(slots=True)
class Member:
    """One running consumer of a group. Queues and subscriptions are None until the member itself has told them."""

    client_id: str
    address: str = ""
    language: str = ""
    version: int = 0
    brokers: set[str] = field(default_factory=set)
    queues: frozenset[MessageQueue] | None = None
    subscriptions: tuple[Subscription, ...] | None = None
    told_at: int = 0
    error: str | None = None


@dataclass(slots=True)
class GroupState:
    """One consumer group over all its brokers."""

    name: str
    queues: dict[MessageQueue, QueueProgress] = field(default_factory=dict)
    at: int = 0
    errors: dict[str, str] = field(default_factory=dict)
    consume_rates: dict[str, float] = field(default_factory=dict)
    """Messages consumed a second, by the names of its brokers."""
    members: dict[str, Member] = field(default_factory=dict)
    members_at: int = 0
    subscriptions: dict[str, Subscription] = field(default_factory=dict)
    consume_type: str | None = None
    message_model: str | None = None
    behind_since: int | None = None

    @property
    def consume_rate(self) -> float:
        return sum(self.consume_rates.values())

    @property
    def behind(self) -> int | None:
        """Messages that wait for the group, its retries included; None while nothing is known."""
        return sum(queue.behind for queue in self.queues.values()) if self.at else None

    @property
    def oldest(self) -> int | None:
        """Age of the oldest waiting message, as far as brokers told it."""
        ages = [queue.oldest for queue in self.queues.values() if queue.behind and queue.oldest is not None]
        return max(ages, default=None)

    @property
    def is_behind(self) -> bool:
        """Whether messages wait for longer than it takes to hand them over."""
        oldest = self.oldest
        return bool(self.behind) and not self.is_broadcasting and (oldest is None or oldest >= IN_FLIGHT_MILLIS)

    @property
    def topics(self) -> list[str]:
        found = {queue.topic for queue in self.queues} | set(self.subscriptions)
        return sorted(topic for topic in found if not topic.startswith(RETRY_PREFIX))

    @property
    def is_broadcasting(self) -> bool:
        return self.message_model == "BROADCASTING"

    def holder(self, queue: MessageQueue) -> Member | None:
        """The member that said it holds a queue."""
        return next((one for one in self.members.values() if one.queues is not None and queue in one.queues), None)

    @property
    def stuck_queues(self) -> list[MessageQueue]:
        """Queues with waiting messages whose committed offset has not moved for a minute, though members run.

        The minute ends with the last answer of the broker: one that is silent says nothing about its queues.
        """
        if not self.members:
            return []
        return [
            queue
            for queue, progress in self.queues.items()
            if progress.behind and progress.moved_at and progress.asked_at - progress.moved_at >= STUCK_MILLIS
        ]

    @property
    def knows_holders(self) -> bool:
        """Whether every member has told which queues it holds."""
        return bool(self.members) and all(one.queues is not None for one in self.members.values())


class Unheard(NamedTuple):
    """Why a broker tells nothing, and when it last did (0: never)."""

    why: str
    at: int


@dataclass(slots=True)
class Snapshot:
    """Everything known about one cluster."""

    name: str
    brokers: dict[str, BrokerState] = field(default_factory=dict)
    """By address."""
    topics: dict[str, TopicState] = field(default_factory=dict)
    groups: dict[str, GroupState] = field(default_factory=dict)
    namesrvs: dict[str, dict[str, str]] = field(default_factory=dict)
    """The settings of each name server that answered."""
    namesrv_errors: dict[str, str] = field(default_factory=dict)
    controllers: Controllers | None = None
    """None: no broker is under a controller."""
    metrics_errors: dict[str, str] = field(default_factory=dict)
    """Why addresses of --metrics could not be read."""
    at: int = 0
    """When the list of brokers was last known."""
    error: str | None = None
    lost: dict[str, int] = field(default_factory=dict)
    """Brokers whose master name servers no longer list, by name, and since when."""
    lost_slaves: dict[tuple[str, int], int] = field(default_factory=dict)
    """Slaves that name servers no longer list, by name and id, and since when."""

    @property
    def controller_addresses(self) -> list[str]:
        """Those that brokers under a controller name in their settings."""
        found: dict[str, None] = {}
        for state in self.brokers.values():
            if state.settings.get("enableControllerMode") == "true":
                found |= dict.fromkeys(filter(None, state.settings.get("controllerAddr", "").split(";")))
        return [address.strip() for address in found]

    def _waiting(self) -> list[Waiting]:
        return [one.waiting for one in self.masters if one.waiting is not None]

    @property
    def delayed(self) -> int | None:
        found = self._waiting()
        return sum(one.delayed for one in found) if found else None

    @property
    def half(self) -> int | None:
        found = self._waiting()
        return sum(one.half for one in found) if found else None

    @property
    def half_oldest(self) -> int | None:
        return max((one.half_oldest for one in self._waiting() if one.half_oldest is not None), default=None)

    @property
    def delayed_late(self) -> int | None:
        return max((one.late for one in self._waiting() if one.late is not None), default=None)

    @property
    def masters(self) -> list[BrokerState]:
        return [one for one in self.brokers.values() if one.is_master]

    @property
    def unheard(self) -> dict[str, Unheard]:
        """Masters that are gone or do not answer: figures of their queues are old."""
        found = {name: Unheard(Text("no name server lists it"), at) for name, at in self.lost.items()}
        return found | {one.name: Unheard(one.error, one.at) for one in self.masters if one.error is not None}

    def forget_lost(self, before: int) -> None:
        """A broker that is gone for long does not come back: its queues are no longer counted."""
        names = {name for name, at in self.lost.items() if at < before}
        self.lost = {name: at for name, at in self.lost.items() if name not in names}
        self.lost_slaves = {slave: at for slave, at in self.lost_slaves.items() if at >= before}
        if not names:
            return
        for topic in self.topics.values():
            topic.queues = {queue: at for queue, at in topic.queues.items() if queue.broker_name not in names}
        for group in self.groups.values():
            group.queues = {queue: at for queue, at in group.queues.items() if queue.broker_name not in names}

    def brokers_of_topic(self, topic: str) -> list[BrokerState]:
        return [one for one in self.masters if topic in one.topics]

    def brokers_of_group(self, group: str) -> list[BrokerState]:
        return [one for one in self.masters if group in one.groups]

    def groups_of(self, topic: str) -> list[GroupState]:
        """Groups that have offsets in a topic, or subscribe to it."""
        return [
            group
            for group in self.groups.values()
            if topic in group.subscriptions or any(queue.topic == topic for queue in group.queues)
        ]

    @property
    def own_topics(self) -> set[str]:
        """Each broker has a topic of its own name, one of the name of its cluster, and one for replies."""
        brokers = {state.name for state in self.brokers.values()} | set(self.lost)
        clusters = {state.broker.cluster for state in self.brokers.values()}
        return brokers | clusters | {f"{name}_REPLY_TOPIC" for name in clusters}

    def user_topics(self) -> Iterator[TopicState]:
        """Topics of users, without those that brokers make for themselves."""
        own = self.own_topics
        return (topic for topic in self.topics.values() if topic.kind == "topic" and topic.name not in own)

    def forget_rates(self, broker: str) -> None:
        """A broker that is gone takes and hands over nothing."""
        for topic in self.topics.values():
            topic.growth.pop(broker, None)
        for group in self.groups.values():
            group.consume_rates.pop(broker, None)

    @property
    def all_dead_letters(self) -> int:
        return sum(self.dead_letters(group) for group in self.groups)

    def dead_letters(self, group: str) -> int:
        topic = self.topics.get(DLQ_PREFIX + group)
        return 0 if topic is None else topic.count

    @property
    def groups_behind(self) -> list[GroupState]:
        behind = [group for group in self.groups.values() if group.is_behind]
        return sorted(behind, key=lambda group: -(group.behind or 0))


def kind_of(topic: str) -> str:
    """`topic`, `retry`, `dead letters` or `system`."""
    if topic.startswith(RETRY_PREFIX):
        return "retry"
    if topic.startswith(DLQ_PREFIX):
        return "dead letters"
    return "system" if is_system_topic(topic) else "topic"


def sum_known(values: Iterable[float | None]) -> float | None:
    """The sum of those that are known; None when none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
