"""Calls of the gRPC protocol by a client of another project (grpcio), with our message classes."""

from __future__ import annotations

import hmac
import itertools
import time
from types import TracebackType
from typing import Any, Final, Self

import grpc
import grpc.aio

from downrange.proxy.times import put
from downrange.proxy.wire import messages as m
from downrange.proxy.wire.enums import ClientType, FilterType, MessageType
from downrange.proxy.wire.schema import SERVICE

_numbers: Final = itertools.count(1)
DATE: Final = "20261116T120000Z"


class Caller:
    """A client that makes single calls. `async with Caller(target) as caller: await caller("QueryRoute", request)`."""

    def __init__(
        self,
        target: str,
        *,
        certificate: bytes | None = None,
        account: tuple[str, str] | None = None,
        client_id: str | None = None,
    ) -> None:
        """With the certificate of the server the connection is made with TLS."""
        options: list[tuple[str, Any]] = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if certificate is not None:
            options.append(("grpc.ssl_target_name_override", "localhost"))
            self.channel = grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(certificate), options)
        else:
            self.channel = grpc.aio.insecure_channel(target, options)
        self.client_id = client_id or f"test@{next(_numbers)}"
        self.metadata = [("x-mq-client-id", self.client_id), ("x-mq-language", "PYTHON")]
        if account is not None:
            user, secret = account
            signature = hmac.digest(secret.encode(), DATE.encode(), "sha1").hex()
            text = f"MQv2-HMAC-SHA1 Credential={user}//rocketmq, SignedHeaders=x-mq-date-time, Signature={signature}"
            self.metadata += [("x-mq-date-time", DATE), ("authorization", text)]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.channel.close()

    async def __call__(self, method: str, request: Any, timeout: float = 10) -> Any:
        """The answer to a unary call."""
        response = getattr(m, f"{method}Response")
        data = await self.raw(method, request.SerializeToString(), timeout)
        return response.FromString(data)

    async def raw(self, method: str, data: bytes, timeout: float = 10) -> bytes:
        answer: bytes = await self.channel.unary_unary(f"/{SERVICE}/{method}")(
            data, metadata=self.metadata, timeout=timeout
        )
        return answer

    def receive(
        self, topic: str, group: str, *, poll: float = 1.0, invisible: float = 30.0, batch: int = 16, broker: str = ""
    ) -> Any:
        """A running ReceiveMessage call."""
        request = m.ReceiveMessageRequest(batch_size=batch)
        request.group.name = group
        request.message_queue.topic.name = topic
        request.message_queue.broker.name = broker
        request.filter_expression.type = FilterType.TAG
        request.filter_expression.expression = "*"
        put(request.invisible_duration, int(invisible * 1000))
        put(request.long_polling_timeout, int(poll * 1000))
        call = self.channel.unary_stream(f"/{SERVICE}/ReceiveMessage")
        return call(request.SerializeToString(), metadata=self.metadata, timeout=poll + 10)

    async def received(self, topic: str, group: str, **options: Any) -> list[Any]:
        """The messages of one receive."""
        found = []
        async for data in self.receive(topic, group, **options):
            response = m.ReceiveMessageResponse.FromString(data)
            if response.WhichOneof("kind") == "message":
                found.append(response.message)
        return found

    def telemetry(self) -> Any:
        return self.channel.stream_stream(f"/{SERVICE}/Telemetry")(metadata=self.metadata)


def message(topic: str, body: bytes, **system: Any) -> Any:
    """A message to be sent."""
    found = m.Message(body=body)
    found.topic.name = topic
    found.system_properties.message_id = f"0102{next(_numbers):030X}"
    found.system_properties.message_type = MessageType.NORMAL
    found.system_properties.born_timestamp.seconds = int(time.time())
    for name, value in system.items():
        setattr(found.system_properties, name, value)
    return found


def send_request(*found: Any) -> Any:
    request = m.SendMessageRequest()
    request.messages.extend(found)
    return request


def route_request(topic: str) -> Any:
    request = m.QueryRouteRequest()
    request.topic.name = topic
    return request


def settings_command(kind: ClientType, topic: str, group: str = "") -> bytes:
    command = m.TelemetryCommand()
    command.settings.client_type = kind
    if kind is ClientType.PRODUCER:
        command.settings.publishing.topics.add().name = topic
    else:
        ours = command.settings.subscription
        ours.group.name = group
        entry = ours.subscriptions.add()
        entry.topic.name = topic
        entry.expression.type = FilterType.TAG
        entry.expression.expression = "*"
    return command.SerializeToString()
