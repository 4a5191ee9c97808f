"""Routes and assignments as gRPC clients see them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat

from downrange.model.topics import Perm
from downrange.protocol.bodies.routes import MASTER_ID, QueueData, TopicRouteData
from downrange.proxy.wire.enums import AddressScheme, Permission
from downrange.proxy.wire.messages import Assignment, Endpoints, MessageQueue, Resource

ANY_QUEUE = -1


def queues_of(
    route: TopicRouteData, topic: Resource, endpoints: Endpoints, accepted: Sequence[int]
) -> Iterator[MessageQueue]:
    """The queues of a topic. Those that can be read and written come first: some clients use only number 0."""
    for data in served(route):
        read, write = readable(data), writable(data)
        both = min(read, write)
        kinds = chain(
            repeat(Permission.READ_WRITE, both),
            repeat(Permission.READ, read - both),
            repeat(Permission.WRITE, write - both),
        )
        for number, permission in enumerate(kinds):
            queue = MessageQueue(id=number, permission=permission, accept_message_types=accepted)
            _place(queue, topic, data.broker_name, endpoints)
            yield queue


def assignments_of(
    route: TopicRouteData, topic: Resource, endpoints: Endpoints, *, orderly: bool
) -> Iterator[Assignment]:
    """Where a consumer asks for messages: every consumer everywhere, for brokers give each message to one of them."""
    for data in served(route):
        count = readable(data)
        for number in range(count) if orderly else (ANY_QUEUE,) if count else ():
            found = Assignment()
            found.message_queue.id = number
            found.message_queue.permission = Permission.READ_WRITE
            _place(found.message_queue, topic, data.broker_name, endpoints)
            yield found


def served(route: TopicRouteData) -> Iterator[QueueData]:
    """The queues of brokers that have a master at the moment."""
    masters = {data.broker_name for data in route.broker_datas if MASTER_ID in data.broker_addrs}
    return (data for data in sorted(route.queue_datas, key=lambda one: one.broker_name) if data.broker_name in masters)


def readable(data: QueueData) -> int:
    return data.read_queue_nums if data.perm & Perm.READ else 0


def writable(data: QueueData) -> int:
    return data.write_queue_nums if data.perm & Perm.WRITE else 0


def _place(queue: MessageQueue, topic: Resource, broker_name: str, endpoints: Endpoints) -> None:
    queue.topic.CopyFrom(topic)
    queue.broker.name = broker_name
    queue.broker.id = MASTER_ID
    queue.broker.endpoints.CopyFrom(endpoints)


def endpoints_of(host: str, port: int) -> Endpoints:
    """The address of a server, for clients that did not say how they reach it."""
    digits = host.replace(".", "")
    scheme = AddressScheme.IPV4 if digits.isdecimal() else AddressScheme.DOMAIN_NAME
    found = Endpoints(scheme=AddressScheme.IPV6 if ":" in host else scheme)
    address = found.addresses.add()
    address.host, address.port = host, port
    return found
