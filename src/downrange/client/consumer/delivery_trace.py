"""Trace entries of messages handed to a consumer's user: one before, one after. [ConsumeMessageTraceHookImpl]"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.lite_pull_config import LitePullConfig
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.retry import BadAnswer, verdict
from downrange.client.consumer.simple_config import SimpleConsumerConfig
from downrange.client.namespace import unwrap
from downrange.client.producer.producer import start_trace
from downrange.client.session import Session
from downrange.client.trace import ConsumeCode, encode_sub_after, encode_sub_before
from downrange.client.trace_writer import TraceWriter
from downrange.client.unique_id import UniqueIds
from downrange.clock import Clock
from downrange.model import properties as names

_SWITCHED_OFF: Final = "false"


class _Traced(NamedTuple):
    """One message: its place among the messages handed over together, and the ids and keys to find its entries by."""

    at: int
    message_id: str
    keys: str | None


class Handed(NamedTuple):
    """Messages handed over together, and the traced ones of them."""

    request_id: str
    started: int
    total: int
    traced: Sequence[_Traced]


class DeliveryTrace:
    """Traces the deliveries to a consumer. Any thread may call.

    Nothing is reported of messages the broker excluded with TRACE_ON=false, and of the trace topic itself: reports
    about reports would never end.
    """

    def __init__(
        self, writer: TraceWriter, group: str, namespace: str, trace_topic: str, timeout: float, clock: Clock
    ) -> None:
        self.writer = writer
        self._group = unwrap(namespace, group)
        self._trace_topic = trace_topic
        self._timeout_millis = timeout * 1000
        self._clock = clock
        self._ids = UniqueIds(clock)

    def begin(self, messages: Sequence[ReceivedMessage]) -> Handed:
        traced: list[_Traced] = []
        handed = Handed(self._ids.next(), self._clock.now(), len(messages), traced)
        for at, message in enumerate(messages):
            text = message.properties_text
            if message.queue.topic == self._trace_topic or names.find_property(text, names.TRACE_ON) == _SWITCHED_OFF:
                continue
            one = _Traced(at, message.message_id, names.find_property(text, names.KEYS))
            entry = encode_sub_before(
                timestamp=handed.started,
                region_id=names.find_property(text, names.MSG_REGION),
                group=self._group,
                request_id=handed.request_id,
                message_id=one.message_id,
                retry_times=message.reconsume_times,
                keys=one.keys,
            )
            self.writer.add(entry, one.message_id, one.keys)
            traced.append(one)
        return handed

    def end(self, handed: Handed, answer: object = None, error: BaseException | None = None) -> None:
        """The user is through with them: with an answer as callbacks give it, or an exception."""
        now = self._clock.now()
        done, code = self._outcome(answer, error, handed.total, now - handed.started)
        for at, message_id, keys in handed.traced:
            is_done = at < done
            entry = encode_sub_after(
                timestamp=now,
                group=self._group,
                request_id=handed.request_id,
                message_id=message_id,
                keys=keys,
                cost_millis=(now - handed.started) // handed.total,
                success=is_done,
                code=ConsumeCode.SUCCESS if is_done and code is ConsumeCode.FAILED else code,
            )
            self.writer.add(entry, message_id, keys)

    def _outcome(
        self, answer: object, error: BaseException | None, count: int, cost_millis: int
    ) -> tuple[int, ConsumeCode]:
        """How many messages are done, and the code for the others."""
        if error is not None:
            return 0, ConsumeCode.EXCEPTION
        try:
            done = verdict(answer, count).done
        except BadAnswer:
            done = 0
        if cost_millis >= self._timeout_millis:
            return done, ConsumeCode.TIME_OUT
        return done, ConsumeCode.SUCCESS if done == count else ConsumeCode.FAILED


async def start_delivery_trace(
    session: Session, group: str, config: ConsumerConfig | LitePullConfig | SimpleConsumerConfig, timeout: float
) -> DeliveryTrace:
    """Reports of one consumer, until `writer` is closed. `timeout`: seconds after which a call is reported as late."""
    topic = config.trace_topic
    writer = await start_trace(session, group, "CONSUME", topic)
    return DeliveryTrace(writer, group, config.namespace, topic, timeout, session.clock)
