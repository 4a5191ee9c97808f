"""Plain sends: what `SendHandlers.send` does, for all the sends of one received chunk at once.

Plain is a request 310 for a topic and queue that are there already, whose message is neither delayed nor transactional
nor a retry. Nearly every message is. The rest is left to the handlers; both ways store the same bytes and answer with
the same bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import Final

from downrange.broker.config import BrokerConfig
from downrange.broker.destinations import Destinations
from downrange.broker.flow_control import FlowControl
from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import STATUS_CODES, MessageWriter
from downrange.broker.topics import Topics
from downrange.compiled import steps
from downrange.model import properties as names
from downrange.model.message_id import pack_host
from downrange.model.topics import Perm
from downrange.protocol.bodies.plain_send import SendReply, Sent, Stored, parse_send
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import RESPONSE_FLAG
from downrange.protocol.framing import Frame
from downrange.store.new_message import PutMessageStatus
from downrange.store.queue.queues import QueueState
from downrange.store.run import PlainMessage, Run
from downrange.transport.connection import Connection

log = logging.getLogger(__name__)

SEND: Final = int(RequestCode.SEND_MESSAGE_V2)
_OK: Final = int(ResponseCode.SUCCESS)
_WRITE: Final = int(Perm.WRITE)
_TRANSACTIONAL: Final = 12  # the bits of sysFlag
_WAIT: Final = f"{names.WAIT}{names.NAME_VALUE_SEPARATOR}"
_WAITING: Final = f"{_WAIT}true{names.PROPERTY_SEPARATOR}"


class PlainSends:
    """Takes messages from producers, the fast way. `take` is the `Express` of the broker's servers."""

    def __init__(self, config: LiveConfig, topics: Topics, writer: MessageWriter, flow: FlowControl) -> None:
        self._config = config
        self._writer = writer
        self._flow = flow
        broker = config.broker
        self._store_host = pack_host(broker.broker_ip1, broker.listen_port)
        self._cluster_property = f"{names.CLUSTER}{names.NAME_VALUE_SEPARATOR}{broker.broker_cluster_name}"
        self._cluster = self._cluster_property.encode()
        queues = writer.store.queues
        self._write_queues = topics.plain
        self._states = queues.states
        if steps is not None:
            destinations = Destinations(topics, queues)
            self._topic_table, self._learn_topic = destinations.table, destinations.learn
        self._states_by_row = queues.by_row
        self._limits = writer.store.limits
        self._append = writer.append_run
        self._makes_wait = writer.makes_wait
        self._adopt(broker)

    def take(self, frames: list[Frame], at: int, connection: Connection) -> int:
        """Store and answer what is plain, from `frames[at]` on; return the place of the first frame that is not."""
        if not self._is_open(connection.last_received) or not connection.peer_host:
            return at
        count = len(frames)
        while at < count:
            start = perf_counter()
            run = self._plain(frames, at)
            if run is None or not self._append(run, connection.peer_host, self._store_host):
                break
            requests = run.requests
            if self._makes_wait:
                connection.begin_answering(requests)
                reply = partial(connection.end_answering, requests)
                self._writer.tell_when_safe(run.end, partial(self._reply_safe, run, reply))
            else:
                connection.reply_parts([self._accepted.encode(run)])
            self._count(run, start)
            at += requests
        return at

    def _is_open(self, now: float) -> bool:
        """Are sends taken, and those that came by now without having waited for too long?"""
        if self._config.broker is not self._known:
            self._adopt(self._config.broker)
        flow = self._flow
        return self._is_ready and now - flow.last_tick <= flow.send_patience

    def _count(self, run: Run, start: float) -> None:
        millis = (perf_counter() - start) * 1000
        if millis >= 1:
            self._flow.appended(millis / 1000)
        self._writer.statistics.sent_together(run.code, run.requests, millis)

    def _plain(self, frames: list[Frame], at: int) -> Run | None:
        run = self._plain_compiled(frames, at)
        if run is not None:
            return run
        limits = self._limits
        return plain_run(frames, at, self._write_queues, self._states, limits.surely_fits, self._cluster_property)

    def _plain_compiled(self, frames: list[Frame], at: int) -> Run | None:
        run: Run | None = None
        if steps is not None:
            limits = self._limits
            run = steps.plain_run(
                frames, at, self._topic_table, self._learn_topic, self._states_by_row,
                limits.surely_fits, limits.max_message_size, self._cluster,
            )  # fmt: skip
        return run

    def _adopt(self, broker: BrokerConfig) -> None:
        """Work out once what follows from the configuration; it is replaced as a whole when it changes."""
        self._known = broker
        self._is_ready = not broker.start_accept_send_request_time_stamp and bool(broker.broker_permission & _WRITE)
        self._accepted = SendReply(_OK, self._store_host, broker.region_id, broker.trace_on)

    def _reply_safe(self, run: Run, reply: Callable[[bytes], None], status: PutMessageStatus) -> None:
        """All of a run get the status of its last message, the one that was safe last."""
        answer = self._accepted
        if status is not PutMessageStatus.PUT_OK:
            code = int(STATUS_CODES[status])
            answer = SendReply(code, self._store_host, self._known.region_id, self._known.trace_on)
        reply(encoded_if_possible(answer, run))


def encoded_if_possible(answer: SendReply, stored: Stored) -> bytes:
    """For who is told that messages are safe, and must not raise: without an answer their senders send again."""
    try:
        return answer.encode(stored)
    except Exception:
        log.exception("messages were stored and cannot be acknowledged messages=%d", len(stored.places))
        return b""


def plain_run(
    frames: list[Frame],
    at: int,
    write_queues: Mapping[str, int],
    states: Mapping[tuple[str, int], QueueState],
    fits: int,
    cluster: str,
) -> Run | None:
    """The messages of the plain sends from `frames[at]` on, up to the first frame that is something else.

    The compiled twin takes batches and V1 headers (request 10), too; here they are left to the handlers.
    """
    messages: list[PlainMessage] = []
    sends: list[Sent] = []
    for frame in frames[at:] if at else frames:
        sent = parse_send(frame)
        if sent is None:
            break
        opaque, flag, topic, queue_id, sys_flag, born_timestamp, message_flag, text, reconsume_times = sent
        state = states.get((topic, queue_id))
        if state is None or state.is_special or queue_id >= write_queues.get(topic, 0):
            break
        if sys_flag & _TRANSACTIONAL or flag & RESPONSE_FLAG or "DELAY" in text or "TRAN_MSG" in text:
            break
        if _WAIT in text:
            before, found, after = text.partition(_WAITING)
            if not found:
                before = text.removesuffix(_WAITING[:-1])
            text = before + after
            if _WAIT in text or (before and before[-1] != "\x02"):
                break
        text = f"{text}\x02{cluster}" if text and text[-1] != "\x02" else text + cluster
        body = frame[2]
        properties = text.encode()
        if len(body) + len(properties) > fits:
            break
        messages.append((state, body, properties, text, born_timestamp, message_flag, sys_flag, reconsume_times))
        sends.append((frame[0], opaque, flag, queue_id, 1))
    return Run(messages, sends, SEND) if messages else None
