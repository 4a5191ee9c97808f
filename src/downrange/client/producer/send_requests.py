"""The requests that carry messages to brokers: made, sent, and answered, with the user's hooks around them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from downrange.client.config import ProducerConfig
from downrange.client.producer.hooks import SendContext, SendHook
from downrange.client.producer.outgoing import Outgoing
from downrange.client.producer.retry import SendKind
from downrange.client.producer.send_result import STATUS_OF_CODE, Expected, SendResult
from downrange.client.producer.stored_reply import result_of
from downrange.client.session import Session, accepted
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue, SysFlag
from downrange.protocol.bodies.send import SendMessageResponse
from downrange.protocol.bodies.send_template import LONGEST_FRAME, SendTemplate, encode_send
from downrange.protocol.command import ONEWAY_FLAG, Command
from downrange.transport.errors import TransportClosed

log = logging.getLogger(__name__)

_REMEMBERED: Final = 10_000  # topics and brokers


class SendRequests:
    """Makes the requests of one producer and sends them. Used on the session's event loop."""

    def __init__(
        self,
        group: str,
        session: Session,
        config: ProducerConfig,
        hooks: Sequence[SendHook],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.new_future = loop.create_future
        self.is_plain = not hooks and not session.is_signing
        """Whether frames may go out as they are encoded: there are no hooks to call and no signature to add."""
        self._group = group
        self._session = session
        self._clock = session.clock
        self._config = config
        self._hooks = hooks
        self._templates: dict[tuple[str, str, int], SendTemplate] = {}

    def ask(
        self, ready: Outgoing, kind: SendKind, queue: MessageQueue, address: str, seconds: float
    ) -> Awaitable[Command | SendResult | None]:
        """The broker's reply to come, of any code; None for a one-way send."""
        if self._hooks:
            return self._ask_with_hooks(ready, kind, queue, address, seconds)
        return self._ask(ready, kind, queue, address, seconds)

    def template(self, topic: str, broker_name: str, code: int) -> SendTemplate:
        """The bytes that all requests of one code to one topic on one broker share. Any thread may call this method."""
        key = (topic, broker_name, code)
        template = self._templates.get(key)
        if template is None:
            template = SendTemplate(
                code,
                self._group,
                topic,
                broker_name,
                default_topic=self._config.create_topic_key,
                default_topic_queue_nums=self._config.default_topic_queue_nums,
            )
            if len(self._templates) >= _REMEMBERED:
                self._templates.clear()
            self._templates[key] = template
        return template

    def forget_given_up(self, address: str | None) -> None:
        """Make room for other requests after an attempt was cancelled."""
        connection = self._session.connection(address) if address else None
        if connection is not None:
            connection.forget_given_up()

    def _ask(
        self, ready: Outgoing, kind: SendKind, queue: MessageQueue, address: str, seconds: float
    ) -> Awaitable[Command | SendResult | None]:
        if kind is SendKind.ONEWAY:
            return self._session.oneway(address, self._command(ready, queue, ONEWAY_FLAG))
        if not self._session.is_signing:
            asked = self._ask_over_open_connection(ready, queue, address, seconds)
            if asked is not None:  # nearly always, and cheaper than a coroutine
                return asked
        return self._session.invoke(address, self._command(ready, queue), seconds, STATUS_OF_CODE)

    def _ask_over_open_connection(
        self, ready: Outgoing, queue: MessageQueue, address: str, seconds: float
    ) -> asyncio.Future[Command | SendResult] | None:
        connection = self._session.connection_known(address)
        opaque = None if connection is None else connection.opaque_if_room()
        if connection is None or opaque is None:
            return None
        frame = encode_send(
            self.template(ready.topic, queue.broker_name, ready.code).pieces,
            opaque,
            queue.queue_id,
            ready.sys_flag,
            ready.born_timestamp,
            ready.flag,
            ready.properties,
            ready.body,
            LONGEST_FRAME,
        )
        ids = ready.message_ids
        expected: Expected | None = (ids[0], ready.messages[0].topic, queue) if len(ids) == 1 else None
        asked: asyncio.Future[Command | SendResult] = self.new_future()
        try:
            connection.ask_encoded(opaque, frame, asked, ready.code, seconds, expected)
        except TransportClosed:
            return None
        return asked

    def _command(self, ready: Outgoing, queue: MessageQueue, flag: int = 0) -> Command:
        fields = self.template(ready.topic, queue.broker_name, ready.code).fields(
            queue.queue_id, ready.sys_flag, ready.born_timestamp, ready.flag, ready.properties
        )
        return Command(ready.code, 0, flag, fields, ready.body)

    async def _ask_with_hooks(
        self, ready: Outgoing, kind: SendKind, queue: MessageQueue, address: str, seconds: float
    ) -> Command | SendResult | None:
        context = SendContext(
            producer_group=self._group,
            namespace=self._config.namespace,
            kind=kind,
            messages=ready.messages,
            message_ids=ready.message_ids,
            queue=queue,
            broker_address=address,
            started=self._clock.now(),
            is_half=bool(ready.sys_flag & SysFlag.TRANSACTION_PREPARED),
        )
        for hook in self._hooks:
            _run_hook(hook.before_send, context)
        begun = self._clock.monotonic()
        try:
            reply = await self._ask(ready, kind, queue, address, seconds)
            if reply is not None:
                context.results = results = results_of(reply, ready, queue)
                context.region_id = results[0].region_id
                context.trace_on = results[0].trace_on
            return reply
        except MQError as error:
            context.error = error
            raise
        finally:
            context.cost_millis = (self._clock.monotonic() - begun) * 1000
            for hook in self._hooks:
                _run_hook(hook.after_send, context)


def results_of(reply: Command | SendResult, ready: Outgoing, queue: MessageQueue) -> Sequence[SendResult]:
    """One result for each message of a request; raises the BrokerError of a reply."""
    if isinstance(reply, SendResult):
        return (reply,)
    stored = accepted(reply, STATUS_OF_CODE).header(SendMessageResponse)
    status = STATUS_OF_CODE[reply.code]
    ids = ready.message_ids
    first = result_of(stored, status, (ids[0], ready.messages[0].topic, queue))
    if len(ids) == 1:
        return (first,)
    offset_ids = stored.msg_id.split(",")
    if len(offset_ids) != len(ids):  # 5.x may keep a batch as one record
        offset_ids = [stored.msg_id] * len(ids)
    offset, queue, region, trace_on = stored.queue_offset, first.queue, first.region_id, first.trace_on
    return [
        SendResult(status, message_id, offset_id, queue, offset + number, region, trace_on)
        for number, (message_id, offset_id) in enumerate(zip(ids, offset_ids, strict=True))
    ]


def _run_hook(hook: Callable[[SendContext], None], context: SendContext) -> None:
    try:
        hook(context)
    except Exception:
        # A send must not depend on the user's code.
        log.exception("send hook failed hook=%r", hook)
