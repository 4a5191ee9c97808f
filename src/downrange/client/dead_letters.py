"""Dead letters: messages a group gave up on. Look at them, keep a copy, give the group another chance.

A broker never removes a dead letter before its time. Which of them were sent again is remembered as the committed
offset of the tools' own group in the dead-letter topic, so that sending again twice does not deliver twice; a letter
behind that offset was sent again if the retry topic has a copy that is younger.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TextIO

from downrange.client.admin.groups import GroupAdmin
from downrange.client.admin.messages import MessageAdmin
from downrange.client.admin.search import Budget, Wanted, search
from downrange.client.consumer.addresses import address_of
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.pull import PullConsumer, PullStatus
from downrange.client.errors import NoRoute
from downrange.client.message_document import message_document
from downrange.client.producer.send_result import STATUS_OF_CODE
from downrange.client.resending import MARK, Journal, Noted, Pace, Place
from downrange.client.session import Session
from downrange.model import properties as names
from downrange.model.errors import MQError
from downrange.model.message import Message, MessageQueue, SysFlag
from downrange.model.topics import DLQ_PREFIX, TOOLS_GROUP, check_group_name, dlq_topic, popped_topic, retry_topic
from downrange.protocol.bodies.send import SendMessageRequest, SendMessageResponse
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request

if TYPE_CHECKING:
    from downrange.client.producer.producer import AsyncProducer

PRODUCER_GROUP = "TOOLS_PRODUCER"
CLOCK_SKEW_MILLIS = 60_000
"""How far the clocks of brokers and of ours may differ."""
_COMPRESSION = int(SysFlag.COMPRESSED | SysFlag.ZLIB)
# Properties of the deliveries that failed: a message that is sent again starts without them.
_OF_THE_PAST = (
    names.DELAY,
    names.RECONSUME_TIME,
    names.MAX_RECONSUME_TIMES,
    names.REAL_TOPIC,
    names.REAL_QID,
    names.TRAN_MSG,
    names.PGROUP,
    names.CONSUME_START_TIME,
)


class DeadLettersUnreadable(NoRoute):
    """The dead-letter topic may not be read: brokers of 4.8 create it so."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One message a group gave up on: where the message came from, and whether it was sent again."""

    message: ReceivedMessage
    was_resent: bool

    @property
    def place(self) -> Place:
        """The queue of the dead-letter topic that it lies in, and its offset there."""
        return self.message.queue, int(self.message.queue_offset)

    @property
    def origin_topic(self) -> str:
        """The topic it was first sent to: not the retry topic that a group popped it from when it gave up."""
        found = names.find_property(self.message.properties_text, names.RETRY_TOPIC) or self.message.topic
        return popped_topic(found, self.message.queue.topic.removeprefix(DLQ_PREFIX))

    @property
    def origin_message_id(self) -> str:
        """The id of the message that was first sent."""
        return names.find_property(self.message.properties_text, names.ORIGIN_MESSAGE_ID) or self.message.message_id

    def document(self) -> dict[str, object]:
        """The dead letter as a JSON object, as `downrange dlq export` writes it."""
        return {
            "originTopic": self.origin_topic,
            "originMsgId": self.origin_message_id,
            "resent": self.was_resent,
            **message_document(self.message),
        }


@dataclass(frozen=True, slots=True)
class Resent:
    """The result of sending one dead letter again: its new message id, or the error."""

    letter: DeadLetter
    offset_message_id: str | None = None
    error: MQError | None = None


class DeadLetters:
    """The dead letters of one group, on all its brokers. Used on the session's event loop."""

    def __init__(self, session: Session, group: str) -> None:
        check_group_name(group)
        self.group = group
        self.topic = dlq_topic(group)
        self._session = session
        self._reader = PullConsumer(TOOLS_GROUP, session=session)
        self._marks: dict[MessageQueue, int] = {}

    def __repr__(self) -> str:
        return f"<DeadLetters {self.group}>"

    async def count(self) -> int:
        """How many there are, sent again or not."""
        return sum(
            [
                await self._reader.max_offset(queue) - await self._reader.min_offset(queue)
                for queue in await self._queues()
            ]
        )

    async def read(
        self,
        *,
        include_resent: bool = True,
        begin: int | None = None,
        end: int | None = None,
        message_ids: Collection[str] = (),
        limit: int | None = None,
        noted: Collection[Place] = (),
        places: Collection[Place] | None = None,
        unread: dict[MessageQueue, MQError] | None = None,
    ) -> AsyncIterator[DeadLetter]:
        """Dead letters, queue by queue, oldest first: all, or those given up between two times, or by any of their ids.

        Those that come while reading are left for the next time. Letters in `noted`, the journal of a job that is
        continued, come in any case: whether they were sent again is for `resend` to find out. With `places` only the
        letters at these places come. With `unread` the errors of queues that cannot be read are put there, and the
        letters of the others come; without it the first error is raised.
        """
        left = limit
        for queue in await self._queues():
            try:
                async for letter in self._of_queue(queue, include_resent, begin, end, message_ids, places):
                    if letter.was_resent and not include_resent and letter.place not in noted:
                        continue
                    if left is not None:
                        if left == 0:
                            return
                        left -= 1
                    yield letter
            except MQError as error:
                if unread is None:
                    raise
                unread[queue] = error

    async def _of_queue(
        self,
        queue: MessageQueue,
        include_resent: bool,
        begin: int | None,
        end: int | None,
        message_ids: Collection[str],
        places: Collection[Place] | None,
    ) -> AsyncIterator[DeadLetter]:
        mark = self._marks[queue] = await self._reader.committed(queue) or 0
        start = await self._reader.min_offset(queue)
        offset = start if include_resent else max(start, mark)
        stop = await self._reader.max_offset(queue)
        if places is not None:
            chosen = [place_offset for place_queue, place_offset in places if place_queue == queue]
            offset, stop = max(offset, min(chosen, default=stop)), min(stop, max(chosen, default=-1) + 1)
        while offset < stop:
            result = await self._reader.pull(queue, offset)
            if result.status is PullStatus.NO_NEW_MSG:
                break
            wanted = [
                letter
                for message in result.messages
                if message.queue_offset < stop
                and (places is None or (queue, message.queue_offset) in places)
                and _is_wanted(letter := DeadLetter(message, message.queue_offset < mark), begin, end, message_ids)
            ]
            for letter in await asyncio.gather(*map(self._checked, wanted)):
                yield letter
            offset = result.next_offset

    async def export(self, letters: AsyncIterable[DeadLetter], file: TextIO) -> int:
        """Write letters as JSON lines; how many there were."""
        count = 0
        async for letter in letters:
            file.write(json.dumps(letter.document(), ensure_ascii=False) + "\n")
            count += 1
        return count

    async def resend(
        self,
        letters: AsyncIterable[DeadLetter],
        topic: str | None = None,
        *,
        pace: Pace | None = None,
        journal: Journal | None = None,
    ) -> AsyncGenerator[Resent, None]:
        """Send letters again, one after another; one outcome for each, and an error does not stop the others.

        They go to the group's retry topic, so that this group alone gets them, with all its retries before it; with
        `topic` they go there instead, and all its groups get them. Letters with an outcome in the journal are passed
        over; one without is looked for before it is sent, so that a job that died is continued by the same call.
        """
        from downrange.client.producer.producer import AsyncProducer  # not for those who only look at letters

        producer = AsyncProducer(PRODUCER_GROUP, session=self._session)
        unmarked: dict[MessageQueue, int] = {}
        try:
            if topic is not None:
                await producer.start()
            async for letter in letters:
                place = letter.place
                noted = journal.get(place) if journal is not None else None
                if noted is not None and noted.is_concluded:
                    self._remember(place, unmarked, was_sent=noted.sent_as is not None)
                    continue
                outcome = await self._found_again(letter, noted) if noted is not None else None
                if outcome is None:
                    if pace is not None:
                        await pace.wait()
                    if journal is not None:
                        noted = journal.intend(place, topic or retry_topic(self.group), self._session.clock.now())
                    outcome = await self._resend_one(letter, topic, producer, noted)
                if journal is not None:
                    journal.conclude(
                        place, outcome.offset_message_id, None if outcome.error is None else str(outcome.error)
                    )
                self._remember(place, unmarked, was_sent=outcome.error is None)
                yield outcome
        finally:
            for queue, mark in unmarked.items():
                await self._reader.commit(queue, mark)
            await producer.close()

    def _remember(self, place: Place, unmarked: dict[MessageQueue, int], *, was_sent: bool) -> None:
        queue, offset = place
        if was_sent and self._marks.get(queue) == offset:  # only what follows on what was sent again before
            self._marks[queue] = unmarked[queue] = offset + 1

    async def _resend_one(
        self, letter: DeadLetter, topic: str | None, producer: AsyncProducer, noted: Noted | None
    ) -> Resent:
        mark = {} if noted is None else {MARK: noted.mark}
        try:
            if topic is None:
                return Resent(letter, await self._to_retry_topic(letter, mark))
            return Resent(letter, (await producer.send(_anew(letter, topic, mark))).offset_message_id)
        except MQError as error:
            return Resent(letter, error=error)

    async def _found_again(self, letter: DeadLetter, noted: Noted) -> Resent | None:
        """The outcome of a letter that was about to be sent when the process died; None: it was not sent."""
        wanted = Wanted(noted.topic, begin=noted.timestamp - CLOCK_SKEW_MILLIS, sql=f"{MARK} = '{noted.mark}'")
        try:
            page = await search(
                self._session, wanted, None, Budget(1, looked_at=sys.maxsize, seconds=60), backwards=False
            )
        except NoRoute:
            return None
        for error in () if page.messages else page.failed.values():
            raise error  # it may be there
        return Resent(letter, page.messages[0].offset_message_id) if page.messages else None

    async def _checked(self, letter: DeadLetter) -> DeadLetter:
        """The letter, and whether it was sent again out of turn: then the retry topic has a copy that is younger."""
        unique_key = letter.message.unique_key
        if letter.was_resent or unique_key is None:
            return letter
        try:
            found = await MessageAdmin(self._session).all_by_unique_key(retry_topic(self.group), unique_key)
        except MQError:
            return letter
        was_resent = any(
            copy.reconsume_times == 0 and copy.store_timestamp >= letter.message.store_timestamp
            for copies in found.done.values()
            for copy in copies
        )
        return replace(letter, was_resent=was_resent)

    async def _queues(self) -> tuple[MessageQueue, ...]:
        try:
            route = await self._session.look_up_route(self.topic)
        except NoRoute:
            await GroupAdmin(self._session).brokers_of(self.group)  # raises for a group that no broker knows
            return ()
        try:
            return await self._reader.queues(self.topic)
        except NoRoute:
            brokers = ", ".join(data.broker_name for data in route.queue_datas)
            raise DeadLettersUnreadable(
                self.topic, f"{brokers}: {self.topic} may not be read; allow it: downrange topic perm {self.topic} 6"
            ) from None

    async def _to_retry_topic(self, letter: DeadLetter, mark: dict[str, str]) -> str:
        """On the broker that has the letter: the group is known there."""
        message = letter.message
        properties = names.decode_properties(message.properties_text)
        for name in _OF_THE_PAST:
            properties.pop(name, None)
        properties |= mark
        properties[names.RETRY_TOPIC] = letter.origin_topic
        properties[names.ORIGIN_MESSAGE_ID] = letter.origin_message_id
        header = SendMessageRequest(
            producer_group=PRODUCER_GROUP,
            topic=retry_topic(self.group),
            queue_id=0,
            sys_flag=message.sys_flag & _COMPRESSION,
            born_timestamp=message.born_timestamp,
            flag=message.flag,
            properties=names.encode_properties(properties),
            reconsume_times=0,
            bname=message.broker_name,
        )
        command = request(RequestCode.SEND_MESSAGE_V2, header, body=message.stored_body)
        broker = await address_of(self._session, message.queue)
        reply = await self._session.invoke(broker.address, command, accept=STATUS_OF_CODE)
        return reply.header(SendMessageResponse).msg_id


def _is_wanted(letter: DeadLetter, begin: int | None, end: int | None, message_ids: Collection[str]) -> bool:
    message = letter.message
    ids = {message.message_id, message.offset_message_id, letter.origin_message_id}
    return (
        (begin is None or message.store_timestamp >= begin)
        and (end is None or message.store_timestamp <= end)
        and (not message_ids or not ids.isdisjoint(message_ids))
    )


def _anew(letter: DeadLetter, topic: str, mark: dict[str, str]) -> Message:
    """The message to send to `topic`, as its producer would have made it."""
    message = letter.message
    properties = {
        name: value
        for name, value in names.decode_properties(message.properties_text).items()
        if name not in names.RESERVED
    }
    return Message(
        topic,
        message.body,
        message.tags,
        names.find_property(message.properties_text, names.KEYS),
        flag=message.flag,
        properties={**properties, **mark},
        sharding_key=names.find_property(message.properties_text, names.SHARDING_KEY),
    )
