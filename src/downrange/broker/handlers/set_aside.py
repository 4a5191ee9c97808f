"""Messages that are set aside, and the ends of transactions: all of one received chunk at once.

Set aside are half messages, until their transaction ends, and delayed ones, until they are due. This does what
`SendHandlers.send` and `TransactionHandlers.end` do, by their rules, where nothing is unusual. The rest is left to
them; both ways store the same bytes and answer with the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Final, NamedTuple

from downrange.broker.config import BrokerConfig
from downrange.broker.flow_control import FlowControl
from downrange.broker.handlers.plain_sends import encoded_if_possible
from downrange.broker.handlers.send import SendHandlers
from downrange.broker.handlers.transactions import TransactionHandlers
from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import STATUS_CODES, MessageWriter
from downrange.broker.topics import Topics
from downrange.broker.transactions.half_messages import HalfMessages
from downrange.broker.transactions.records import committed, real_topic
from downrange.model import properties as names
from downrange.model.message import SysFlag
from downrange.model.message_id import pack_host
from downrange.model.topics import HALF_TOPIC, Perm
from downrange.protocol.bodies.plain_end import END_HEADER
from downrange.protocol.bodies.plain_send import SEND_HEADER, SendReply, Sent, parse_send
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import ONEWAY_FLAG, RESPONSE_FLAG, Command
from downrange.protocol.errors import BrokerError
from downrange.protocol.framing import Frame, encode
from downrange.store.config import BrokerRole
from downrange.store.new_message import NewMessage, PutMessageStatus
from downrange.store.run import Place
from downrange.transport.connection import Connection

_SEND: Final = int(RequestCode.SEND_MESSAGE_V2)
_END: Final = int(RequestCode.END_TRANSACTION)
_OK: Final = int(ResponseCode.SUCCESS)
_ROLLBACK: Final = int(SysFlag.TRANSACTION_ROLLBACK)
_ENDS: Final = (int(SysFlag.TRANSACTION_COMMIT), _ROLLBACK)
_STARTS: Final = (*SEND_HEADER.starts, *END_HEADER.starts)
# A run is stored in one file, and a small request may commit a message many times as large.
_RUN_BYTES: Final = 1 << 18
_DOES_NOT_WAIT: Final = f"{names.WAIT}{names.NAME_VALUE_SEPARATOR}false"


class _Run:
    """What some requests of a chunk come to: messages to store, and what is to be done once they are."""

    __slots__ = ("answers", "ends", "halves", "messages", "sends", "sent", "size")

    def __init__(self) -> None:
        self.messages: list[NewMessage] = []
        self.size = 0
        # Of each send what its reply needs, and the place of its message in the run.
        self.sends: list[Sent] = []
        self.sent: list[int] = []
        self.answers: list[tuple[int, bytes]] = []  # to ends that want one: how many sends were before it, the reply
        self.halves: list[str] = []  # the topic of each half message
        # Half offset -> the place of its op message in the run, topic, whether it was committed.
        self.ends: dict[int, tuple[int, str, bool]] = {}

    def add(self, message: NewMessage) -> int:
        self.messages.append(message)
        self.size += len(message.body) + len(message.properties)
        return len(self.messages) - 1


class _Answered(NamedTuple):
    """Sends and where their messages went."""

    sends: list[Sent]
    places: list[Place]


class SetAside:
    """Takes half messages, delayed ones and ends of transactions. `take` is an `Express` of the broker's servers."""

    def __init__(
        self,
        config: LiveConfig,
        topics: Topics,
        sends: SendHandlers,
        ends: TransactionHandlers,
        half_messages: HalfMessages,
        writer: MessageWriter,
        flow: FlowControl,
    ) -> None:
        self._config = config
        self._write_queues = topics.plain
        self._set_aside = sends.set_aside
        self._half_message = ends.half_message
        self._end_flags = (ONEWAY_FLAG, 0) if ends.answers_at_once else (ONEWAY_FLAG,)
        self._half_messages = half_messages
        self._writer = writer
        self._flow = flow
        self._takes = writer.store.takes_together
        self._run_bytes = min(_RUN_BYTES, writer.store.config.mapped_file_size_commit_log // 4)
        self._store_host = pack_host(config.broker.broker_ip1, config.broker.listen_port)
        self._adopt(config.broker)

    def _adopt(self, broker: BrokerConfig) -> None:
        """Work out once what follows from the configuration; it is replaced as a whole when it changes."""
        self._known = broker
        self._is_ready = (
            not broker.start_accept_send_request_time_stamp
            and bool(broker.broker_permission & Perm.WRITE)
            and self._config.store.broker_role is not BrokerRole.SLAVE
        )
        self._accepted = SendReply(_OK, self._store_host, broker.region_id, broker.trace_on)

    def take(self, frames: list[Frame], at: int, connection: Connection) -> int:
        """Store and answer what is usual, from `frames[at]` on; return the place of the first frame that is not."""
        flow = self._flow
        if not frames[at][1].startswith(_STARTS) or connection.last_received - flow.last_tick > flow.send_patience:
            return at
        if self._config.broker is not self._known:
            self._adopt(self._config.broker)
        if not self._is_ready or not connection.peer_host:
            return at
        count = len(frames)
        while at < count:
            start = perf_counter()
            run = _Run()
            end = self._read(run, frames, at, connection.peer_host)
            places = self._writer.append_together(run.messages) if run.messages else None
            if places is None:
                break
            self._note(run, places)
            self._answer(run, [places[place] for place in run.sent], connection)
            self._count(run, (perf_counter() - start) * 1000)
            at = end
        return at

    # --- reading ------------------------------------------------------------------------------------------------

    def _read(self, run: _Run, frames: list[Frame], at: int, peer_host: bytes) -> int:
        """Take the requests from `frames[at]` on into the run, up to the first that is something else."""
        count = len(frames)
        while at < count and run.size < self._run_bytes:
            frame = frames[at]
            if not self._read_end(run, frame) and not self._read_send(run, frame, peer_host):
                break
            at += 1
        return at

    def _read_send(self, run: _Run, frame: Frame, peer_host: bytes) -> bool:
        sent = parse_send(frame)
        if sent is None:
            return False
        opaque, flag, topic, queue_id, sys_flag, born_timestamp, message_flag, text, reconsume_times = sent
        if flag & RESPONSE_FLAG or not 0 <= queue_id < self._write_queues.get(topic, 0) or _DOES_NOT_WAIT in text:
            return False
        body = frame[2]
        message = NewMessage(
            topic, queue_id, body, b"", born_timestamp, peer_host, self._store_host, message_flag, sys_flag,
            reconsume_times,
        )  # fmt: skip
        try:
            aside = self._set_aside(message, text)
        except BrokerError:
            return False
        if aside is None or not self._takes(aside):
            return False
        run.sent.append(run.add(aside))
        run.sends.append((frame[0], opaque, flag, queue_id, 1))
        if aside.topic is HALF_TOPIC:
            run.halves.append(topic)
        return True

    def _read_end(self, run: _Run, frame: Frame) -> bool:
        parsed = END_HEADER.read(frame)
        if parsed is None:
            return False
        opaque, flag, header = parsed.opaque, parsed.flag, parsed.ext
        if flag not in self._end_flags or header.commit_or_rollback not in _ENDS:
            return False
        try:
            half_message, half_offset = self._half_message(header)
        except BrokerError:
            return False
        if half_offset in run.ends or not self._half_messages.ends_simply(half_message):
            return False
        note = self._half_messages.operation(half_offset, self._writer.now())
        if not self._takes(note):
            return False
        if header.commit_or_rollback == _ROLLBACK:
            run.ends[half_offset] = run.add(note), real_topic(half_message.text), False
        else:
            message = committed(half_message)
            if message is None or not self._takes(message):
                return False
            run.add(message)  # before the note: at worst a crash leaves a message that is asked about once more
            run.ends[half_offset] = run.add(note), message.topic, True
        if flag != ONEWAY_FLAG:
            reply = Command(_OK, opaque, RESPONSE_FLAG, serialize_type=frame[0])
            run.answers.append((len(run.sends), encode(reply)))
        return True

    # --- afterwards ---------------------------------------------------------------------------------------------

    def _note(self, run: _Run, places: list[Place]) -> None:
        half_messages, statistics = self._half_messages, self._writer.statistics
        for topic in run.halves:
            half_messages.stored(topic)
        for half_offset, (place, topic, is_commit) in run.ends.items():
            physical_offset, size, _ = places[place]
            half_messages.noted(half_offset, topic, physical_offset + size)
            if is_commit:
                statistics.committed(topic)
            else:
                statistics.rolled_back(topic)

    def _count(self, run: _Run, millis: float) -> None:
        sends, ends = len(run.sends), len(run.ends)
        each = millis / (sends + ends)
        if sends:
            self._writer.statistics.sent_together(_SEND, sends, each * sends)
        if ends:
            self._writer.statistics.rpc(_END, _OK, each, ends)

    def _answer(self, run: _Run, places: list[Place], connection: Connection) -> None:
        sends = run.sends
        waits = bool(sends) and self._writer.makes_wait
        pieces: list[bytes] = []
        answered = 0
        for before, reply in run.answers:
            if not waits and before > answered:  # replies keep the order of their requests
                pieces.append(self._accepted.encode(_Answered(sends[answered:before], places[answered:before])))
                answered = before
            pieces.append(reply)
        if not waits and answered < len(sends):
            pieces.append(self._accepted.encode(_Answered(sends[answered:], places[answered:])))
        connection.reply_parts(pieces)
        if waits:
            connection.begin_answering(len(sends))
            end_answering = partial(connection.end_answering, len(sends))
            physical_offset, size, _ = places[-1]
            tell = partial(self._answer_safe, sends, places, end_answering)
            self._writer.tell_when_safe(physical_offset + size, tell)

    def _answer_safe(
        self, sends: list[Sent], places: list[Place], reply: Callable[[bytes], None], status: PutMessageStatus
    ) -> None:
        """All of a run get the status of its last message, the one that was safe last."""
        code = STATUS_CODES.get(status, ResponseCode.SUCCESS)
        answer = SendReply(int(code), self._store_host, self._known.region_id, self._known.trace_on)
        reply(encoded_if_possible(answer, _Answered(sends, places)))
