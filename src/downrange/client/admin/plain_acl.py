"""Accounts and white lists of brokers with access control 4.x. Each broker keeps its own: an action goes to several."""

from __future__ import annotations

from collections.abc import Sequence

from downrange.client.admin.chosen_brokers import chosen_brokers, tell_brokers
from downrange.client.brokers import Broker
from downrange.client.per_server import PerServer, ask_each
from downrange.client.session import Session
from downrange.protocol.bodies.data_version import DataVersion
from downrange.protocol.bodies.plain_acl import (
    AclInfoResponse,
    DeleteAclConfigRequest,
    UpdateAclConfigRequest,
    UpdateGlobalWhiteAddrsRequest,
)
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request


class PlainAclAdmin:
    """Actions on accounts. `broker` is a name or an address; with neither broker nor cluster, the only cluster."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def update(
        self, account: UpdateAclConfigRequest, cluster: str | None = None, broker: str | None = None
    ) -> PerServer[Broker, None]:
        """Add an account, or change members of one; those that are None stay as they are, but `admin` is always set."""
        command = request(RequestCode.UPDATE_AND_CREATE_ACL_CONFIG, account)
        return await tell_brokers(self._session, command, cluster, broker)

    async def delete(
        self, access_key: str, cluster: str | None = None, broker: str | None = None
    ) -> PerServer[Broker, None]:
        command = request(RequestCode.DELETE_ACL_CONFIG, DeleteAclConfigRequest(access_key))
        return await tell_brokers(self._session, command, cluster, broker)

    async def update_white_list(
        self, addresses: Sequence[str], file: str = "", cluster: str | None = None, broker: str | None = None
    ) -> PerServer[Broker, None]:
        """Replace the global white list of a file by its name as `versions` gives it; empty: of plain_acl.yml."""
        header = UpdateGlobalWhiteAddrsRequest(",".join(addresses), file)
        command = request(RequestCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG, header)
        return await tell_brokers(self._session, command, cluster, broker)

    async def versions(
        self, cluster: str | None = None, broker: str | None = None
    ) -> PerServer[Broker, dict[str, DataVersion]]:
        """The versions of the files with accounts, by name."""

        async def ask(one: Broker) -> dict[str, DataVersion]:
            reply = await self._session.ask(one, request(RequestCode.GET_BROKER_CLUSTER_ACL_INFO))
            return reply.header(AclInfoResponse).file_versions

        return await ask_each(await chosen_brokers(self._session, cluster, broker), ask)
