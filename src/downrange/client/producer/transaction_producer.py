"""Messages that become visible only if something else succeeds, too: send a half message, do the work, tell the end.

A half message lies in the broker where no consumer sees it. COMMIT makes it visible, ROLLBACK forgets it. When neither
was heard the broker asks any producer of the group (the *check*), so the answer must be found in what survives the
death of a producer: a database row with the transaction's id, say, not a variable. [TransactionMQProducer]
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import Awaitable, Iterable
from typing import Final, Self, cast

from msgspec import structs

from downrange.client.config import ClientConfig, ProducerConfig
from downrange.client.consumer.listener import is_async
from downrange.client.consumer.messages import ReceivedMessage, received
from downrange.client.errors import BrokerNotFound, ClientError
from downrange.client.namespace import unwrap
from downrange.client.producer.hooks import SendHook
from downrange.client.producer.outgoing import InvalidProperty, Outgoing
from downrange.client.producer.producer import AsyncProducer
from downrange.client.producer.retry import SendKind
from downrange.client.producer.transactions import (
    TRACED_STATES,
    Check,
    Execute,
    HalfSent,
    LocalTransactionState,
    TransactionResult,
    executed,
    failed,
    state_of,
)
from downrange.client.session import Session
from downrange.model import properties as names
from downrange.model.errors import MQError
from downrange.model.message import Message, MessageQueue, SysFlag
from downrange.model.message_id import parse_offset_message_id
from downrange.model.record import decode_record
from downrange.protocol.bodies.transactions import CheckTransactionStateRequest, EndTransactionRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from downrange.settings import ConfigError
from downrange.transport.connection import Connection

__all__ = ["AsyncTransactionProducer", "Check", "Execute", "HalfSent", "LocalTransactionState", "TransactionResult"]

log = logging.getLogger(__name__)

MAX_WAITING_CHECKS: Final = 2000
_PREPARED: Final = int(SysFlag.TRANSACTION_PREPARED)


class AsyncTransactionProducer(AsyncProducer):
    """An `AsyncProducer` that also sends messages in transactions, on one event loop.

    Holds always: the local work runs only after a broker has the half message as safe as it promises, and COMMIT is
    told only when the local work returned it. If the end is not told (a crash, a lost connection), the broker asks
    `check`. Plain functions run in threads. The brokers of `topics` may ask from the start; without topics, the
    brokers of the auto-create topic and of the topics that are sent to.
    """

    def __init__(
        self,
        group: str,
        namesrv: str | ClientConfig | None = None,
        config: ProducerConfig | None = None,
        *,
        check: Check,
        topics: Iterable[str] = (),
        max_concurrent_checks: int = 8,
        session: Session | None = None,
        hooks: Iterable[SendHook] = (),
        random_source: random.Random | None = None,
    ) -> None:
        super().__init__(group, namesrv, config, session=session, hooks=hooks, random_source=random_source)
        if not callable(check):
            raise ConfigError(f"the check {check!r} cannot be called")
        if max_concurrent_checks < 1:
            raise ConfigError(f"max_concurrent_checks is {max_concurrent_checks}; it must be positive")
        self._check = check
        self._topics = tuple(self._preparation.wire_topic(topic) for topic in topics)
        self._check_room = asyncio.Semaphore(max_concurrent_checks)
        self._checks: set[asyncio.Task[None]] = set()
        self._follower: asyncio.Task[None] | None = None

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> Self:
        _questions(self.session).join(self)
        await super().start()
        self._follower = asyncio.create_task(self._follow_topics(), name="downrange transaction topics")
        return self

    async def close(self, timeout: float | None = None) -> None:
        """Close the producer. Running checks have `timeout` to end; the broker asks other producers about the rest."""
        if self._loop is None or self._is_closed:
            return
        try:
            await super().close(timeout)
        finally:
            _questions(self.session).leave(self)
            for task in [*self._checks, *([self._follower] if self._follower else [])]:
                task.cancel()
                await asyncio.wait([task])

    async def _follow_topics(self) -> None:
        """Follow the topics, so that their brokers get heartbeats: a broker asks only clients that send them."""
        for topic in self._topics or (self.config.create_topic_key,):
            try:
                await self.session.follow(topic)
            except MQError as error:  # looked up again every `route_seconds`
                log.info("no route yet topic=%s reason=%s", topic, error)

    # --- sending --------------------------------------------------------------------------------------------------

    async def send_in_transaction(
        self,
        message: Message,
        execute: Execute,
        *,
        queue: MessageQueue | None = None,
        check_immunity_seconds: int | None = None,
        timeout: float | None = None,
    ) -> TransactionResult:
        """Send the half message, run `execute`, tell the broker how it ended. [sendMessageInTransaction]

        Raises only when the half message could not be sent; then `execute` was not called. An exception of `execute`
        is the result's `error`, and its state UNKNOWN: whether the work was done, the check must find out.
        """
        self.count_in()
        try:
            half = await self._send_half(message, queue, check_immunity_seconds, timeout)
            state, error = await self._executed(execute, half)
            await self.try_to_end(half, state, error)
            return TransactionResult(half, state, error)
        finally:
            self.count_out()

    async def send_half(
        self,
        message: Message,
        queue: MessageQueue | None = None,
        *,
        check_immunity_seconds: int | None = None,
        timeout: float | None = None,
    ) -> HalfSent:
        """Send a half message, to be ended with `end`, here or in another process; else the broker asks for its end.

        `check_immunity_seconds` is how long the broker waits before it asks; its own setting if not given.
        """
        self.count_in()
        try:
            return await self._send_half(message, queue, check_immunity_seconds, timeout)
        finally:
            self.count_out()

    async def end(
        self,
        half: HalfSent,
        state: LocalTransactionState,
        *,
        from_check: bool = False,
        confirm: bool = False,
        remark: str | None = None,
    ) -> None:
        """Tell the broker how a transaction ended.

        RocketMQ's clients do not wait for an answer, and neither does this unless `confirm` is set: then a BrokerError
        says that the broker does not know the half message, or that the transaction ended before.
        """
        self.count_in()
        try:
            await self._tell_end(half, state, from_check=from_check, confirm=confirm, remark=remark)
        finally:
            self.count_out()

    # --- one transaction ------------------------------------------------------------------------------------------

    async def _send_half(
        self, message: Message, queue: MessageQueue | None, immunity_seconds: int | None, timeout: float | None
    ) -> HalfSent:
        ready = self._half(message, immunity_seconds)
        (result,) = await self.delivery.deliver(ready, SendKind.SYNC, queue, None, timeout)
        return HalfSent(
            result=result,
            producer_group=self.group,
            topic=ready.topic,
            broker_address=self._address(ready.topic, result.queue.broker_name) or "",
            commit_log_offset=parse_offset_message_id(result.offset_message_id).physical_offset,
        )

    def _half(self, message: Message, immunity_seconds: int | None) -> Outgoing:
        if message.delay_level:  # as RocketMQ does: a transaction's message is visible when it is committed
            message = dataclasses.replace(message, delay_level=0)
        ready = self.ready(message)
        text = f"{ready.properties}{names.TRAN_MSG}\x01true\x02{names.PGROUP}\x01{self.group}\x02"
        if immunity_seconds is not None:
            if immunity_seconds < 0:
                raise InvalidProperty(f"check_immunity_seconds is {immunity_seconds}; it must not be negative")
            text += f"{names.CHECK_IMMUNITY_TIME_IN_SECONDS}\x01{immunity_seconds}\x02"
        return structs.replace(ready, sys_flag=ready.sys_flag | _PREPARED, properties=text)

    async def _executed(self, execute: Execute, half: HalfSent) -> tuple[LocalTransactionState, Exception | None]:
        if not is_async(execute):
            return await asyncio.to_thread(executed, execute, half)
        if not half.is_safe:
            return LocalTransactionState.ROLLBACK, None
        try:
            return state_of(await cast("Awaitable[object]", execute(half))), None
        except Exception as error:
            return failed(half, error)

    async def try_to_end(self, half: HalfSent, state: LocalTransactionState, error: Exception | None = None) -> None:
        """Tell the end after the local work. A failure is only logged, because the broker will ask."""
        remark = None if error is None else f"executeLocalTransactionBranch exception: {error!r}"
        try:
            await self._tell_end(half, state, remark=remark)
        except MQError as problem:
            log.warning(
                "end not told, the broker will ask id=%s state=%s: %s", half.transaction_id, state.name, problem
            )

    async def _tell_end(
        self,
        half: HalfSent,
        state: LocalTransactionState,
        *,
        from_check: bool = False,
        confirm: bool = False,
        remark: str | None = None,
    ) -> None:
        address = self._address(half.topic, half.result.queue.broker_name) or half.broker_address
        if not address:
            raise BrokerNotFound(f"no route names a master of broker {half.result.queue.broker_name}")
        header = EndTransactionRequest(
            producer_group=half.producer_group,
            tran_state_table_offset=half.state_table_offset,
            commit_log_offset=half.commit_log_offset,
            commit_or_rollback=int(state),
            msg_id=half.result.message_id,
            from_transaction_check=from_check,
            transaction_id=half.transaction_id,
            topic=half.topic,
            bname=half.result.queue.broker_name,
        )
        # UNKNOWN is never answered: there would be nothing to confirm.
        oneway = not confirm or state is LocalTransactionState.UNKNOWN
        command = request(RequestCode.END_TRANSACTION, header, oneway=oneway, remark=remark)
        if oneway:
            await self.session.oneway(address, command)
        else:
            await self.session.invoke(address, command, self.config.send_timeout_seconds)
        self._report_end(header, address, half.result.queue.topic)

    def _report_end(
        self, header: EndTransactionRequest, address: str, topic: str, tags: str | None = None, keys: str | None = None
    ) -> None:
        """Trace the end of a transaction, if this producer writes traces."""
        if self._trace is not None:
            self._trace.transaction_ended(
                group=unwrap(self.config.namespace, header.producer_group),
                topic=topic,
                message_id=header.msg_id or "",
                tags=tags,
                keys=keys,
                broker_address=address,
                transaction_id=header.transaction_id or "",
                state=TRACED_STATES[LocalTransactionState(header.commit_or_rollback)],
                from_check=bool(header.from_transaction_check),
            )

    def _address(self, topic: str, broker_name: str) -> str | None:
        info = self.routes.last(topic)
        return info.addresses.get(broker_name) if info is not None else None

    # --- checks ---------------------------------------------------------------------------------------------------

    def asked(self, header: CheckTransactionStateRequest, message: ReceivedMessage, connection: Connection) -> None:
        """A broker asks how a transaction ended. Called by the session's handler."""
        if not self._is_open or len(self._checks) >= MAX_WAITING_CHECKS:
            log.info("check not answered, the broker will ask again id=%s", message.message_id)
            return
        self.count_in()
        task = asyncio.ensure_future(self._answer(header, message, connection))
        self._checks.add(task)
        task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._checks.discard(task)
        self.count_out()

    async def _checked(self, message: ReceivedMessage) -> object:
        if is_async(self._check):
            return await cast("Awaitable[object]", self._check(message))
        return await asyncio.to_thread(self._check, message)

    async def _answer(
        self, header: CheckTransactionStateRequest, message: ReceivedMessage, connection: Connection
    ) -> None:
        remark = None
        async with self._check_room:
            try:
                state = state_of(await self._checked(message))
            except Exception as error:  # of the user's code; the producer that is asked next may know
                log.warning("check failed id=%s", message.message_id, exc_info=error)
                state, remark = LocalTransactionState.UNKNOWN, f"checkLocalTransactionState Exception: {error!r}"
        answer = EndTransactionRequest(
            producer_group=self.group,
            tran_state_table_offset=header.tran_state_table_offset,
            commit_log_offset=header.commit_log_offset,
            commit_or_rollback=int(state),
            msg_id=message.message_id,
            from_transaction_check=True,
            transaction_id=header.transaction_id,
            topic=header.topic,
            bname=header.bname,
        )
        try:
            command = request(RequestCode.END_TRANSACTION, answer, oneway=True, remark=remark)
            connection.oneway(self.session.signed(command))
            keys = names.KEY_SEPARATOR.join(message.keys) or None
            self._report_end(answer, connection.peer, message.topic, message.tags, keys)
        except MQError as error:
            log.info("check not answered, the broker will ask again id=%s reason=%s", message.message_id, error)


class _Questions:
    """Handles CHECK_TRANSACTION_STATE for one session: asks the producer of the group."""

    def __init__(self) -> None:
        self._producers: dict[str, AsyncTransactionProducer] = {}

    def join(self, producer: AsyncTransactionProducer) -> None:
        if self._producers.setdefault(producer.group, producer) is not producer:
            raise ClientError(
                f"this session has a transaction producer of the group {producer.group} already; "
                "give the second one its own"
            )

    def leave(self, producer: AsyncTransactionProducer) -> None:
        if self._producers.get(producer.group) is producer:
            del self._producers[producer.group]

    def __call__(self, command: Command, connection: Connection) -> None:
        header = command.header(CheckTransactionStateRequest)
        stored = decode_record(command.body_bytes)
        group = names.find_property(stored.properties_text, names.PGROUP) or ""
        producer = self._producers.get(group)
        if producer is None:
            log.warning("asked about a transaction of a group that is not ours group=%s", group)
            return
        queue = MessageQueue(stored.topic, header.bname or "", stored.queue_id)
        producer.asked(header, received(stored, queue, namespace=producer.config.namespace), connection)


def _questions(session: Session) -> _Questions:
    handler = session.handlers.get(RequestCode.CHECK_TRANSACTION_STATE)
    if not isinstance(handler, _Questions):
        handler = session.handlers[RequestCode.CHECK_TRANSACTION_STATE] = _Questions()
    return handler
