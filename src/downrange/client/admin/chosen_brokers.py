"""The brokers that an operator chose for an action, by cluster, name or address."""

from __future__ import annotations

from downrange.client.brokers import Broker
from downrange.client.errors import ClientError
from downrange.client.per_server import PerServer, ask_each
from downrange.client.session import Session
from downrange.protocol.command import Command


class ClusterNotChosen(ClientError):
    """There are several clusters, and none was chosen."""


async def chosen_brokers(session: Session, cluster: str | None, broker: str | None) -> list[Broker]:
    """One broker by name or address, else the masters of a cluster, else the masters of the only cluster there is."""
    if broker is not None:
        return [await session.broker(broker)]
    masters = await session.masters(cluster)
    clusters = sorted({master.cluster for master in masters})
    if len(clusters) > 1:
        raise ClusterNotChosen(f"there are several clusters, choose one: {', '.join(clusters)}")
    if not masters:
        raise ClusterNotChosen(f"no broker is registered with name server {session.namesrv}; start one first")
    return masters


async def tell_brokers(
    session: Session, command: Command, cluster: str | None, broker: str | None
) -> PerServer[Broker, None]:
    """Send a command to every chosen broker, whose replies say nothing but success."""

    async def tell(one: Broker) -> None:
        await session.ask(one, command)

    return await ask_each(await chosen_brokers(session, cluster, broker), tell)
