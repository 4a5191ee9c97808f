"""From a route to the queues a producer may write to, and the addresses of their brokers."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from downrange.client.errors import NoMaster, NoRoute
from downrange.model.message import MessageQueue
from downrange.model.topics import Perm
from downrange.protocol.bodies.routes import QueueData, TopicRouteData


@dataclass(frozen=True, slots=True)
class PublishInfo:
    """What a producer knows about one topic. [TopicPublishInfo]

    Holds always: equal routes give equal queues in equal order, so that all producers of a topic map one sharding key
    to one queue. Every broker of `queues` has an address, unless the topic is ordered.
    """

    topic: str
    route: TopicRouteData
    queues: tuple[MessageQueue, ...]
    addresses: dict[str, str]
    is_ordered: bool = False
    has_choice: bool = field(init=False)
    """Whether several brokers serve the topic."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_choice", self.queues[0].broker_name != self.queues[-1].broker_name)

    @property
    def brokers(self) -> tuple[str, ...]:
        return tuple(sorted({queue.broker_name for queue in self.queues}))


def publish_info(topic: str, route: TopicRouteData) -> PublishInfo:
    """The queues of `topic` that may be written; raises NoRoute when there is none."""
    addresses = {data.broker_name: data.master_address for data in route.broker_datas if data.master_address}
    if route.order_topic_conf and (ordered := _ordered_queues(topic, route.order_topic_conf)):
        # Leaving out the queues of a broker that is away would send its keys elsewhere, and their order would be lost.
        return PublishInfo(topic, route, ordered, addresses, is_ordered=True)
    writable = [data for data in sorted(route.queue_datas, key=lambda data: data.broker_name) if data.perm & Perm.WRITE]
    queues = tuple(
        MessageQueue(topic, data.broker_name, queue_id)
        for data in writable
        if data.broker_name in addresses
        for queue_id in range(data.write_queue_nums)
    )
    if not queues:
        kind = NoMaster if any(data.broker_name not in addresses for data in writable) else NoRoute
        raise kind(topic, f"the topic {topic} has no queue that may be written at the moment: {_why(writable)}")
    return PublishInfo(topic, route, queues, addresses)


def route_from_model(model: TopicRouteData, queue_nums: int) -> TopicRouteData:
    """The route a topic will have once a broker has made it in the image of the auto-create topic."""

    def few(data: QueueData) -> QueueData:
        count = min(queue_nums, data.read_queue_nums)
        return msgspec.structs.replace(data, read_queue_nums=count, write_queue_nums=count)

    return msgspec.structs.replace(model, queue_datas=tuple(map(few, model.queue_datas)))


def _ordered_queues(topic: str, conf: str) -> tuple[MessageQueue, ...]:
    """`broker-a:4;broker-b:4`: the queues of an ordered topic stay the same while a broker is away."""
    queues: list[MessageQueue] = []
    for part in conf.split(";"):
        name, colon, count = part.strip().partition(":")
        if colon and count.isdigit():
            queues += (MessageQueue(topic, name, queue_id) for queue_id in range(int(count)))
    return tuple(queues)


def _why(writable: list[QueueData]) -> str:
    if not writable:
        return "no broker permits it"
    return f"{', '.join(data.broker_name for data in writable)}: no master is registered, or it has no write queues"
