"""POP for remoting clients: 200050 and 200052-200055; 200051 and 200151 are in `acks.py`. [PopMessageProcessor]"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from downrange.broker.pop.pop import Pop
from downrange.broker.pop.popped import Popped, PopRequest, PopStatus, pop_filter
from downrange.broker.routes import RouteTable
from downrange.model.topics import pop_retry_topic
from downrange.protocol.bodies.pop import (
    ANY_QUEUE,
    ChangeInvisibleTimeRequest,
    ChangeInvisibleTimeResponse,
    NotificationRequest,
    NotificationResponse,
    PeekMessageRequest,
    PollingInfoRequest,
    PollingInfoResponse,
    PopMessageRequest,
    PopMessageResponse,
    ReceiptHandle,
    order_count_info,
)
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError
from downrange.transport.connection import Connection
from downrange.transport.serving import LaterReply

_TOO_LATE_MILLIS: Final = 500
_CODES: Final = {
    PopStatus.FOUND: ResponseCode.SUCCESS,
    PopStatus.NO_MESSAGE: ResponseCode.POLLING_TIMEOUT,
    PopStatus.FULL: ResponseCode.POLLING_FULL,
}
_REFUSED: Final = PopMessageResponse()
_NOT_CHANGED: Final = ChangeInvisibleTimeResponse()
_NO_NOTIFICATION: Final = NotificationResponse()


class PopHandlers:
    """Answers requests of consumers that pop."""

    def __init__(self, pop: Pop) -> None:
        self._pop = pop

    @property
    def routes(self) -> RouteTable:
        """Requests that every port serves."""
        return {
            RequestCode.CHANGE_MESSAGE_INVISIBLETIME: self.change,
            RequestCode.POP_MESSAGE: self.pop,
            RequestCode.PEEK_MESSAGE: self.peek,
            RequestCode.NOTIFICATION: self.notify,
            RequestCode.POLLING_INFO: self.polling_info,
        }

    # --- 200050 -------------------------------------------------------------------------------------------------

    def pop(self, command: Command, connection: Connection) -> Command | LaterReply:
        header = command.header(PopMessageRequest)
        born = header.born_time or self._pop.clock.now()
        if self._pop.clock.now() - born - header.poll_time > _TOO_LATE_MILLIS:
            address = self._pop.config.broker.broker_ip1
            remark = f"the broker[{address}] pop message is timeout too much"
            return command.reply(ResponseCode.POLLING_TIMEOUT, remark, header=_REFUSED)
        try:
            request = PopRequest(
                topic=header.topic,
                group=header.consumer_group,
                invisible_millis=header.invisible_time,
                queue_id=header.queue_id,
                max_messages=header.max_msg_nums,
                poll_millis=header.poll_time,
                born_millis=born,
                init_mode=header.init_mode,
                filter=pop_filter(header.exp_type, header.exp),
                is_orderly=header.order,
                attempt_id=header.attempt_id,
                owner=connection,
                peer=connection.peer,
            )
            found = self._pop.begin_receive(request)
        except BrokerError as error:
            return command.reply(error.code, error.remark, header=_REFUSED)
        make_reply = partial(self._popped, command, is_orderly=header.order)
        if isinstance(found, Popped):
            return self._when_safe(found.end_offset, partial(make_reply, found))
        return self._later(found, make_reply)

    @staticmethod
    def _popped(command: Command, popped: Popped, *, is_orderly: bool) -> Command:
        counts = None
        if is_orderly:
            counts = ";".join(
                order_count_info(queue.queue_id, zip(queue.offsets, queue.counts or (), strict=True))
                for queue in popped.queues
            )
        header = PopMessageResponse(
            pop_time=popped.pop_time,
            invisible_time=popped.invisible_time,
            revive_qid=popped.revive_queue,
            rest_num=popped.rest,
            start_offset_info=popped.start_offset_info,
            msg_offset_info=popped.msg_offset_info,
            order_count_info=counts,
        )
        return command.reply(_CODES[popped.status], popped.status.value, header=header, body=popped.records())

    # --- 200053 -------------------------------------------------------------------------------------------------

    def change(self, command: Command, connection: Connection) -> Command | LaterReply:
        header = command.header(ChangeInvisibleTimeRequest)
        try:
            self._pop.check_place(header.topic, header.queue_id, connection.peer)
            handle = ReceiptHandle.parse(header.extra_info)
            lowest, highest = self._range(header.topic, header.queue_id)
            if not lowest <= header.offset < highest:
                return command.reply(ResponseCode.NO_MESSAGE, header=_NOT_CHANGED)
            handle = handle._replace(queue_id=header.queue_id, offset=header.offset)
            new, end_offset = self._pop.begin_change(header.topic, header.consumer_group, handle, header.invisible_time)
        except BrokerError as error:
            return command.reply(error.code, error.remark, header=_NOT_CHANGED)
        changed = ChangeInvisibleTimeResponse(
            pop_time=new.pop_time, invisible_time=new.invisible_time, revive_qid=new.revive_queue
        )
        return self._when_safe(end_offset, partial(command.reply, header=changed))

    def _range(self, topic: str, queue_id: int) -> tuple[int, int]:
        store = self._pop.store
        return store.min_offset_of(topic, queue_id), store.max_offset_of(topic, queue_id)

    # --- 200052, 200054, 200055 ---------------------------------------------------------------------------------

    def peek(self, command: Command, connection: Connection) -> Command:
        header = command.header(PeekMessageRequest)
        request = PopRequest(
            topic=header.topic,
            group=header.consumer_group,
            invisible_millis=0,
            queue_id=header.queue_id,
            max_messages=header.max_msg_nums,
            peer=connection.peer,
        )
        pop = self._pop
        try:
            topic = pop.check(request)
        except BrokerError as error:
            return command.reply(error.code, error.remark, header=_REFUSED)
        queues = range(topic.read_queue_nums) if header.queue_id == ANY_QUEUE else (header.queue_id,)
        places = [(header.topic, queue_id) for queue_id in queues]
        retries = [pop_retry_topic(header.consumer_group, header.topic, version=version) for version in (1, 2)]
        places += [(retry, 0) for retry in retries if retry in pop.tables.topics]
        rest, count = 0, 0
        records: list[memoryview] = []
        for name, queue_id in places:
            backlog = pop.backlog(name, header.consumer_group, queue_id)
            rest += backlog
            if backlog and count < header.max_msg_nums:
                offset = pop.store.max_offset_of(name, queue_id) - backlog
                read = pop.store.read(name, queue_id, offset, header.max_msg_nums - count)
                records += read.slices
                count += read.message_count
        code, remark = (
            (ResponseCode.SUCCESS, "FOUND") if records else (ResponseCode.PULL_NOT_FOUND, "NO_MESSAGE_IN_QUEUE")
        )
        return command.reply(code, remark, header=PopMessageResponse(rest_num=rest), body=records)

    def notify(self, command: Command, connection: Connection) -> Command | LaterReply:
        header = command.header(NotificationRequest)
        request = PopRequest(
            topic=header.topic,
            group=header.consumer_group,
            invisible_millis=0,
            queue_id=header.queue_id,
            poll_millis=header.poll_time,
            born_millis=header.born_time,
            is_orderly=header.order,
            attempt_id=header.attempt_id,
            owner=connection,
            peer=connection.peer,
        )
        try:
            found = self._pop.begin_notification(request)
        except BrokerError as error:
            return command.reply(error.code, error.remark, header=_NO_NOTIFICATION)
        if isinstance(found, asyncio.Future):
            return self._later(found, lambda has: command.reply(header=NotificationResponse(has_msg=has)))
        return command.reply(header=NotificationResponse(has_msg=bool(found), polling_full=found is None))

    def polling_info(self, command: Command, connection: Connection) -> Command:
        header = command.header(PollingInfoRequest)
        number = self._pop.waiting.number(header.topic, header.consumer_group, header.queue_id)
        self._pop.readable_topic(header.topic)
        self._pop.check_group(header.consumer_group)
        return command.reply(header=PollingInfoResponse(polling_num=number))

    # --- later --------------------------------------------------------------------------------------------------

    def _later(self, found: asyncio.Future[Any], make_reply: Callable[[Any], Command]) -> LaterReply:
        later: LaterReply = asyncio.get_running_loop().create_future()

        def answer(future: asyncio.Future[Any]) -> None:
            if later.done():
                return
            if future.cancelled():
                later.cancel()
            elif (error := future.exception()) is not None:
                later.set_exception(error)
            else:
                result = future.result()
                end_offset = result.end_offset if isinstance(result, Popped) else 0
                reply = self._when_safe(end_offset, partial(make_reply, result))
                if isinstance(reply, Command):
                    later.set_result(reply)
                else:
                    reply.add_done_callback(partial(_hand_on, later))

        found.add_done_callback(answer)
        return later

    def _when_safe(self, end_offset: int, make_reply: Callable[[], Command]) -> Command | LaterReply:
        """The reply, once the log is as safe as this broker promises."""
        if not end_offset or not self._pop.writer.makes_wait:
            return make_reply()
        later: LaterReply = asyncio.get_running_loop().create_future()

        def answer(safe: asyncio.Future[Any]) -> None:
            if not later.done():
                error = safe.exception()
                if error is None:
                    later.set_result(make_reply())
                else:
                    later.set_exception(error)

        self._pop.when_safe(end_offset).add_done_callback(answer)
        return later


def _hand_on(later: LaterReply, done: LaterReply) -> None:
    error = done.exception()
    if error is None:
        later.set_result(done.result())
    else:
        later.set_exception(error)
