"""The family of requests that store messages: sends (10, 310, 320), messages sent back (36), ends of transactions (37).

All requests of a run become one batch of messages, one append to the store, and one block of replies. What is checked,
in which order, and what is answered stands with the readers of each kind of request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Final

from downrange.broker.config import BrokerConfig
from downrange.broker.handlers.send_reader import STATUS_CODES, SendReader
from downrange.broker.handlers.storing import Reader, Storing
from downrange.broker.handlers.usual_sends import UsualSends
from downrange.broker.message_writer import MessageWriter
from downrange.compiled import VARIANT
from downrange.model.message_id import offset_message_id
from downrange.model.topics import Perm
from downrange.protocol.bodies.send import SendMessageResponse
from downrange.protocol.bodies.send_replies import ALL, AT_ONCE, WHEN_SAFE, SendReplies, SendReply
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import ONEWAY_FLAG, RESPONSE_FLAG, Command
from downrange.protocol.errors import RemoteProtocolError
from downrange.protocol.framing import Frame, code_of, decode_frame, encode
from downrange.store.new_message import PutMessageStatus, Refusal
from downrange.store.new_messages import NewMessages, Place
from downrange.transport.connection import Connection
from downrange.transport.serving import error_reply, room_until, send_replies

log = logging.getLogger(__name__)

_SENDS: Final = frozenset(
    map(int, (RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE))
)
_OK: Final = int(ResponseCode.SUCCESS)
_WRITE: Final = int(Perm.WRITE)
_WAIT_FOR_NAMESRV_SECONDS: Final = 0.5
# A small request may commit a message many times as large: above this size a batch takes no more requests.
_BATCH_BYTES: Final = 1 << 20


class _Unusual:
    """What a batch knows of its requests that are not usual."""

    __slots__ = ("bytes", "handles", "is_closed", "keys", "refused", "requests", "then")

    def __init__(self) -> None:
        self.requests: dict[int, tuple[Command, Storing]] = {}
        """The requests by their number in the batch."""
        self.then: list[tuple[int, int, Callable[[Sequence[Place]], None]]] = []
        """Functions to call once messages are stored: the number of the first message, how many, and the function."""
        self.keys: set[object] = set()
        self.refused: list[tuple[int, int]] = []
        """The codes of requests and of their replies."""
        self.bytes = 0
        self.handles: list[int] = []
        """The numbers of the requests whose replies have a recall handle."""
        self.is_closed = False
        """A batch that is closed takes no more requests."""


class _Batch:
    """The messages that requests, taken together, want stored, and the replies to these requests."""

    __slots__ = ("is_new_topic", "messages", "new_topic", "replies", "unusual")

    def __init__(self, new_topic: Storing | None) -> None:
        """`new_topic`: the first request has been read already, and makes a topic."""
        self.messages = NewMessages()
        self.replies = SendReplies()
        self.new_topic = new_topic
        self.is_new_topic = False
        self.unusual: _Unusual | None = None  # nearly always all requests are usual

    def open(self) -> _Unusual:
        """Get ready for a request that is not usual."""
        if self.unusual is None:
            self.unusual = _Unusual()
        return self.unusual


class Sends:
    """Takes messages from producers, and from consumers that could not consume them."""

    def __init__(
        self,
        writer: MessageWriter,
        reader: SendReader,
        usual: UsualSends,
        others: Mapping[int, Reader],
        register: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """`others` read the requests that are no sends; `register` tells the name servers of a new topic."""
        self._writer = writer
        self._statistics = writer.statistics
        self._store = writer.store
        self._reader = reader
        self._readers: dict[int, Reader] = {**dict.fromkeys(_SENDS, reader.read), **others}
        self.codes = frozenset(self._readers)
        self._usual = usual
        self._register = register
        self._config = reader.config
        self.accelerated = self.not_accelerated = 0
        """How many requests the compiled step has read, and how many were read in Python."""
        self._adopt(self._config.broker)

    def _adopt(self, broker: BrokerConfig) -> None:
        """Work out once what follows from the configuration; it is replaced as a whole when it changes."""
        self._known = broker
        is_ready = not broker.start_accept_send_request_time_stamp and bool(broker.broker_permission & _WRITE)
        self._takes_usual = is_ready and VARIANT == "compiled"
        self._accepted = self._template(_OK)

    def _template(self, code: int) -> SendReply:
        return SendReply(code, self._reader.store_host, self._known.region_id, self._known.trace_on)

    def take(self, frames: list[Frame], origins: list[Connection], at: int, stop: int) -> None:
        """Store and answer what `frames[at:stop]` ask for."""
        if self._config.broker is not self._known:
            self._adopt(self._config.broker)
        new_topic: Storing | None = None
        first = at
        while at < stop:
            if origins[at].is_full:  # since the run began: its peer broke the protocol, or has enough to read
                origins[at].defer(frames[at])
                at, new_topic = at + 1, None
                continue
            start = perf_counter()
            batch = _Batch(new_topic)
            end = self._read(batch, frames, origins, at, stop if at == first else room_until(origins, at, stop))
            if len(batch.messages):
                refusal = self._writer.append(batch.messages)
                if refusal is not None:
                    self._refuse(batch, refusal, frames[at:end])
                if batch.unusual is not None and batch.unusual.handles:
                    self._tell_handles(batch, _OK)
                if batch.unusual is not None and batch.unusual.then:
                    places = batch.messages.places
                    for number, count, then in batch.unusual.then:
                        if number + count <= len(places):
                            then(places[number : number + count])
            self._answer(batch, origins if end - at == len(origins) else origins[at:end])
            millis = (perf_counter() - start) * 1000
            if batch.unusual is None and len(batch.messages) == end - at:
                self._statistics.sent_together(batch.replies.code, end - at, millis)
            else:
                self._count(batch, millis)
            at, new_topic = end, batch.new_topic

    # --- reading ------------------------------------------------------------------------------------------------

    def _read(self, batch: _Batch, frames: list[Frame], origins: list[Connection], at: int, stop: int) -> int:
        """Take requests from `frames[at]` on into the batch; return the position of the first that was not taken."""
        limits = self._store.limits
        while at < stop:
            if self._takes_usual and batch.new_topic is None:
                begin = at
                at = self._usual.read(
                    frames, origins, at, stop, batch.replies, batch.messages,
                    limits.surely_fits, limits.group_surely_fits,
                )  # fmt: skip
                self.accelerated += at - begin
                if at == stop:
                    return stop
            unusual = batch.open()
            if unusual.bytes > _BATCH_BYTES or not self._read_one(batch, unusual, frames[at], origins[at]):
                break
            self.not_accelerated += 1
            at += 1
            if unusual.is_closed:
                break
        return at

    def _read_one(self, batch: _Batch, unusual: _Unusual, frame: Frame, origin: Connection) -> bool:
        """Take one request into the batch; False when it has to wait until the batch is stored."""
        asked: Storing | Command | None = None
        try:
            command = decode_frame(frame)
            if not command.flag & RESPONSE_FLAG:
                asked = batch.new_topic or self._readers[command.code](command, origin)
                batch.new_topic = None
            if isinstance(asked, Storing):
                if asked.makes_topic and len(batch.replies):
                    batch.new_topic = asked
                    return False
                if asked.key in unusual.keys:
                    return False
                refusal = self._add(batch, unusual, command, asked)
                if refusal is None:
                    return True
                asked = asked.refused(command, refusal)
        except RemoteProtocolError as error:
            if len(batch.replies):  # the requests before this one are answered first
                return False
            origin.break_off(error)
            unusual.is_closed = True
            batch.replies.add_ready(code_of(frame), b"", 0, 0, False)
            return True
        except Exception as error:
            asked = error_reply(command, error)
        if asked is not None and asked.code != _OK:
            unusual.refused.append((command.code, asked.code))
        reply = b"" if asked is None or command.flag & ONEWAY_FLAG else encode(asked)
        batch.replies.add_ready(command.code, reply, 0, 0, False)
        return True

    def _add(self, batch: _Batch, unusual: _Unusual, command: Command, asked: Storing) -> Refusal | None:
        first = len(batch.messages)
        refusal = self._writer.add(batch.messages, asked.group)
        if refusal is not None:
            return refusal
        count = len(asked.group)
        unusual.requests[len(batch.replies)] = command, asked
        if asked.reply is None:
            batch.replies.add(
                command.serialize_type, command.code, command.opaque, command.flag, asked.queue_id, first, count,
                asked.waits,
            )  # fmt: skip
        else:
            reply = b"" if command.is_oneway else encode(asked.reply)
            batch.replies.add_ready(command.code, reply, first, count, asked.waits and bool(reply))
        for message in asked.group:
            unusual.bytes += len(message.body)
        if asked.recall_handle is not None and not command.is_oneway:
            unusual.handles.append(len(batch.replies) - 1)
        if asked.then is not None:
            unusual.then.append((first, count, asked.then))
        if asked.key is not None:
            unusual.keys.add(asked.key)
        unusual.is_closed = batch.is_new_topic = asked.makes_topic
        return None

    # --- afterwards ---------------------------------------------------------------------------------------------

    def _refuse(self, batch: _Batch, refusal: Refusal, frames: list[Frame]) -> None:
        """The store did not take all messages: their requests get an error."""
        stored = batch.messages.stored
        unusual = batch.open()
        for number in range(len(batch.replies)):
            _, code, _, _, first, count = batch.replies.request(number)
            if not count or first + count <= stored:
                continue
            command, asked = unusual.requests.pop(number, (None, None))
            if command is None:
                command = decode_frame(frames[number])
            reply = (asked.refused if asked is not None else self._reader.refused)(command, refusal)
            batch.replies.set_ready(number, b"" if command.is_oneway else encode(reply))
            unusual.refused.append((code, reply.code))

    def _tell_handles(self, batch: _Batch, code: int) -> None:
        """Let the replies to timer messages that are stored have their recall handles."""
        assert batch.unusual is not None
        places = batch.messages.places
        for number in batch.unusual.handles:
            found = batch.unusual.requests.get(number)
            first = batch.replies.request(number)[4]
            if found is None or first >= len(places):
                continue
            command, asked = found
            physical_offset, _, queue_offset = places[first]
            response = SendMessageResponse(
                msg_id=offset_message_id(self._reader.store_host, physical_offset),
                queue_id=asked.queue_id,
                queue_offset=queue_offset,
                recall_handle=asked.recall_handle,
                msg_region=self._known.region_id,
                trace_on=self._known.trace_on,
            )
            batch.replies.set_ready(number, encode(command.reply(code, header=response)))

    def _count(self, batch: _Batch, millis: float) -> None:
        statistics = self._statistics
        code = batch.replies.code
        refused = () if batch.unusual is None else batch.unusual.refused
        if code in _SENDS and not refused:
            statistics.sent_together(code, len(batch.replies), millis)
            if len(batch.messages) > len(batch.replies):
                self._count_batches(batch)
            return
        each = millis / len(batch.replies)
        counts: Mapping[int, int] = batch.replies.codes()
        if refused:
            for code, reply_code in refused:
                statistics.rpc(code, reply_code, each)
            counts = Counter(counts) - Counter([code for code, _ in refused])
        for code, requests in counts.items():
            if code in _SENDS:
                statistics.sent_together(code, requests, each * requests)
            else:
                statistics.rpc(code, _OK, each, requests)
        self._count_batches(batch)

    def _count_batches(self, batch: _Batch) -> None:
        for first, count in batch.replies.batches():
            self._statistics.put_as_one(batch.messages.states[first].topic, count)

    # --- answering ----------------------------------------------------------------------------------------------

    def _answer(self, batch: _Batch, origins: list[Connection]) -> None:
        if not batch.is_new_topic and not self._writer.makes_wait:
            frames, numbers = batch.replies.encode(self._accepted, batch.messages, ALL)
            send_replies(origins if numbers is None else [origins[number] for number in numbers], frames)
        elif batch.is_new_topic and self._register is not None:
            _begin_answering(origins)
            task = asyncio.ensure_future(self._answer_registered(batch, origins, self._register))
            task.add_done_callback(partial(_end_answering, origins))
        else:
            self._answer_stored(batch, origins)

    async def _answer_registered(
        self, batch: _Batch, origins: list[Connection], register: Callable[[], Awaitable[object]]
    ) -> None:
        """A client that reads the answer to a topic's first message may ask for its route at once.

        Name servers are not waited for any longer than _WAIT_FOR_NAMESRV_SECONDS: the message is stored without them,
        and its sender must not send it again.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_WAIT_FOR_NAMESRV_SECONDS):
                await register()
        self._answer_stored(batch, origins)

    def _answer_stored(self, batch: _Batch, origins: list[Connection]) -> None:
        """Requests that wait get their replies when the last message of the batch is safe, the others at once."""
        if not self._writer.makes_wait or not batch.messages.stored:
            self._send(batch, origins, self._accepted, ALL)
            return
        self._send(batch, origins, self._accepted, AT_ONCE)
        _begin_answering(origins)
        self._writer.tell_when_safe(batch.messages.end_offset, partial(self._safe, batch, origins))

    def _safe(self, batch: _Batch, origins: list[Connection], status: PutMessageStatus) -> None:
        _end_answering(origins)
        template = self._accepted
        try:
            if status is not PutMessageStatus.PUT_OK:
                template = self._template(int(STATUS_CODES[status]))
                if batch.unusual is not None:
                    self._tell_handles(batch, int(STATUS_CODES[status]))
                self._say_ends_are_late(batch, status)
            self._send(batch, origins, template, WHEN_SAFE)
        except Exception:  # whoever tells of safe messages must go on; without an answer their senders send again
            log.exception("messages were stored and cannot be acknowledged messages=%d", batch.messages.stored)

    @staticmethod
    def _say_ends_are_late(batch: _Batch, status: PutMessageStatus) -> None:
        """Answer ends of transactions with FLUSH_DISK_TIMEOUT if they are not on disk; slaves do not count for them."""
        if status is PutMessageStatus.FLUSH_DISK_TIMEOUT and batch.unusual is not None:
            for number, (command, asked) in batch.unusual.requests.items():
                if asked.reply is not None and asked.waits and not command.is_oneway:
                    batch.replies.set_ready(number, encode(command.reply(ResponseCode.FLUSH_DISK_TIMEOUT)))

    @staticmethod
    def _send(batch: _Batch, origins: list[Connection], template: SendReply, which: int) -> None:
        frames, numbers = batch.replies.encode(template, batch.messages, which)
        if frames:
            send_replies(origins if numbers is None else [origins[number] for number in numbers], frames)


def _begin_answering(origins: list[Connection]) -> None:
    for origin, requests in Counter(origins).items():
        origin.begin_answering(requests)


def _end_answering(origins: list[Connection], _: object = None) -> None:
    for origin, requests in Counter(origins).items():
        origin.end_answering(requests)
