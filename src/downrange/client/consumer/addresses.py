"""Which process behind a broker name to ask."""

from __future__ import annotations

from typing import NamedTuple

from downrange.client.errors import BrokerNotFound, NoRoute
from downrange.client.session import Session
from downrange.model.message import MessageQueue
from downrange.protocol.bodies.routes import MASTER_ID, TopicRouteData


class BrokerAddress(NamedTuple):
    """One process of a broker: where it listens, and whether it takes commits."""

    address: str
    broker_id: int

    @property
    def is_master(self) -> bool:
        return self.broker_id == MASTER_ID


def find_address(route: TopicRouteData, broker_name: str, wanted_id: int = MASTER_ID) -> BrokerAddress | None:
    """The process with this id, for a slave else the next id, else any. [findBrokerAddressInSubscribe]"""
    for data in route.broker_datas:
        if data.broker_name != broker_name or not data.broker_addrs:
            continue
        candidates = (wanted_id, wanted_id + 1 if wanted_id != MASTER_ID else wanted_id, min(data.broker_addrs))
        found = next(broker_id for broker_id in candidates if broker_id in data.broker_addrs)
        return BrokerAddress(data.broker_addrs[found], found)
    return None


async def address_of(session: Session, queue: MessageQueue, wanted_id: int = MASTER_ID) -> BrokerAddress:
    """Where to reach the broker of a queue, as far as the route is known; an unknown one is looked up."""
    route = session.known_route(queue.topic)
    found = None if route is None else find_address(route, queue.broker_name, wanted_id)
    if found is None:
        found = find_address(await session.follow(queue.topic), queue.broker_name, wanted_id)
    if found is None:
        raise BrokerNotFound(f"the route of {queue.topic} names no broker {queue.broker_name} at the moment")
    return found


def masters_of_route(route: TopicRouteData, topic: str) -> list[BrokerAddress]:
    """The master of every broker of a topic, or another process where there is no master."""
    found = [find_address(route, data.broker_name) for data in route.broker_datas]
    addresses = [address for address in found if address is not None]
    if not addresses:
        raise NoRoute(topic, f"the route of {topic} names no broker")
    return addresses
