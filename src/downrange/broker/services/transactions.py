"""The check: asks producers about half messages that were not ended. [TransactionalMessageCheckService]

A round looks at the waiting half messages, oldest first. A message that is asked about is put back at the end of the
half queue with a higher count of checks, so that the next round sees the others first and the beginning of the queue
can move on. A message that was asked about too often goes to TRANS_CHECK_MAX_TIME_TOPIC. The cost of a round grows with
the waiting messages, not with the transactions that have ended.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from downrange.broker.clients import Producers
from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import MessageWriter
from downrange.broker.topics import Topics
from downrange.broker.transactions.half_messages import HalfMessages
from downrange.broker.transactions.records import asked_about, given_up, number, real_topic
from downrange.clock import Clock
from downrange.model import properties as names
from downrange.model.errors import MQError
from downrange.model.message import StoredMessage
from downrange.model.message_id import pack_host
from downrange.model.properties import find_property
from downrange.model.record import encode_record
from downrange.model.topics import CHECK_MAX_TIME_TOPIC
from downrange.protocol.bodies.transactions import CheckTransactionStateRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request
from downrange.store.new_message import AppendResult, PutMessageStatus

log = logging.getLogger(__name__)

_SETTLE_SECONDS: Final = 1.0
_TURN_MESSAGES: Final = 50
_HOUR_MILLIS: Final = 3_600_000
_UNSTORABLE: Final = (PutMessageStatus.MESSAGE_ILLEGAL, PutMessageStatus.PROPERTIES_SIZE_EXCEEDED)


class Verdict(Enum):
    """The decision of one round of checks about one half message."""

    GIVE_UP = auto()
    STOP = auto()
    """The message is too young, and so are all behind it."""
    SPARE = auto()
    """The producer asked for more time than usual."""
    ASK = auto()


def judge(
    stored: StoredMessage, began: int, now: int, *, timeout_millis: int, check_max: int, keep_millis: int
) -> Verdict:
    """Decide what to do with a waiting half message in a round that began at `began`."""
    if stored.store_timestamp >= began:
        # This includes a message put back in this round. RocketMQ drops it here, before the last answer can come.
        return Verdict.STOP
    age = now - stored.born_timestamp
    if (number(stored.properties_text, names.TRANSACTION_CHECK_TIMES) or 0) >= check_max or age > keep_millis:
        return Verdict.GIVE_UP
    immunity_seconds = number(stored.properties_text, names.CHECK_IMMUNITY_TIME_IN_SECONDS)
    if immunity_seconds is None:
        # A negative age comes from a wrong clock and says nothing.
        return Verdict.STOP if 0 <= age < timeout_millis else Verdict.ASK
    immunity_millis = timeout_millis if immunity_seconds < 0 else immunity_seconds * 1000
    return Verdict.SPARE if age < immunity_millis else Verdict.ASK


@dataclass(eq=False)
class TransactionService:
    """Asks about half messages, drops those without an answer, and keeps the progress of the half queue."""

    _config: LiveConfig
    _half_messages: HalfMessages
    _producers: Producers
    _topics: Topics
    _writer: MessageWriter
    _clock: Clock

    async def run(self) -> None:
        """Make a round every transactionCheckInterval, for as long as the broker is a master."""
        last_round = self._clock.monotonic()
        while True:
            left = last_round + self._config.broker.transaction_check_interval / 1000 - self._clock.monotonic()
            await self._clock.sleep(max(0.001, min(_SETTLE_SECONDS, left)))
            self._half_messages.settle()
            if left <= _SETTLE_SECONDS:
                last_round = self._clock.monotonic()
                await self.check()

    async def check(self) -> None:
        """Make one round."""
        began = self._clock.now()
        asked = lost = 0
        for turn, half_offset in enumerate(self._half_messages.offsets_waiting(), 1):
            stored = self._half_messages.read(half_offset)
            if stored is None:
                lost += self._half_messages.unreadable(half_offset)
                continue
            verdict = self._judge(stored, began)
            if verdict is Verdict.STOP:
                break
            if not self._carry_out(verdict, stored):
                break  # the store refuses messages now: the next round tries again
            asked += verdict is Verdict.ASK
            if turn % _TURN_MESSAGES == 0:
                await asyncio.sleep(0)
        if asked or lost:
            log.info("half messages checked asked=%d lost=%d %r", asked, lost, self._half_messages)
        if lost:
            self._half_messages.count_again()
        self._half_messages.forget_moves()
        self._half_messages.settle()

    def _judge(self, stored: StoredMessage, began: int) -> Verdict:
        broker = self._config.broker
        return judge(
            stored,
            began,
            self._clock.now(),
            timeout_millis=broker.transaction_time_out,
            check_max=broker.transaction_check_max,
            keep_millis=self._config.store.file_reserved_time * _HOUR_MILLIS,
        )

    def _carry_out(self, verdict: Verdict, stored: StoredMessage) -> bool:
        match verdict:
            case Verdict.ASK:
                return self._ask(stored)
            case Verdict.SPARE:
                return self._spare(stored)
            case _:
                return self._give_up(stored)

    def _ask(self, stored: StoredMessage) -> bool:
        checks = (number(stored.properties_text, names.TRANSACTION_CHECK_TIMES) or 0) + 1
        copy, result = self._half_messages.put_back(stored, {names.TRANSACTION_CHECK_TIMES: str(checks)})
        if result.status is not PutMessageStatus.PUT_OK:
            return self._not_put_back(stored, result)
        shown = asked_about(stored, copy, result)
        group = find_property(stored.properties_text, names.PGROUP) or ""
        producer = self._producers.pick(group, shown.topic)
        if producer is None or not producer.connection.is_writable:
            log.warning("no producer to ask group=%s id=%s checks=%d", group, shown.message_id, checks)
            return True
        header = CheckTransactionStateRequest(
            tran_state_table_offset=shown.queue_offset,
            commit_log_offset=shown.physical_offset,
            msg_id=shown.unique_key,
            transaction_id=shown.unique_key,
            offset_msg_id=shown.offset_message_id,
        )
        question = request(RequestCode.CHECK_TRANSACTION_STATE, header, body=_record(shown), oneway=True)
        try:
            producer.connection.oneway(question)
        except MQError as error:
            log.info("producer not asked group=%s reason=%s", group, error)
        return True

    def _spare(self, stored: StoredMessage) -> bool:
        """Put a message behind the others without asking or counting. (RocketMQ counts, and may drop it unasked.)"""
        sent_to = find_property(stored.properties_text, names.TRAN_PREPARED_QUEUE_OFFSET) or str(stored.queue_offset)
        _, result = self._half_messages.put_back(stored, {names.TRAN_PREPARED_QUEUE_OFFSET: sent_to})
        return result.status is PutMessageStatus.PUT_OK or self._not_put_back(stored, result)

    def _not_put_back(self, stored: StoredMessage, result: AppendResult) -> bool:
        """Give up a message that has no room for another property, which would block all behind it; else False."""
        return result.status in _UNSTORABLE and self._give_up(stored)

    def _give_up(self, stored: StoredMessage) -> bool:
        self._topics.ensure(CHECK_MAX_TIME_TOPIC, 1)
        result = self._writer.append_one(given_up(stored))
        if result.status is not PutMessageStatus.PUT_OK:
            return False
        self._half_messages.ended(stored.queue_offset, stored.properties_text, stored.queue_offset)
        log.error(
            "half message given up, kept in %s id=%s topic=%s",
            CHECK_MAX_TIME_TOPIC,
            stored.message_id,
            real_topic(stored.properties_text),
        )
        return True


def _record(message: StoredMessage) -> bytes:
    return encode_record(message, pack_host(*message.born_host), pack_host(*message.store_host))
