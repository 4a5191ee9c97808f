"""Broker processes, by name, address and cluster."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from downrange.client.errors import BrokerNotFound
from downrange.model.text import Text
from downrange.protocol.bodies.routes import MASTER_ID, BrokerData, TopicRouteData


class Broker(NamedTuple):
    """One broker process as an operator names it. Name and cluster are empty when only its address was given."""

    address: str
    name: str = ""
    cluster: str = ""
    broker_id: int = MASTER_ID

    def __str__(self) -> str:
        if not self.name:
            return self.address
        return f"{self.name} ({self.address})" if self.address else self.name


def sorted_brokers(route: TopicRouteData) -> list[BrokerData]:
    return sorted(route.broker_datas, key=lambda data: data.broker_name)


def master_of(data: BrokerData) -> Broker:
    """The master behind a broker name, without an address when it is down."""
    return Broker(data.master_address or "", data.broker_name, data.cluster)


def reader_of(data: BrokerData) -> Broker:
    """The process to read from: the master, or the slave with the smallest id while the master is down."""
    broker_id = min(data.broker_addrs, default=MASTER_ID)
    return Broker(data.broker_addrs.get(broker_id, ""), data.broker_name, data.cluster, broker_id)


def masters_of(brokers: Collection[Broker]) -> list[Broker]:
    found = {broker.name: Broker("", broker.name, broker.cluster) for broker in brokers}
    found.update({broker.name: broker for broker in brokers if broker.broker_id == MASTER_ID})
    return list(found.values())


def reachable(broker: Broker) -> Broker:
    """`broker`, or BrokerNotFound when it has no address."""
    if not broker.address:
        raise BrokerNotFound(
            Text(
                "broker {broker} has no master at the moment; start it, or wait until it registers", broker=broker.name
            )
        )
    return broker
