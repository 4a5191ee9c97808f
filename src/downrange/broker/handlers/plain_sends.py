"""Plain sends: what `SendHandlers.send` does, for all the sends of one received chunk at once.

Plain is a request 310 for a topic and queue that are there already, whose message is neither delayed nor transactional
nor a retry. Nearly every message is. The rest is left to the handlers; both ways store the same bytes and answer with
the same bytes.
"""

from __future__ import annotations

import asyncio
from functools import partial
from time import perf_counter
from typing import Final

from downrange.broker.config import BrokerConfig
from downrange.broker.flow_control import FlowControl
from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import STATUS_CODES, MessageWriter
from downrange.broker.topics import Topics
from downrange.model import properties as names
from downrange.model.message_id import pack_host
from downrange.model.topics import Perm
from downrange.protocol.bodies.plain_send import Answer, PlainSend, SendReply, parse_send
from downrange.protocol.codes import ResponseCode
from downrange.protocol.command import RESPONSE_FLAG
from downrange.protocol.framing import Frame
from downrange.store.new_message import PutMessageStatus
from downrange.store.queues import PlainMessage
from downrange.transport.connection import Connection

_OK: Final = int(ResponseCode.SUCCESS)
_WRITE: Final = int(Perm.WRITE)
_TRANSACTIONAL: Final = 12  # the bits of sysFlag
_WAIT: Final = f"{names.WAIT}{names.NAME_VALUE_SEPARATOR}"
_WAITING: Final = f"{_WAIT}true{names.PROPERTY_SEPARATOR}"


class PlainSends:
    """Takes messages from producers, the fast way. `take` is the `Express` of the broker's servers."""

    def __init__(self, config: LiveConfig, topics: Topics, writer: MessageWriter, flow: FlowControl) -> None:
        self._config = config
        self._topics = topics
        self._writer = writer
        self._flow = flow
        broker = config.broker
        self._store_host = pack_host(broker.broker_ip1, broker.listen_port)
        self._cluster_property = f"{names.CLUSTER}{names.NAME_VALUE_SEPARATOR}{broker.broker_cluster_name}"
        self._states = writer.store.queues.states
        self._limits = writer.store.limits
        self._append = writer.append_run
        self._makes_wait = writer.makes_wait
        self._adopt(broker)

    def take(self, frames: list[Frame], at: int, connection: Connection) -> int:
        """Store and answer what is plain, from `frames[at]` on; return the place of the first frame that is not."""
        flow = self._flow
        if connection.last_active - flow.last_tick > flow.send_patience or not connection.peer_host:
            return at
        if self._config.broker is not self._known:
            self._adopt(self._config.broker)
        if not self._is_ready:
            return at
        start = perf_counter()
        if at:
            frames = frames[at:]
        messages, sends = self._plain(frames)
        if not messages:
            return at
        places = self._append(messages, connection.peer_host, self._store_host)
        if places is None:
            return at
        if self._makes_wait:
            self._reply_when_safe(list(zip(frames, sends, places, strict=False)), connection)
        else:
            encoded = self._accepted.encode(zip(frames, sends, places, strict=False))
            if encoded:  # all may have been one-way
                connection.reply_encoded(encoded)
        millis = (perf_counter() - start) * 1000
        if millis >= 1:
            flow.appended(millis / 1000)
        self._writer.statistics.sent_together(len(places), millis)
        return at + len(places)

    def _adopt(self, broker: BrokerConfig) -> None:
        """Work out once what follows from the configuration; it is replaced as a whole when it changes."""
        self._known = broker
        self._is_ready = not broker.start_accept_send_request_time_stamp and bool(broker.broker_permission & _WRITE)
        self._accepted = SendReply(_OK, self._store_host, broker.region_id, broker.trace_on)

    def _plain(self, frames: list[Frame]) -> tuple[list[PlainMessage], list[PlainSend]]:
        """The messages of the plain sends at the front, up to the first frame that is something else."""
        sendable = self._topics.sendable
        states = self._states
        fits = self._limits.surely_fits
        cluster = self._cluster_property
        messages: list[PlainMessage] = []
        sends: list[PlainSend] = []
        for frame in frames:
            sent = parse_send(frame)
            if sent is None:
                break
            _, flag, topic, queue_id, sys_flag, born_timestamp, message_flag, text, reconsume_times = sent
            config = sendable.get(topic)
            state = states.get((topic, queue_id))
            if (
                config is None
                or state is None
                or state.is_special
                or queue_id >= config.write_queue_nums
                or config.topic_filter_type == "MULTI_TAG"
                or topic[0] == "%"
                or sys_flag & _TRANSACTIONAL
                or flag & RESPONSE_FLAG
                or "DELAY" in text
                or "TRAN_MSG" in text
            ):
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
            sends.append(sent)
        return messages, sends

    def _reply_when_safe(self, answers: list[Answer], connection: Connection) -> None:
        physical_offset, size, _ = answers[-1][2]
        safe = self._writer.safe_when(physical_offset + size)
        assert safe is not None
        replies: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        connection.reply_later(len(answers), replies)
        safe.add_done_callback(partial(self._reply_safe, answers, replies))

    def _reply_safe(
        self, answers: list[Answer], replies: asyncio.Future[bytes], safe: asyncio.Future[PutMessageStatus]
    ) -> None:
        """All of a run get the status of its last message, the one that was safe last."""
        code = STATUS_CODES.get(safe.result(), ResponseCode.SUCCESS)
        if code is ResponseCode.SUCCESS:
            reply = self._accepted
        else:
            reply = SendReply(int(code), self._store_host, self._known.region_id, self._known.trace_on)
        replies.set_result(reply.encode(answers))
