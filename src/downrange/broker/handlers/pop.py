"""Requests of POP consumers beside pops (`pops.py`) and acknowledgements (`acks.py`): 200052-200055."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from downrange.broker.pop.pop import Pop
from downrange.broker.pop.popped import PopRequest
from downrange.broker.pop.waiting import Waiter, wait_seconds
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
    PopMessageResponse,
    ReceiptHandle,
)
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError, ServiceNotAvailable
from downrange.store.new_message import PutMessageStatus
from downrange.transport.connection import Connection
from downrange.transport.serving import LaterReply

_REFUSED: Final = PopMessageResponse()
_NOT_CHANGED: Final = ChangeInvisibleTimeResponse()
_NO_NOTIFICATION: Final = NotificationResponse()


class PopHandlers:
    """Answers requests of consumers that pop."""

    def __init__(self, pop: Pop) -> None:
        self._state = pop.state
        self._looking = pop.looking
        self._receiving = pop.receiving
        self._changing = pop.changing

    @property
    def routes(self) -> RouteTable:
        """Requests that every port serves."""
        return {
            RequestCode.CHANGE_MESSAGE_INVISIBLETIME: self.change,
            RequestCode.PEEK_MESSAGE: self.peek,
            RequestCode.NOTIFICATION: self.notify,
            RequestCode.POLLING_INFO: self.polling_info,
        }

    # --- 200053 -------------------------------------------------------------------------------------------------

    def change(self, command: Command, connection: Connection) -> Command | LaterReply:
        header = command.header(ChangeInvisibleTimeRequest)
        try:
            self._state.check_place(header.topic, header.queue_id, connection.peer)
            handle = ReceiptHandle.parse(header.extra_info)
            lowest, highest = self._state.offset_range(header.topic, header.queue_id)
            if not lowest <= header.offset < highest:
                return command.reply(ResponseCode.NO_MESSAGE, header=_NOT_CHANGED)
            handle = handle._replace(queue_id=header.queue_id, offset=header.offset)
            new, end_offset = self._changing.change(header.topic, header.consumer_group, handle, header.invisible_time)
        except BrokerError as error:
            return command.reply(error.code, error.remark, header=_NOT_CHANGED)
        changed = ChangeInvisibleTimeResponse(
            pop_time=new.pop_time, invisible_time=new.invisible_time, revive_qid=new.revive_queue
        )
        reply = command.reply(header=changed)
        if not end_offset or not self._state.writer.makes_wait:
            return reply
        later: LaterReply = asyncio.get_running_loop().create_future()
        self._state.writer.tell_when_safe(end_offset, partial(_answer_safe, later, reply))
        return later

    # --- 200052, 200054, 200055 ---------------------------------------------------------------------------------

    def peek(self, command: Command, connection: Connection) -> Command:
        header = command.header(PeekMessageRequest)
        request = PopRequest(
            topic=header.topic,
            group=header.consumer_group,
            invisible_millis=0,
            queue_id=header.queue_id,
            max_messages=header.max_msg_nums,
        )
        try:
            topic = self._receiving.check(request, connection.peer)
        except BrokerError as error:
            return command.reply(error.code, error.remark, header=_REFUSED)
        queues = range(topic.read_queue_nums) if header.queue_id == ANY_QUEUE else (header.queue_id,)
        places = [(header.topic, queue_id) for queue_id in queues]
        retries = [pop_retry_topic(header.consumer_group, header.topic, version=version) for version in (1, 2)]
        places += [(retry, 0) for retry in retries if retry in self._state.tables.topics]
        rest, count, store = 0, 0, self._state.store
        records: list[memoryview] = []
        for name, queue_id in places:
            backlog = self._looking.backlog(name, header.consumer_group, queue_id)
            rest += backlog
            if backlog and count < header.max_msg_nums:
                offset = store.max_offset_of(name, queue_id) - backlog
                read = store.read(name, queue_id, offset, header.max_msg_nums - count)
                records += read.slices
                count += read.message_count
        code, remark = (
            (ResponseCode.SUCCESS, "FOUND") if records else (ResponseCode.PULL_NOT_FOUND, "NO_MESSAGE_IN_QUEUE")
        )
        return command.reply(code, remark, header=PopMessageResponse(rest_num=rest), body=records)

    def notify(self, command: Command, connection: Connection) -> Command | LaterReply:
        """Whether there are messages; a request that finds none waits for one."""
        header = command.header(NotificationRequest)
        request = PopRequest(
            topic=header.topic,
            group=header.consumer_group,
            invisible_millis=0,
            queue_id=header.queue_id,
            is_orderly=header.order,
            attempt_id=header.attempt_id,
        )
        try:
            topic = self._receiving.check(request, connection.peer)
        except BrokerError as error:
            return command.reply(error.code, error.remark, header=_NO_NOTIFICATION)
        if self._looking.has_message(topic, request):
            return command.reply(header=NotificationResponse(has_msg=True))
        seconds = wait_seconds(self._state.clock.now(), header.born_time, header.poll_time)
        if seconds <= 0:
            return command.reply(header=_NO_NOTIFICATION)
        waiting = self._state.waiting
        if waiting.is_full(request.topic, request.group, request.queue_id):
            return command.reply(header=NotificationResponse(polling_full=True))
        later: LaterReply = asyncio.get_running_loop().create_future()
        waiter = Waiter(
            request.topic,
            request.group,
            request.queue_id,
            partial(self._has_message_now, request),
            lambda: False,
            partial(_answer_notification, later, command),
            None,
            connection,
        )
        waiting.add(waiter, seconds)
        return later

    def _has_message_now(self, request: PopRequest) -> bool | None:
        topic = self._state.tables.topics.get(request.topic)
        return True if topic is not None and self._looking.has_message(topic, request) else None

    def polling_info(self, command: Command, connection: Connection) -> Command:
        header = command.header(PollingInfoRequest)
        number = self._state.waiting.number(header.topic, header.consumer_group, header.queue_id)
        self._receiving.readable_topic(header.topic)
        self._receiving.check_group(header.consumer_group)
        return command.reply(header=PollingInfoResponse(polling_num=number))


def _answer_safe(later: LaterReply, reply: Command, status: PutMessageStatus) -> None:
    if later.done():
        return
    if status.is_safe_here:
        later.set_result(reply)
    else:
        later.set_exception(ServiceNotAvailable(f"not safe yet: {status.value}"))


def _answer_notification(later: LaterReply, command: Command, found: bool | Exception | None) -> None:
    if later.done():
        return
    if found is None:
        later.cancel()
    elif isinstance(found, Exception):
        later.set_exception(found)
    else:
        later.set_result(command.reply(header=NotificationResponse(has_msg=found)))
