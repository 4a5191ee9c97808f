"""One attempt to send: the request out, the reply in, the hooks around it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from downrange.client.config import ProducerConfig
from downrange.client.producer.hooks import SendContext, SendHook
from downrange.client.producer.messages import Outgoing
from downrange.client.producer.retry import SendKind
from downrange.client.producer.send_result import STATUS_OF_CODE, SendResult
from downrange.client.producer.stored_reply import Expected, result_of, take_stored
from downrange.client.session import Session, accepted
from downrange.compiled import steps
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue, SysFlag
from downrange.protocol.bodies.send import SendMessageResponse
from downrange.protocol.bodies.send_template import SendTemplate
from downrange.protocol.command import ONEWAY_FLAG, Command
from downrange.transport.errors import TransportClosed
from downrange.transport.outstanding import Waiter

log = logging.getLogger(__name__)

_REMEMBERED: Final = 10_000  # topics and brokers


class Exchange:
    """Makes requests of messages and replies of requests, for one producer. Used on its session's loop."""

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
        """Whether requests go out as they are made here: without hooks, and without a signature of the whole."""
        self._group = group
        self._session = session
        self._is_signing = session.is_signing
        self._connection = session.connection_known
        self._clock = session.clock
        self._config = config
        self._hooks = hooks
        self._templates: dict[tuple[str, str, int], SendTemplate] = {}

    def reply(
        self, ready: Outgoing, kind: SendKind, queue: MessageQueue, address: str, seconds: float
    ) -> Awaitable[Command | SendResult | None]:
        """The broker's reply to come, of any code; None for a one-way send."""
        if self._hooks:
            return self._reply_with_hooks(ready, kind, queue, address, seconds)
        return self._reply(ready, kind, queue, address, seconds)

    def ask_now(
        self, ready: Outgoing, queue: MessageQueue, address: str | None, waiter: Waiter, seconds: float
    ) -> bool:
        """Send and let `waiter` have the reply, a Command or SendResult; False if it takes waiting. Runs no hooks."""
        connection = self._connection(address)  # type: ignore[arg-type]  # None is no key
        opaque = None if connection is None else connection.opaque_if_room()
        if connection is None or opaque is None:
            return False
        if connection.express is None:
            connection.express = take_stored
        ids = ready.message_ids
        expected: Expected | None = (ids[0], ready.messages[0].topic, queue) if len(ids) == 1 else None
        try:
            connection.ask_encoded(opaque, self.frame(ready, queue, opaque), waiter, ready.code, seconds, expected)
        except TransportClosed:
            return False
        return True

    def tell_now(self, ready: Outgoing, queue: MessageQueue, address: str | None) -> bool:
        """Send without wanting a reply; False if it takes waiting. Runs no hooks."""
        connection = self._connection(address)  # type: ignore[arg-type]  # None is no key
        if connection is None or not connection.is_writable:
            return False
        connection.oneway_encoded(self.frame(ready, queue, connection.next_opaque(), is_oneway=True))
        return True

    def frame(self, ready: Outgoing, queue: MessageQueue, opaque: int, is_oneway: bool = False) -> bytes:
        """The whole request. Any thread may call."""
        key = (ready.topic, queue.broker_name, ready.code)
        template = self._templates.get(key) or self.template(*key)
        frame = template.frame_in_python if steps is None else template.frame
        return frame(
            opaque,
            queue.queue_id,
            ready.sys_flag,
            ready.born_timestamp,
            ready.flag,
            ready.properties,
            ready.body,
            is_oneway,
        )

    def forget_given_up(self, address: str | None) -> None:
        """An attempt was cancelled: make room for others."""
        connection = self._session.connection(address) if address else None
        if connection is not None:
            connection.forget_given_up()

    def _reply(
        self, ready: Outgoing, kind: SendKind, queue: MessageQueue, address: str, seconds: float
    ) -> Awaitable[Command | SendResult | None]:
        if kind is SendKind.ONEWAY:
            return self._session.oneway(address, self._command(ready, queue, ONEWAY_FLAG))
        asked: asyncio.Future[Command | SendResult] = self.new_future()
        if not self._is_signing and self.ask_now(ready, queue, address, asked, seconds):
            return asked  # nearly always, and cheaper than a coroutine
        return self._session.invoke(address, self._command(ready, queue), seconds, STATUS_OF_CODE)

    def _command(self, ready: Outgoing, queue: MessageQueue, flag: int = 0) -> Command:
        fields = self.template(ready.topic, queue.broker_name, ready.code).fields(
            queue.queue_id, ready.sys_flag, ready.born_timestamp, ready.flag, ready.properties
        )
        return Command(ready.code, 0, flag, fields, ready.body)

    def template(self, topic: str, broker_name: str, code: int) -> SendTemplate:
        """What all requests of this kind have in common. Any thread may call."""
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

    async def _reply_with_hooks(
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
            reply = await self._reply(ready, kind, queue, address, seconds)
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
    """One result for each message: those of a batch lie one after the other. Raises the BrokerError of a reply."""
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
        # The hook is the user's code; a send must not depend on it.
        log.exception("send hook failed hook=%r", hook)
