"""A RocketMQ client reduced to its requests: what integration tests speak to a broker with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from downrange.broker.app import RunningBroker, broker
from downrange.broker.config import BrokerConfig
from downrange.clock import Clock
from downrange.model.message import StoredMessage
from downrange.model.record import decode_records
from downrange.model.subscription import Subscription, subscribe
from downrange.namesrv.app import name_server
from downrange.namesrv.config import NamesrvConfig
from downrange.protocol.bodies.body import encode_body
from downrange.protocol.bodies.groups import ConsumerData, HeartbeatData, ProducerData
from downrange.protocol.bodies.pull import PullMessageRequest, PullMessageResponse, PullSysFlag
from downrange.protocol.bodies.send import SendMessageRequest, SendMessageResponse
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from downrange.store.config import StoreConfig
from downrange.transport.connection import Connection
from downrange.transport.pool import connect
from downrange.transport.serving import CommandHandler, Endpoint, refuse, serve_commands
from downrange.transport.tls_config import NO_TLS, TlsConfig

SMALL_FILES = {"mapped_file_size_commit_log": 1 << 22, "max_hash_slot_num": 1000, "max_index_num": 4000}


def store_config(root: Path, **options: object) -> StoreConfig:
    return StoreConfig(store_path_root_dir=root, **{**SMALL_FILES, **options})  # type: ignore[arg-type]


@asynccontextmanager
async def standalone(
    root: Path,
    *,
    broker_options: Mapping[str, object] | None = None,
    store_options: Mapping[str, object] | None = None,
    clock: Clock | None = None,
    tls: TlsConfig = NO_TLS,
) -> AsyncIterator[RunningBroker]:
    """A name server and a broker in this process."""
    names = NamesrvConfig(
        listen_port=0, kv_config_path=root / "kv.json", config_store_path=root / "ns.properties", tls=tls
    )
    async with name_server(names) as namesrv:
        config = replace(
            BrokerConfig(
                namesrv_addr=f"127.0.0.1:{namesrv.port}",
                broker_name="broker-a",
                listen_port=0,
                metrics_port=-1,
                wait_time_mills_in_send_queue=5000,  # a busy machine is no reason to refuse
                tls=tls,
            ),
            **(broker_options or {}),  # type: ignore[arg-type]
        )
        async with broker(config, store_config(root / "store", **(store_options or {})), clock) as running:
            yield running


class BrokerClient:
    """One connection to a broker, with the requests tests use most as methods."""

    def __init__(self, connection: Connection, client_id: str) -> None:
        self.connection = connection
        self.client_id = client_id

    async def ask(self, command: Command, code: int = 0, timeout: float = 10) -> Command:
        reply = await self.connection.request(command, timeout)
        assert reply.code == code, f"code {reply.code}: {reply.remark}"
        return reply

    async def call(
        self, code: int, fields: Mapping[str, object] = {}, *, body: bytes = b"", expect: int = 0
    ) -> Command:
        """A request given by its ext fields."""
        text = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in fields.items()}
        return await self.ask(request(code, ext_fields=text, body=body), expect)

    def send_command(
        self,
        topic: str,
        body: bytes,
        *,
        queue_id: int = 0,
        properties: Mapping[str, str] = {},
        group: str = "producers",
        code: int = RequestCode.SEND_MESSAGE_V2,
        **fields: object,
    ) -> Command:
        header = SendMessageRequest(
            producer_group=group,
            topic=topic,
            queue_id=queue_id,
            born_timestamp=1_700_000_000_000,
            properties="\x02".join(f"{name}\x01{value}" for name, value in properties.items()),
            **fields,  # type: ignore[arg-type]
        )
        return request(code, header, body=body)

    async def send(self, topic: str, body: bytes, **options: object) -> SendMessageResponse:
        reply = await self.ask(self.send_command(topic, body, **options))  # type: ignore[arg-type]
        return reply.header(SendMessageResponse)

    async def heartbeat(
        self, *, consume: Mapping[str, list[Subscription]] | None = None, produce: tuple[str, ...] = ()
    ) -> None:
        body = HeartbeatData(
            client_id=self.client_id,
            consumer_data_set=tuple(
                ConsumerData(
                    group_name=group,
                    consume_type="CONSUME_PASSIVELY",
                    message_model="CLUSTERING",
                    consume_from_where="CONSUME_FROM_FIRST_OFFSET",
                    subscription_data_set=tuple(subscriptions),
                )
                for group, subscriptions in (consume or {}).items()
            ),
            producer_data_set=tuple(ProducerData(group) for group in produce),
        )
        await self.ask(request(RequestCode.HEART_BEAT, body=encode_body(body)))

    def pull_command(
        self,
        topic: str,
        *,
        queue_id: int = 0,
        offset: int = 0,
        group: str = "consumers",
        tags: str = "*",
        most: int = 32,
        wait_millis: int = 0,
        commit: int | None = None,
        with_subscription: bool = True,
    ) -> Command:
        flags = int(PullSysFlag.SUBSCRIPTION) if with_subscription else 0
        flags |= int(PullSysFlag.SUSPEND) if wait_millis else 0
        flags |= int(PullSysFlag.COMMIT_OFFSET) if commit is not None else 0
        header = PullMessageRequest(
            consumer_group=group,
            topic=topic,
            queue_id=queue_id,
            queue_offset=offset,
            max_msg_nums=most,
            sys_flag=flags,
            commit_offset=commit or 0,
            suspend_timeout_millis=wait_millis,
            subscription=tags,
            sub_version=0,
        )
        return request(RequestCode.PULL_MESSAGE, header)

    async def pull(
        self, topic: str, *, expect: int = 0, **options: object
    ) -> tuple[list[StoredMessage], PullMessageResponse]:
        reply = await self.ask(self.pull_command(topic, **options), expect, timeout=40)  # type: ignore[arg-type]
        return list(decode_records(reply.body_bytes)), reply.header(PullMessageResponse)


@asynccontextmanager
async def client_of(
    running: RunningBroker, client_id: str = "client@1", handler: CommandHandler = refuse
) -> AsyncIterator[BrokerClient]:
    connection = await connect(f"127.0.0.1:{running.config.broker.listen_port}", Endpoint(serve_commands(handler)))
    try:
        yield BrokerClient(connection, client_id)
    finally:
        await connection.drain(1)


def everything(topic: str, version: int = 1) -> Subscription:
    return subscribe(topic, "*", version=version)
