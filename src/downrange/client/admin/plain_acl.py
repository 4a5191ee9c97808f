"""Accounts and white lists of brokers with access control 4.x. Each broker keeps its own: an action goes to several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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


@dataclass(frozen=True, slots=True)
class AccountChange:
    """A new account, or new values for members of one. What is None stays as it is; `admin` is always set."""

    access_key: str
    secret_key: str = field(repr=False)
    admin: bool = False
    white_remote_address: str | None = None
    default_topic_perm: str | None = None
    """DENY, PUB, SUB or PUB|SUB, for topics that are not listed."""
    default_group_perm: str | None = None
    topic_perms: str | None = None
    """`topic=PERM`, several separated by commas."""
    group_perms: str | None = None


class PlainAclAdmin:
    """Actions on accounts. `broker` is a name or an address; with neither broker nor cluster, the only cluster."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def update(
        self, change: AccountChange, cluster: str | None = None, broker: str | None = None
    ) -> PerServer[Broker, None]:
        """Add an account, or change one."""
        header = UpdateAclConfigRequest(
            access_key=change.access_key,
            secret_key=change.secret_key,
            white_remote_address=change.white_remote_address,
            admin=change.admin,
            default_topic_perm=change.default_topic_perm,
            default_group_perm=change.default_group_perm,
            topic_perms=change.topic_perms,
            group_perms=change.group_perms,
        )
        command = request(RequestCode.UPDATE_AND_CREATE_ACL_CONFIG, header)
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
