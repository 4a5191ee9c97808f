"""ReceiveMessage, AckMessage, ChangeInvisibleDuration and ForwardMessageToDeadLetterQueue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, Final

from downrange.clock import Clock
from downrange.model.errors import MQError
from downrange.model.subscription import SQL92, TAG
from downrange.protocol.bodies.pop import MOST_MESSAGES, PopMessageRequest
from downrange.protocol.errors import BrokerError, SubscriptionParseFailed
from downrange.proxy.backend import Backend, PoppedMessage
from downrange.proxy.caller import Caller
from downrange.proxy.checks import MIN_INVISIBLE_MILLIS, check_group, check_invisible, check_topic
from downrange.proxy.client_settings import max_attempts
from downrange.proxy.clients import Clients, subscription_of
from downrange.proxy.conversion import original_topic, to_message
from downrange.proxy.errors import OK, Refused, status_of
from downrange.proxy.handles import Handle, live_handle, parse_handle
from downrange.proxy.http2.stream import Stream
from downrange.proxy.renewal import FIRST_MILLIS, RELEASED_MILLIS, Renewal
from downrange.proxy.routing import ANY_QUEUE, readable, served
from downrange.proxy.times import millis, put
from downrange.proxy.wire.enums import Code, FilterType
from downrange.proxy.wire.messages import (
    AckMessageRequest,
    AckMessageResponse,
    ChangeInvisibleDurationRequest,
    ChangeInvisibleDurationResponse,
    ForwardMessageToDeadLetterQueueRequest,
    ForwardMessageToDeadLetterQueueResponse,
    ReceiveMessageRequest,
    ReceiveMessageResponse,
    Status,
)

log = logging.getLogger(__name__)

_MOST_POLLING_SECONDS: Final = 20.0
_SPARED_SECONDS: Final = 0.2
"""So long before the client gives up it is answered."""
_ANSWER_SECONDS: Final = 1.5
_PAUSE_SECONDS: Final = 0.02
_NEW_MESSAGES: Final = 1


class Receiving:
    def __init__(self, backend: Backend, clients: Clients, renewal: Renewal, clock: Clock) -> None:
        self._backend = backend
        self._clients = clients
        self._renewal = renewal
        self._clock = clock
        self._work: set[asyncio.Task[Any]] = set()

    # --- receive ------------------------------------------------------------------------------------------------

    async def receive(self, caller: Caller, request: ReceiveMessageRequest, stream: Stream) -> int:
        """Answer with a status, messages, and the time of the answer; the code of the status."""
        topic, group = "", ""
        found: list[PoppedMessage] = []
        try:
            topic, group = check_topic(request.message_queue.topic), check_group(request.group)
            found, status = await self._receive(caller, request, topic, group)
        except Exception as error:
            status = _filter_status(error) or status_of(error)
        self._send(stream, ReceiveMessageResponse(status=status))
        unsent = list(found)
        try:
            for one in found:
                self._send(stream, self._delivered(caller, request, topic, group, one))
                unsent.pop(0)
                await stream.drained()
        finally:
            if stream.is_closed and unsent:  # the client is gone: others shall have the rest
                self._later(self._give_back(topic, group, unsent))
        last = ReceiveMessageResponse()
        put(last.delivery_timestamp, self._clock.now())
        self._send(stream, last)
        stream.finish()
        return status.code

    def _send(self, stream: Stream, response: ReceiveMessageResponse) -> None:
        stream.send_message(response.SerializeToString())

    def _delivered(
        self, caller: Caller, request: ReceiveMessageRequest, topic: str, group: str, one: PoppedMessage
    ) -> ReceiveMessageResponse:
        handle = Handle(one.handle, one.record.physical_offset)
        if request.auto_renew:
            self._renewal.add(caller.client_id, topic, group, handle)
        name = original_topic(one.record, topic)
        message = to_message(one.record, name, attempt=one.delivered_before + 1, handle=str(handle))
        return ReceiveMessageResponse(message=message)

    async def _receive(
        self, caller: Caller, request: ReceiveMessageRequest, topic: str, group: str
    ) -> tuple[list[PoppedMessage], Status]:
        self._clients.heard(caller.client_id)
        invisible = FIRST_MILLIS if request.auto_renew else millis(request.invisible_duration)
        check_invisible(invisible, MIN_INVISIBLE_MILLIS)
        broker_name = await self._broker(topic, request.message_queue.broker.name)
        config = await self._backend.group(group)
        is_sql = request.filter_expression.type == FilterType.SQL
        wanted = PopMessageRequest(
            consumer_group=group,
            topic=topic,
            queue_id=ANY_QUEUE,
            max_msg_nums=min(request.batch_size, MOST_MESSAGES),
            invisible_time=invisible,
            init_mode=_NEW_MESSAGES,
            exp_type=SQL92 if is_sql else TAG,
            exp=request.filter_expression.expression or "*",
            order=bool(config is not None and config.consume_message_orderly),
            attempt_id=request.attempt_id or None,
        )
        end = self._clock.monotonic() + self._poll_seconds(caller, request)
        if request.batch_size <= 0:
            await self._clock.sleep(max(0.0, end - self._clock.monotonic()))
            return [], _nothing("no new message")
        woken = float("-inf")
        while True:
            popped = await self._pop(broker_name, wanted, topic, group)
            kept = await self._sift(popped, request, topic, group, max_attempts(config))
            if kept:
                return kept, OK
            if popped:
                return [], _nothing("no match message")
            rest = end - self._clock.monotonic()
            if rest <= _PAUSE_SECONDS or not await self._backend.wait(broker_name, wanted, rest):
                return [], _nothing("no new message")
            if self._clock.monotonic() - woken < _PAUSE_SECONDS:  # others were faster, and more than once
                await self._clock.sleep(_PAUSE_SECONDS)
            woken = self._clock.monotonic()

    async def _pop(self, broker_name: str, wanted: PopMessageRequest, topic: str, group: str) -> list[PoppedMessage]:
        """Pop; messages that come for a client that has gone meanwhile are given back."""
        popping = asyncio.ensure_future(self._backend.pop(broker_name, wanted))
        try:
            return await asyncio.shield(popping)
        except asyncio.CancelledError:
            self._later(self._give_back_popped(topic, group, popping))
            raise

    async def _give_back_popped(self, topic: str, group: str, popping: asyncio.Future[list[PoppedMessage]]) -> None:
        try:
            await self._give_back(topic, group, await popping)
        except MQError as error:
            log.info("pop of a client that has gone failed topic=%s reason=%s", topic, error)

    async def _give_back(self, topic: str, group: str, messages: Sequence[PoppedMessage]) -> None:
        for one in messages:
            try:
                await self._backend.change_invisible(topic, group, one.handle, RELEASED_MILLIS)
            except MQError as error:
                log.info("message not given back topic=%s group=%s reason=%s", topic, group, error)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    def _poll_seconds(self, caller: Caller, request: ReceiveMessageRequest) -> float:
        left = None if caller.deadline is None else caller.deadline - asyncio.get_running_loop().time()
        if request.HasField("long_polling_timeout"):
            asked = millis(request.long_polling_timeout) / 1000
        else:
            asked = _MOST_POLLING_SECONDS if left is None else left - _ANSWER_SECONDS
        if left is not None:
            asked = min(asked, left - _SPARED_SECONDS)
        return max(0.0, min(asked, _MOST_POLLING_SECONDS))

    async def _broker(self, topic: str, name: str) -> str:
        names = [data.broker_name for data in served(await self._backend.route(topic)) if readable(data)]
        if not names:
            raise Refused(Code.FORBIDDEN, "no readable queue")
        return name if name in names else names[0]

    async def _sift(
        self, popped: list[PoppedMessage], request: ReceiveMessageRequest, topic: str, group: str, most: int
    ) -> list[PoppedMessage]:
        """Drop messages whose tag only looked right, and bury those that were delivered often enough."""
        tags = subscription_of(topic, request.filter_expression).tags
        kept = []
        for one in popped:
            try:
                if tags and one.record.tags not in tags:
                    await self._backend.ack(topic, group, one.handle)
                elif one.delivered_before >= most:
                    await self._bury(
                        topic, group, Handle(one.handle, one.record.physical_offset), one.record.message_id
                    )
                else:
                    kept.append(one)
            except MQError as error:  # it comes again when its time is over
                log.warning("message not sorted out topic=%s group=%s reason=%s", topic, group, error)
        return kept

    # --- acknowledge --------------------------------------------------------------------------------------------

    async def ack(self, caller: Caller, request: AckMessageRequest) -> AckMessageResponse:
        topic, group = check_topic(request.topic), check_group(request.group)
        self._clients.heard(caller.client_id)
        if not request.entries:
            raise Refused(Code.INTERNAL_SERVER_ERROR, "ack message result is empty")
        response = AckMessageResponse()
        for entry in request.entries:
            result = response.entries.add()
            result.message_id, result.receipt_handle = entry.message_id, entry.receipt_handle
            try:
                await self._ack(topic, group, entry.receipt_handle)
                result.status.CopyFrom(OK)
            except Exception as error:
                result.status.CopyFrom(_handle_status(error))
        codes = {entry.status.code for entry in response.entries}
        code = codes.pop() if len(codes) == 1 else Code.MULTIPLE_RESULTS
        response.status.code, response.status.message = code, Code(code).name
        return response

    async def _ack(self, topic: str, group: str, text: str) -> None:
        handle = self._renewal.take(text) or live_handle(text, self._clock.now())
        await self._backend.ack(topic, group, handle.lease)

    async def change_invisible(
        self, caller: Caller, request: ChangeInvisibleDurationRequest
    ) -> ChangeInvisibleDurationResponse:
        topic, group = check_topic(request.topic), check_group(request.group)
        self._clients.heard(caller.client_id)
        duration = millis(request.invisible_duration)
        check_invisible(duration, 0)
        text = request.receipt_handle
        handle = self._renewal.take(text) or live_handle(text, self._clock.now())
        try:
            lease = await self._backend.change_invisible(topic, group, handle.lease, duration)
        except BrokerError as error:
            return ChangeInvisibleDurationResponse(status=_handle_status(error))
        return ChangeInvisibleDurationResponse(status=OK, receipt_handle=str(Handle(lease, handle.log_offset)))

    async def forward_to_dead_letters(
        self, caller: Caller, request: ForwardMessageToDeadLetterQueueRequest
    ) -> ForwardMessageToDeadLetterQueueResponse:
        topic, group = check_topic(request.topic), check_group(request.group)
        self._clients.heard(caller.client_id)
        text = request.receipt_handle
        handle = self._renewal.take(text) or parse_handle(text)
        if handle.log_offset < 0:
            raise Refused(Code.INVALID_RECEIPT_HANDLE, "commit log offset is empty")
        try:
            await self._bury(topic, group, handle, request.message_id)
        except BrokerError as error:
            return ForwardMessageToDeadLetterQueueResponse(status=_handle_status(error))
        return ForwardMessageToDeadLetterQueueResponse(status=OK)

    async def _bury(self, topic: str, group: str, handle: Handle, message_id: str) -> None:
        await self._backend.bury(topic, group, handle.lease, handle.log_offset, message_id)
        await self._backend.ack(topic, group, handle.lease)


def _nothing(text: str) -> Status:
    return Status(code=Code.MESSAGE_NOT_FOUND, message=text)


def _filter_status(error: Exception) -> Status | None:
    """An expression that no broker can use is the client's fault."""
    if isinstance(error, SubscriptionParseFailed):
        return Status(code=Code.ILLEGAL_FILTER_EXPRESSION, message=error.remark)
    return None


def _handle_status(error: Exception) -> Status:
    """A handle that a broker refuses is of no use: clients try any other error again, for ever."""
    status = status_of(error)
    if isinstance(error, BrokerError) and status.code != Code.TOO_MANY_REQUESTS:
        return Status(code=Code.INVALID_RECEIPT_HANDLE, message=status.message)
    return status
