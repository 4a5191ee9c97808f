"""SendMessage, EndTransaction and RecallMessage."""

from __future__ import annotations

import base64
import binascii
import random
from collections import OrderedDict
from typing import Final, NamedTuple

from downrange.clock import Clock
from downrange.model.message import MessageQueue
from downrange.model.properties import encode_properties
from downrange.model.topics import DLQ_PREFIX, RETRY_PREFIX
from downrange.protocol.bodies.routes import TopicRouteData
from downrange.protocol.codes import ResponseCode
from downrange.proxy.backend import Backend, HalfMessage, Outgoing, Sent
from downrange.proxy.caller import Caller
from downrange.proxy.checks import check_message, check_topic
from downrange.proxy.clients import Clients
from downrange.proxy.conversion import properties_of, sys_flag_of
from downrange.proxy.errors import OK, Refused, status_of
from downrange.proxy.message_types import UNSPECIFIED, check_type, queue_of_group, type_of
from downrange.proxy.routing import served, writable
from downrange.proxy.times import millis
from downrange.proxy.wire.enums import Code, MessageType, TransactionResolution, TransactionSource
from downrange.proxy.wire.messages import (
    EndTransactionRequest,
    EndTransactionResponse,
    Message,
    RecallMessageRequest,
    RecallMessageResponse,
    SendMessageRequest,
    SendMessageResponse,
    Status,
)
from downrange.transport.errors import TransportError

_MOST_TRANSACTIONS: Final = 100_000
_TRANSACTION_MILLIS: Final = 6 * 3_600_000
_AVOIDED_SECONDS: Final = 2.0
_UNSAFE: Final = {
    ResponseCode.FLUSH_DISK_TIMEOUT: (Code.MASTER_PERSISTENCE_TIMEOUT, "FLUSH_DISK_TIMEOUT"),
    ResponseCode.FLUSH_SLAVE_TIMEOUT: (Code.SLAVE_PERSISTENCE_TIMEOUT, "FLUSH_SLAVE_TIMEOUT"),
    ResponseCode.SLAVE_NOT_AVAILABLE: (Code.HA_NOT_AVAILABLE, "SLAVE_NOT_AVAILABLE"),
}
_STATES: Final = {TransactionResolution.COMMIT: 8, TransactionResolution.ROLLBACK: 12}
"""Resolution -> the transaction bits of END_TRANSACTION."""
_RECALL_PARTS: Final = 5


class _Transaction(NamedTuple):
    half: HalfMessage
    began: int
    resolution: int = 0
    """How it ended; 0 while it is open."""


class Transactions:
    """Where the half messages of transactions are, by topic and transaction id; the oldest are forgotten.

    A broker asks about a transaction that nobody ended, and tells its place again.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: OrderedDict[tuple[str, str], _Transaction] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def begun(self, topic: str, transaction_id: str, half: HalfMessage) -> None:
        now = self._clock.now()
        known = self._known
        known[topic, transaction_id] = _Transaction(half, now)
        known.move_to_end((topic, transaction_id))
        while known and (
            len(known) > _MOST_TRANSACTIONS or now - next(iter(known.values())).began > _TRANSACTION_MILLIS
        ):
            known.popitem(last=False)

    def get(self, topic: str, transaction_id: str) -> _Transaction | None:
        return self._known.get((topic, transaction_id))

    def ended(self, topic: str, transaction_id: str, resolution: int) -> None:
        known = self._known.get((topic, transaction_id))
        if known is not None:
            self._known[topic, transaction_id] = known._replace(resolution=resolution)


class Sending:
    def __init__(self, backend: Backend, clients: Clients, clock: Clock) -> None:
        self._backend = backend
        self._clients = clients
        self._clock = clock
        self._turns: dict[str, int] = {}
        self._sizes: dict[str, tuple[TopicRouteData, list[tuple[str, int]]]] = {}
        """Of each topic its route, and from that the queues for writing of each broker."""
        self._avoided: dict[str, float] = {}
        self.transactions = Transactions(clock)

    async def send(self, caller: Caller, request: SendMessageRequest) -> SendMessageResponse:
        if not request.messages:
            raise Refused(Code.MESSAGE_CORRUPTED, "no message to send")
        topic = check_topic(request.messages[0].topic)
        now = self._clock.now()
        for message in request.messages:
            if message.topic != request.messages[0].topic:
                raise Refused(Code.MESSAGE_CORRUPTED, "topic in message is not same")
            check_message(message, now)
        is_batch = len(request.messages) > 1
        if is_batch and request.messages[0].system_properties.message_type == MessageType.TRANSACTION:
            raise Refused(Code.INTERNAL_SERVER_ERROR, "transactional messages are sent one by one")
        prepared = [(message, properties_of(message, topic, caller.peer)) for message in request.messages]
        if not topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
            expected = await self._backend.topic_type(topic)
            if expected != UNSPECIFIED:  # a topic that is not there is reported as such
                for _, properties in prepared:
                    check_type(expected, type_of(properties))
        group = "" if is_batch else request.messages[0].system_properties.message_group
        queue = await self._queue(topic, group)
        await self._register(caller, topic)
        response = SendMessageResponse()
        for message, properties in prepared:
            await self._send_one(topic, queue, message, properties, response)
        codes = {entry.status.code for entry in response.entries}
        code = codes.pop() if len(codes) == 1 else Code.MULTIPLE_RESULTS
        response.status.code = code
        response.status.message = Code(code).name
        return response

    async def _send_one(
        self,
        topic: str,
        queue: MessageQueue,
        message: Message,
        properties: dict[str, str],
        response: SendMessageResponse,
    ) -> None:
        system = message.system_properties
        born = millis(system.born_timestamp)
        outgoing = Outgoing(queue, message.body, encode_properties(properties), sys_flag_of(message), born)
        try:
            sent = await self._backend.send(topic, outgoing)
        except Exception as error:
            if isinstance(error, TransportError):
                self._avoided[queue.broker_name] = self._clock.monotonic() + _AVOIDED_SECONDS
            if not response.entries:  # nothing is stored: the whole request failed
                raise
            response.entries.add().status.CopyFrom(status_of(error))
            return
        entry = response.entries.add()
        entry.status.CopyFrom(_status(sent))
        entry.message_id = entry.transaction_id = system.message_id
        entry.offset = sent.queue_offset
        entry.recall_handle = sent.recall_handle
        if system.message_type == MessageType.TRANSACTION:
            half = HalfMessage(queue.broker_name, sent.queue_offset, sent.log_offset)
            self.transactions.begun(topic, system.message_id, half)

    async def _queue(self, topic: str, message_group: str) -> MessageQueue:
        """The queue of a message group, or the next queue in turn."""
        route = await self._backend.route(topic)
        known = self._sizes.get(topic)
        if known is None or known[0] is not route:  # a route that did not change is the same object
            known = self._sizes[topic] = (route, [(data.broker_name, writable(data)) for data in served(route)])
        sizes = known[1]
        if not message_group and self._avoided:
            now = self._clock.monotonic()
            self._avoided = {name: until for name, until in self._avoided.items() if until > now}
            sizes = [(name, size) for name, size in sizes if name not in self._avoided] or sizes
        total = sum(size for _, size in sizes)
        if not total:
            raise Refused(Code.FORBIDDEN, "no writable queue")
        if message_group:
            place = queue_of_group(message_group, total)
        else:
            turn = self._turns.get(topic)
            if turn is None:
                turn = random.randrange(total)  # noqa: S311  spreads load, guards nothing
            self._turns[topic] = turn + 1
            place = turn % total
        for name, size in sizes:
            if place < size:
                return MessageQueue(topic, name, place)
            place -= size
        raise AssertionError("the sizes add up to the total")

    async def _register(self, caller: Caller, topic: str) -> None:
        """A producer that sends to a topic is asked about its transactions there."""
        client = self._clients.heard(caller.client_id)
        if client is not None and topic not in client.topics and client.settings.WhichOneof("kind") == "publishing":
            await self._clients.register_producer(client, topic)

    # --- transactions -------------------------------------------------------------------------------------------

    async def end_transaction(self, caller: Caller, request: EndTransactionRequest) -> EndTransactionResponse:
        topic = check_topic(request.topic)
        transaction_id = request.transaction_id
        if not transaction_id.strip():
            raise Refused(Code.INVALID_TRANSACTION_ID, "transaction id cannot be empty")
        known = self.transactions.get(topic, transaction_id)
        if known is None:
            raise Refused(Code.INTERNAL_SERVER_ERROR, "cannot found transaction data")
        resolution = request.resolution
        if known.resolution and known.resolution != resolution:
            raise Refused(Code.INVALID_TRANSACTION_ID, "the transaction has ended the other way")
        if not known.resolution and resolution in _STATES:
            state = _STATES[TransactionResolution(resolution)]
            checked = request.source == TransactionSource.SOURCE_SERVER_CHECK
            await self._backend.end_transaction(topic, known.half, transaction_id, state, checked)
            self.transactions.ended(topic, transaction_id, resolution)
        return EndTransactionResponse(status=OK)

    # --- timer messages -----------------------------------------------------------------------------------------

    async def recall(self, caller: Caller, request: RecallMessageRequest) -> RecallMessageResponse:
        topic = check_topic(request.topic)
        check_type(await self._backend.topic_type(topic), MessageType.DELAY)
        broker_name = recall_broker(request.recall_handle)
        message_id = await self._backend.recall(topic, broker_name, request.recall_handle)
        return RecallMessageResponse(status=OK, message_id=message_id)


def recall_broker(handle: str) -> str:
    """The broker of a timer message: its handle is `v1 topic broker time id` in Base64."""
    try:
        parts = base64.urlsafe_b64decode(handle.encode()).decode().split(" ")
    except (binascii.Error, ValueError):
        parts = []
    if len(parts) < _RECALL_PARTS or parts[0] != "v1":
        raise Refused(Code.INTERNAL_SERVER_ERROR, "recall handle is invalid")
    return parts[2]


def _status(sent: Sent) -> Status:
    unsafe = _UNSAFE.get(sent.code)  # type: ignore[call-overload]  # an enum member equals its number
    if unsafe is None:
        return OK
    code, name = unsafe
    return Status(code=code, message=f"send message failed, sendStatus={name}")
