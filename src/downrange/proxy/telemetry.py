"""Telemetry streams: settings of clients, and commands of the server that clients answer."""

from __future__ import annotations

import asyncio
from typing import Final

from downrange.auth.access_control import Need
from downrange.proxy.access import PUB, SUB, CallGuard, group_need, topic_need
from downrange.proxy.backend import Backend
from downrange.proxy.caller import Caller
from downrange.proxy.checks import check_group, check_topic
from downrange.proxy.client_settings import merged
from downrange.proxy.clients import Client, Clients
from downrange.proxy.errors import OK, CallFailed, Refused
from downrange.proxy.http2.stream import Stream
from downrange.proxy.wire.enums import ClientType, GrpcStatus
from downrange.proxy.wire.messages import Settings, TelemetryCommand

_FAILED: Final = "process client telemetryCommand failed."
_AGAIN_SECONDS: Final = 1.0
_CONSUMERS: Final = (ClientType.PUSH_CONSUMER, ClientType.SIMPLE_CONSUMER)


class Telemetry:
    def __init__(self, backend: Backend, clients: Clients, guard: CallGuard) -> None:
        self._backend = backend
        self._clients = clients
        self._guard = guard

    async def serve(self, caller: Caller, stream: Stream) -> None:
        """Answer the commands of one stream until the client ends it."""
        client: Client | None = None
        try:
            while (data := await stream.receive()) is not None:
                command = TelemetryCommand.FromString(data)
                if client is None:  # not before the first command: clients take an earlier end for a fault
                    await self._guard.check(caller, ())
                    caller.require_client_id()
                kind = command.WhichOneof("kind")
                if kind == "settings":
                    is_first = client is None
                    client = await self._settings(caller, command.settings)
                    if is_first:
                        client.streams.append(stream)
                    self._answer(client, stream, again=is_first)
                elif kind == "thread_stack_trace":
                    self._clients.answered(command.thread_stack_trace.nonce, command)
                elif kind == "verify_message_result":
                    self._clients.answered(command.verify_message_result.nonce, command)
                if client is not None:
                    self._clients.heard(caller.client_id)
        except Refused as error:
            refusal = TelemetryCommand()
            refusal.status.code, refusal.status.message = error.code, str(error)
            stream.send_message(refusal.SerializeToString())
        finally:
            if client is not None and stream in client.streams:
                client.streams.remove(stream)
        stream.finish()

    def _answer(self, client: Client, stream: Stream, *, again: bool) -> None:
        answer = TelemetryCommand(status=OK, settings=client.settings).SerializeToString()
        stream.send_message(answer)
        if again:
            # The Node.js client hangs in its start when the settings come before all its routes; it takes them again.
            asyncio.get_running_loop().call_later(_AGAIN_SECONDS, stream.send_message, answer)

    async def _settings(self, caller: Caller, settings: Settings) -> Client:
        kind = settings.WhichOneof("kind")
        if kind is None:
            raise CallFailed(GrpcStatus.INVALID_ARGUMENT, "there is no publishing or subscription data in settings")
        await self._guard.check(caller, _needs(settings))
        try:
            _check_names(settings)
        except Refused as error:
            raise CallFailed(GrpcStatus.INVALID_ARGUMENT, f"{_FAILED} {error}") from None
        group = None
        if kind == "subscription":
            if settings.client_type not in _CONSUMERS:
                raise CallFailed(
                    GrpcStatus.INTERNAL,
                    f"{_FAILED} Client type is not consumer, type: {type_name(settings.client_type)}",
                )
            group = await self._backend.group(settings.subscription.group.name)
        return await self._clients.put(caller.client_id, merged(settings, group))


def _needs(settings: Settings) -> list[Need]:
    if settings.WhichOneof("kind") == "publishing":
        return [topic_need(topic.name, PUB) for topic in settings.publishing.topics]
    ours = settings.subscription
    return [group_need(ours.group.name, SUB), *(topic_need(entry.topic.name, SUB) for entry in ours.subscriptions)]


def _check_names(settings: Settings) -> None:
    if settings.WhichOneof("kind") == "publishing":
        for topic in settings.publishing.topics:
            check_topic(topic)
        return
    check_group(settings.subscription.group)
    for entry in settings.subscription.subscriptions:
        check_topic(entry.topic)


def type_name(number: int) -> str:
    try:
        return ClientType(number).name
    except ValueError:
        return "UNRECOGNIZED"
