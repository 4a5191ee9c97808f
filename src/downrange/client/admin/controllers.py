"""Controllers: which leads, which replicas are in sync, elections by hand; and what brokers tell about replication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from downrange.client.admin.chosen_brokers import chosen_brokers
from downrange.client.admin.cluster import properties_table
from downrange.client.brokers import Broker
from downrange.client.errors import ClientError
from downrange.client.per_server import PerServer, ask_each
from downrange.client.session import Session
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.controller import (
    BrokerReplica,
    BrokerReplicasInfo,
    CleanBrokerDataRequest,
    ElectMasterRequest,
    ElectMasterResponse,
    EpochEntryCache,
    GetMetadataInfoResponse,
    HARuntimeInfo,
    ReplicasInfo,
    encode_broker_names,
)
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import request
from downrange.protocol.errors import RequestCodeNotSupported
from downrange.settings import format_properties

__all__ = ["BrokerReplica", "ControllerAdmin", "Elected", "ReplicasInfo"]


class Elected(NamedTuple):
    """The outcome of an election by hand."""

    is_new: bool
    """False: the master stays as it was."""
    master: ElectMasterResponse


class ControllerAdmin:
    """Actions on controllers. `addresses` are controllers of one group; the one that leads is looked up."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def metadata(self, addresses: Sequence[str]) -> PerServer[str, GetMetadataInfoResponse]:
        """The view of each controller of who leads."""

        async def ask(address: str) -> GetMetadataInfoResponse:
            try:
                reply = await self._session.invoke(address, request(RequestCode.CONTROLLER_GET_METADATA_INFO))
            except RequestCodeNotSupported as error:
                raise ClientError(
                    f"{address} is not a controller, but a broker or a name server ({error.remark.strip()}); "
                    "give the controllers with -a"
                ) from None
            return reply.header(GetMetadataInfoResponse)

        return await ask_each(addresses, ask)

    async def leader(self, addresses: Sequence[str]) -> str:
        """The address of the controller that leads; raises if none does."""
        views = await self.metadata(addresses)
        views.raise_if_none()
        for address, view in views.done.items():
            if view.is_leader:
                return view.controller_leader_address or address
        for view in views.done.values():
            if view.controller_leader_address:
                return view.controller_leader_address
        raise ClientError(f"no controller leads: asked {', '.join(addresses)}; is etcd up?")

    async def sync_state(self, addresses: Sequence[str], names: Sequence[str] = ()) -> BrokerReplicasInfo:
        """The replicas of broker sets; of all sets, if no names are given and the controller is one of ours."""
        body = encode_broker_names(tuple(names))
        asked = request(RequestCode.CONTROLLER_GET_SYNC_STATE_DATA, body=body)
        reply = await self._session.invoke(await self.leader(addresses), asked)
        return decode_body(BrokerReplicasInfo, reply.body_bytes)

    async def elect(
        self, addresses: Sequence[str], broker_set: str, broker_id: int, *, cluster: str, is_unclean: bool = False
    ) -> Elected:
        """Make a replica the master; raises BrokerError 2012 if it cannot be. `is_unclean`: messages may be lost."""
        wanted = ElectMasterRequest(
            cluster_name=cluster,
            broker_name=broker_set,
            broker_id=broker_id,
            designate_elect=True,
            unclean_elect=True if is_unclean else None,
        )
        reply = await self._session.invoke(
            await self.leader(addresses),
            request(RequestCode.CONTROLLER_ELECT_MASTER, wanted),
            accept=(ResponseCode.SUCCESS, ResponseCode.MASTER_STILL_EXIST),
        )
        return Elected(reply.code == ResponseCode.SUCCESS, reply.header(ElectMasterResponse))

    async def clean(
        self,
        addresses: Sequence[str],
        broker_set: str,
        ids: str | None = None,
        *,
        cluster: str | None = None,
        is_living: bool = False,
    ) -> None:
        """Forget the replicas with these ids, joined by semicolons, or a whole set; with `is_living` also live ones."""
        wanted = CleanBrokerDataRequest(
            cluster_name=cluster,
            broker_name=broker_set,
            broker_controller_ids_to_clean=ids,
            is_clean_living_broker=is_living,
        )
        asked = request(RequestCode.CONTROLLER_CLEAN_BROKER_DATA, wanted)
        await self._session.invoke(await self.leader(addresses), asked)

    async def config(self, addresses: Sequence[str]) -> PerServer[str, dict[str, str]]:
        async def ask(address: str) -> dict[str, str]:
            reply = await self._session.invoke(address, request(RequestCode.CONTROLLER_GET_CONTROLLER_CONFIG))
            return properties_table(reply.body_bytes)

        return await ask_each(addresses, ask)

    async def update_config(self, addresses: Sequence[str], changes: Mapping[str, str]) -> PerServer[str, None]:
        body = format_properties(changes).encode()

        async def tell(address: str) -> None:
            await self._session.invoke(address, request(RequestCode.CONTROLLER_UPDATE_CONTROLLER_CONFIG, body=body))

        return await ask_each(addresses, tell)

    # --- brokers in controller mode -----------------------------------------------------------------------------

    async def epochs(self, cluster: str | None = None, broker: str | None = None) -> PerServer[Broker, EpochEntryCache]:
        """The epochs in which each replica wrote its log."""

        async def ask(one: Broker) -> EpochEntryCache:
            reply = await self._session.ask(one, request(RequestCode.CONTROLLER_GET_BROKER_EPOCH_CACHE))
            return decode_body(EpochEntryCache, reply.body_bytes)

        return await ask_each(await self._replicas(cluster, broker), ask)

    async def ha_status(
        self, cluster: str | None = None, broker: str | None = None
    ) -> PerServer[Broker, HARuntimeInfo]:
        """How far the slaves of each broker are."""

        async def ask(one: Broker) -> HARuntimeInfo:
            reply = await self._session.ask(one, request(RequestCode.GET_BROKER_HA_STATUS))
            return decode_body(HARuntimeInfo, reply.body_bytes)

        return await ask_each(await self._replicas(cluster, broker), ask)

    async def _replicas(self, cluster: str | None, broker: str | None) -> list[Broker]:
        """All processes of a broker name or a cluster, or the one at an address."""
        if broker is not None and ":" in broker:
            return await chosen_brokers(self._session, cluster, broker)
        known = await self._session.brokers(cluster)
        return [one for one in known if broker in (None, one.name)]
