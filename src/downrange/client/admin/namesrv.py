"""Name servers: their configuration, their key-value store, and the write permission of brokers in their routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from downrange.client.admin.cluster import properties_table
from downrange.client.per_server import PerServer
from downrange.client.session import Session
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.kv_config import (
    ORDER_TOPIC_CONFIG,
    GetKVConfigResponse,
    KVConfigRequest,
    KVNamespaceRequest,
    KVTable,
    PutKVConfigRequest,
)
from downrange.protocol.bodies.routes import AddWritePermResponse, BrokerNameRequest, WipeWritePermResponse
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from downrange.settings import format_properties

H = TypeVar("H", bound=msgspec.Struct)


class NamesrvAdmin:
    """Actions on name servers. Reads ask one of them, writes go to every one."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def config(self) -> PerServer[str, dict[str, str]]:
        async def ask(address: str) -> dict[str, str]:
            reply = await self._session.invoke(address, request(RequestCode.GET_NAMESRV_CONFIG))
            return properties_table(reply.body_bytes)

        return await self._session.ask_every_namesrv(ask)

    async def update_config(self, changes: Mapping[str, str]) -> PerServer[str, None]:
        body = format_properties(changes).encode()
        return await self.tell_every(request(RequestCode.UPDATE_NAMESRV_CONFIG, body=body))

    async def wipe_write_perm(self, broker_name: str) -> PerServer[str, int]:
        """Let producers leave a broker; the number of topics that changed, by name server."""

        async def ask(address: str) -> int:
            command = request(RequestCode.WIPE_WRITE_PERM_OF_BROKER, BrokerNameRequest(broker_name))
            return (await self._session.invoke(address, command)).header(WipeWritePermResponse).wipe_topic_count

        return await self._session.ask_every_namesrv(ask)

    async def add_write_perm(self, broker_name: str) -> PerServer[str, int]:
        """Let producers come back to a broker."""

        async def ask(address: str) -> int:
            command = request(RequestCode.ADD_WRITE_PERM_OF_BROKER, BrokerNameRequest(broker_name))
            return (await self._session.invoke(address, command)).header(AddWritePermResponse).add_topic_count

        return await self._session.ask_every_namesrv(ask)

    async def put_kv(self, namespace: str, key: str, value: str) -> PerServer[str, None]:
        header = PutKVConfigRequest(namespace=namespace, key=key, value=value)
        return await self.tell_every(request(RequestCode.PUT_KV_CONFIG, header))

    async def get_kv(self, namespace: str, key: str) -> str:
        """The value; raises QueryNotFound."""
        header = KVConfigRequest(namespace=namespace, key=key)
        reply = await self._session.ask_namesrv(request(RequestCode.GET_KV_CONFIG, header))
        return reply.header(GetKVConfigResponse).value or ""

    async def order_conf(self, topic: str) -> str:
        """The queues of an ordered topic, as `broker-a:4;broker-b:4`; raises QueryNotFound."""
        return await self.get_kv(ORDER_TOPIC_CONFIG, topic)

    async def update_order_conf(self, topic: str, queues: str | None) -> PerServer[str, None]:
        """Enter the queues of an ordered topic; None removes them."""
        if queues is None:
            return await self.delete_kv(ORDER_TOPIC_CONFIG, topic)
        return await self.put_kv(ORDER_TOPIC_CONFIG, topic, queues)

    async def list_kv(self, namespace: str) -> dict[str, str]:
        """Every key of a namespace; raises QueryNotFound when there is no such namespace."""
        command = request(RequestCode.GET_KVLIST_BY_NAMESPACE, KVNamespaceRequest(namespace))
        return decode_body(KVTable, (await self._session.ask_namesrv(command)).body_bytes).table

    async def delete_kv(self, namespace: str, key: str) -> PerServer[str, None]:
        header = KVConfigRequest(namespace=namespace, key=key)
        return await self.tell_every(request(RequestCode.DELETE_KV_CONFIG, header))

    async def tell_every(self, command: Command) -> PerServer[str, None]:
        async def tell(address: str) -> None:
            await self._session.invoke(address, command)

        return await self._session.ask_every_namesrv(tell)
