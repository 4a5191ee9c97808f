"""Brokers: their list, their state, their configuration and their housekeeping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from downrange.client.admin.chosen_brokers import chosen_brokers, tell_brokers
from downrange.client.admin.runtime import BrokerRuntime
from downrange.client.brokers import Broker
from downrange.client.per_server import PerServer, ask_each
from downrange.client.session import Session
from downrange.protocol.bodies.admin import GetBrokerConfigResponse
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.data_version import DataVersion
from downrange.protocol.bodies.groups import ProducerTable
from downrange.protocol.bodies.kv_config import KVTable
from downrange.protocol.bodies.statistics import ConsumeStatsList, GetBrokerConsumeStatsRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request
from downrange.settings import format_properties, parse_properties


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """The configuration a broker runs with, and the version of it."""

    table: dict[str, str]
    version: DataVersion | None


@dataclass(frozen=True, slots=True)
class Replica:
    """One copy of a broker's messages: the role it was given, and where its commit log ends."""

    role: str
    max_offset: int


class ClusterAdmin:
    """Actions on brokers. `broker` is a broker name or an address; with neither broker nor cluster the only one."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def status(self, cluster: str | None = None) -> PerServer[Broker, BrokerRuntime]:
        """Runtime figures of every broker process, masters and slaves."""
        return await ask_each(await self._session.brokers(cluster), self.runtime_of)

    async def broker_status(
        self, cluster: str | None = None, broker: str | None = None
    ) -> PerServer[Broker, BrokerRuntime]:
        """Runtime figures of one broker, or of every process of a cluster."""
        if broker is None:
            return await self.status(cluster)
        return await ask_each([await self._session.broker(broker)], self.runtime_of)

    async def replicas(self, cluster: str | None = None) -> PerServer[Broker, Replica]:
        """The role and the end of the log of every broker process, masters and slaves."""

        async def ask(one: Broker) -> Replica:
            settings = await self._session.ask(one, request(RequestCode.GET_BROKER_CONFIG))
            role = properties_table(settings.body_bytes).get("brokerRole", "-")
            return Replica(role, (await self.runtime_of(one)).max_offset or 0)

        return await ask_each(await self._session.brokers(cluster), ask)

    async def consume_stats(self, broker: str, *, is_order: bool = False) -> ConsumeStatsList:
        """How far every group is on one broker."""
        command = request(RequestCode.GET_BROKER_CONSUME_STATS, GetBrokerConsumeStatsRequest(is_order))
        reply = await self._session.ask(await self._session.broker(broker), command)
        return decode_body(ConsumeStatsList, reply.body_bytes)

    async def producers(
        self, cluster: str | None = None, broker: str | None = None
    ) -> PerServer[Broker, ProducerTable]:
        """Every producer connected to the brokers, by group."""

        async def ask(one: Broker) -> ProducerTable:
            reply = await self._session.ask(one, request(RequestCode.GET_ALL_PRODUCER_INFO))
            return decode_body(ProducerTable, reply.body_bytes)

        return await ask_each(await chosen_brokers(self._session, cluster, broker), ask)

    async def config(self, cluster: str | None = None, broker: str | None = None) -> PerServer[Broker, BrokerSettings]:
        async def ask(one: Broker) -> BrokerSettings:
            reply = await self._session.ask(one, request(RequestCode.GET_BROKER_CONFIG))
            version = reply.header(GetBrokerConfigResponse).data_version if reply.ext_fields.get("version") else None
            return BrokerSettings(properties_table(reply.body_bytes), version)

        return await ask_each(await chosen_brokers(self._session, cluster, broker), ask)

    async def update_config(
        self, changes: Mapping[str, str], cluster: str | None = None, broker: str | None = None
    ) -> PerServer[Broker, None]:
        """Change settings while the brokers run; a broker takes all of the changes or none."""
        body = format_properties(changes).encode()
        return await tell_brokers(self._session, request(RequestCode.UPDATE_BROKER_CONFIG, body=body), cluster, broker)

    async def clean_expired_queues(
        self, cluster: str | None = None, broker: str | None = None
    ) -> PerServer[Broker, None]:
        """Delete consume-queue files whose messages are gone from the commit log."""
        return await tell_brokers(self._session, request(RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE), cluster, broker)

    async def clean_unused_topics(
        self, cluster: str | None = None, broker: str | None = None
    ) -> PerServer[Broker, None]:
        """Delete consume queues of topics the broker no longer has."""
        return await tell_brokers(self._session, request(RequestCode.CLEAN_UNUSED_TOPIC), cluster, broker)

    async def delete_expired_commit_log(
        self, cluster: str | None = None, broker: str | None = None
    ) -> PerServer[Broker, None]:
        """Delete commit-log files past their time now instead of at the configured hour."""
        return await tell_brokers(self._session, request(RequestCode.DELETE_EXPIRED_COMMITLOG), cluster, broker)

    async def runtime_of(self, broker: Broker) -> BrokerRuntime:
        reply = await self._session.ask(broker, request(RequestCode.GET_BROKER_RUNTIME_INFO))
        return BrokerRuntime(decode_body(KVTable, reply.body_bytes).table)


def properties_table(body: bytes) -> dict[str, str]:
    """Settings as servers send them: properties text."""
    return {key: given.value for key, given in parse_properties(body.decode("utf-8", "replace")).items()}
