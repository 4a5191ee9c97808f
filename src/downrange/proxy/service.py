"""apache.rocketmq.v2.MessagingService: which method answers which call, and what every call passes first.

access control -> client id -> the method; an error becomes the status of the answer (errors.py)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from downrange.auth.access_control import Need
from downrange.proxy.access import PUB, PUB_OR_SUB, SUB, CallGuard, group_need, topic_need
from downrange.proxy.backend import Backend
from downrange.proxy.call_figures import CallFigures, method_name
from downrange.proxy.caller import Caller, caller_of
from downrange.proxy.checks import check_group, check_topic
from downrange.proxy.clients import Client, Clients
from downrange.proxy.errors import OK, CallFailed, Refused, status_of
from downrange.proxy.http2.stream import Stream
from downrange.proxy.message_types import ACCEPTED, UNSPECIFIED
from downrange.proxy.receiving import Receiving
from downrange.proxy.renewal import Renewal
from downrange.proxy.routing import assignments_of, queues_of
from downrange.proxy.sending import Sending
from downrange.proxy.telemetry import Telemetry, type_name
from downrange.proxy.wire import messages as m
from downrange.proxy.wire.enums import ClientType, Code, GrpcStatus
from downrange.proxy.wire.schema import SERVICE

log = logging.getLogger(__name__)

MOST_CALLS: Final = 10_000
"""Calls that are being answered at once, without telemetry streams and receives."""
_NO_SETTINGS: Final = "cannot find client settings for this client"
_PREFIX: Final = f"/{SERVICE}/".encode()
_UNSERVED: Final = frozenset({"PullMessage", "UpdateOffset", "GetOffset", "QueryOffset"})


class Method(NamedTuple):
    """One unary call: its messages, the rights it needs, and what answers it; the name is for metrics."""

    request: Any
    response: Any
    needs: Callable[[Any], list[Need]]
    answer: Callable[[Caller, Any], Awaitable[Any]]
    name: str = ""


class Service:
    """Answers calls. `call` takes each new stream of a connection."""

    def __init__(
        self, backend: Backend, clients: Clients, renewal: Renewal, sending: Sending, receiving: Receiving,
        guard: CallGuard,
    ) -> None:  # fmt: skip
        self.figures = CallFigures(clients)
        self._backend = backend
        self._clients = clients
        self._renewal = renewal
        self._receiving = receiving
        self._guard = guard
        self._telemetry = Telemetry(backend, clients, guard)
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self.own_endpoints = m.Endpoints()
        """How clients reach this server, for those that do not say."""
        self._methods: dict[bytes, Method] = {
            _PREFIX + name.encode(): method._replace(name=method_name(name))
            for name, method in {
                "QueryRoute": Method(
                    m.QueryRouteRequest, m.QueryRouteResponse, _needs_topic(PUB_OR_SUB), self.query_route
                ),
                "QueryAssignment": Method(
                    m.QueryAssignmentRequest, m.QueryAssignmentResponse, _needs_both, self.query_assignment
                ),
                "Heartbeat": Method(m.HeartbeatRequest, m.HeartbeatResponse, _needs_optional_group, self.heartbeat),
                "NotifyClientTermination": Method(
                    m.NotifyClientTerminationRequest,
                    m.NotifyClientTerminationResponse,
                    _needs_optional_group,
                    self.terminate,
                ),
                "SendMessage": Method(m.SendMessageRequest, m.SendMessageResponse, _needs_sent, sending.send),
                "EndTransaction": Method(
                    m.EndTransactionRequest, m.EndTransactionResponse, _needs_topic(PUB), sending.end_transaction
                ),
                "RecallMessage": Method(
                    m.RecallMessageRequest, m.RecallMessageResponse, _needs_topic(PUB), sending.recall
                ),
                "AckMessage": Method(m.AckMessageRequest, m.AckMessageResponse, _needs_both, receiving.ack),
                "ChangeInvisibleDuration": Method(
                    m.ChangeInvisibleDurationRequest,
                    m.ChangeInvisibleDurationResponse,
                    _needs_group,
                    receiving.change_invisible,
                ),
                "ForwardMessageToDeadLetterQueue": Method(
                    m.ForwardMessageToDeadLetterQueueRequest,
                    m.ForwardMessageToDeadLetterQueueResponse,
                    _needs_both,
                    receiving.forward_to_dead_letters,
                ),
            }.items()
        }

    # --- calls --------------------------------------------------------------------------------------------------

    def call(self, stream: Stream) -> None:
        """Begin to answer a call."""
        path = stream.headers.get(b":path", b"")
        method = self._methods.get(path)
        if method is not None:
            work = self._unary(method, stream)
        elif path == _PREFIX + b"ReceiveMessage":
            work = self._receive(stream)
        elif path == _PREFIX + b"Telemetry":
            work = self._stream(stream)
        else:
            name = path.removeprefix(b"/").decode("utf-8", "replace")
            is_known = path.startswith(_PREFIX) and name.rpartition("/")[2] in _UNSERVED
            text = f"Method {name} is unimplemented" if is_known else f"Method not found: {name}"
            work = self._unserved(stream, text)
        task = self._loop.create_task(work)
        stream.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Give up all calls."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _unserved(self, stream: Stream, text: str) -> None:
        await stream.receive()  # a client that is still sending would take the end for a fault
        stream.finish(GrpcStatus.UNIMPLEMENTED, text)

    async def _request(self, stream: Stream, kind: Any) -> Any:
        """The one message of a call; None, with the call ended, when there is none or it cannot be read."""
        data = await stream.receive()
        if data is None:
            stream.finish(GrpcStatus.INTERNAL, "the call has no message")
            return None
        try:
            return kind.FromString(data)
        except DecodeError:
            stream.finish(GrpcStatus.UNKNOWN)
            return None

    async def _unary(self, method: Method, stream: Stream) -> None:
        request = await self._request(stream, method.request)
        if request is None:
            return
        begun = self._loop.time()
        caller = caller_of(stream, begun)
        try:
            if len(self._tasks) > MOST_CALLS and len(self._tasks) - len(self._clients) * 4 > MOST_CALLS:
                raise Refused(Code.TOO_MANY_REQUESTS, "flow limit")
            if self._guard.is_on:
                await self._guard.check(caller, method.needs(request))
            caller.require_client_id()
            response = await method.answer(caller, request)
        except Exception as error:
            response = method.response(status=status_of(error))
        stream.answer(response.SerializeToString())
        self.figures.answered(method.name, response.status.code, self._loop.time() - begun)

    async def _receive(self, stream: Stream) -> None:
        request = await self._request(stream, m.ReceiveMessageRequest)
        if request is None:
            return
        begun = self._loop.time()
        caller = caller_of(stream, begun)
        try:
            queue_topic = request.message_queue.topic.name
            await self._guard.check(caller, (group_need(request.group.name, SUB), topic_need(queue_topic, SUB)))
            caller.require_client_id()
        except Refused as error:
            status = status_of(error)
            stream.send_message(m.ReceiveMessageResponse(status=status).SerializeToString())
            stream.finish()
            code = status.code
        else:
            code = await self._receiving.receive(caller, request, stream)
        self.figures.answered("receive_message", code, self._loop.time() - begun)

    async def _stream(self, stream: Stream) -> None:
        try:
            await self._telemetry.serve(caller_of(stream, self._loop.time()), stream)
        except CallFailed as error:
            stream.finish(error.status, str(error))
        except DecodeError:
            stream.finish(GrpcStatus.UNKNOWN)
        except Exception as error:
            text = status_of(error).message
            stream.finish(GrpcStatus.INTERNAL, f"process client telemetryCommand failed. {text}")

    # --- routes -------------------------------------------------------------------------------------------------

    async def query_route(self, caller: Caller, request: m.QueryRouteRequest) -> m.QueryRouteResponse:
        topic = check_topic(request.topic)
        route = await self._backend.route(topic)
        accepted = ACCEPTED.get(await self._backend.topic_type(topic), ACCEPTED[UNSPECIFIED])
        response = m.QueryRouteResponse(status=OK)
        response.message_queues.extend(queues_of(route, request.topic, self._endpoints(request.endpoints), accepted))
        return response

    async def query_assignment(self, caller: Caller, request: m.QueryAssignmentRequest) -> m.QueryAssignmentResponse:
        topic, group = check_topic(request.topic), check_group(request.group)
        route = await self._backend.route(topic)
        config = await self._backend.group(group)
        found = assignments_of(
            route,
            request.topic,
            self._endpoints(request.endpoints),
            orderly=config is not None and bool(config.consume_message_orderly),
        )
        response = m.QueryAssignmentResponse(status=OK)
        response.assignments.extend(found)
        if not response.assignments:
            raise Refused(Code.FORBIDDEN, "no readable queue")
        return response

    def _endpoints(self, asked: m.Endpoints) -> m.Endpoints:
        """The address by which the client reached us: every broker of the cluster is served through it."""
        return asked if asked.addresses else self.own_endpoints

    # --- clients ------------------------------------------------------------------------------------------------

    async def heartbeat(self, caller: Caller, request: m.HeartbeatRequest) -> m.HeartbeatResponse:
        client = self._known(caller)
        if client.kind in (ClientType.PUSH_CONSUMER, ClientType.SIMPLE_CONSUMER):
            check_group(request.group)
        elif client.kind != ClientType.PRODUCER:
            raise Refused(Code.UNRECOGNIZED_CLIENT_TYPE, type_name(client.kind))
        return m.HeartbeatResponse(status=OK)

    async def terminate(
        self, caller: Caller, request: m.NotifyClientTerminationRequest
    ) -> m.NotifyClientTerminationResponse:
        client = self._known(caller)
        await self._renewal.release(client.client_id)
        await self._clients.remove(client)
        return m.NotifyClientTerminationResponse(status=OK)

    def _known(self, caller: Caller) -> Client:
        client = self._clients.heard(caller.client_id)
        if client is None:
            raise Refused(Code.UNRECOGNIZED_CLIENT_TYPE, _NO_SETTINGS)
        return client


def _needs_topic(actions: frozenset[Any]) -> Callable[[Any], list[Need]]:
    return lambda request: [topic_need(request.topic.name, actions)]


def _needs_both(request: Any) -> list[Need]:
    return [group_need(request.group.name, SUB), topic_need(request.topic.name, SUB)]


def _needs_group(request: Any) -> list[Need]:
    return [group_need(request.group.name, SUB)]


def _needs_optional_group(request: Any) -> list[Need]:
    return [group_need(request.group.name, SUB)] if request.group.name else []


def _needs_sent(request: Any) -> list[Need]:
    return [topic_need(name, PUB) for name in sorted({message.topic.name for message in request.messages})]
