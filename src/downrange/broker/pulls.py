"""Pulls, request 11, and 361 of 5.x lite consumers: check, read, commit, answer or wait. [PullMessageProcessor]"""

from __future__ import annotations

import logging
from functools import cache, partial
from time import perf_counter
from typing import Final

from downrange.broker.delayed import stored_text
from downrange.broker.filtering import MessageFilter
from downrange.broker.groups import CommittedOffsets
from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import MessageWriter
from downrange.broker.pull_checks import PullChecks
from downrange.broker.pull_reply import encode_parts, encode_pull
from downrange.broker.waiting_pulls import WaitingPull, WaitingPulls
from downrange.model import properties as names
from downrange.model.message import MessageQueue, TopicQueue
from downrange.model.message_id import pack_host
from downrange.model.topics import OFFSET_MOVED_TOPIC, SubscriptionGroupConfig
from downrange.protocol.bodies.body import encode_body
from downrange.protocol.bodies.pull import OffsetMovedEvent, PullMessageRequest, PullSysFlag
from downrange.protocol.bodies.pull_frames import Numbers, PullReply, parse_pull
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import ONEWAY_FLAG, RESPONSE_FLAG, Buffer, Command
from downrange.protocol.errors import BrokerError, RemoteProtocolError, SystemBusy
from downrange.protocol.framing import Frame, decode_frame
from downrange.store.config import BrokerRole
from downrange.store.message_store import MessageStore
from downrange.store.new_message import NewMessage
from downrange.store.read_result import GetMessageStatus, ReadResult
from downrange.transport.connection import Connection
from downrange.transport.serving import encode_reply, error_reply

log = logging.getLogger(__name__)

# Plain numbers: every pull goes through here.
_PULL: Final = int(RequestCode.PULL_MESSAGE)
_SUCCESS: Final = int(ResponseCode.SUCCESS)
_NOT_FOUND: Final = int(ResponseCode.PULL_NOT_FOUND)
_RETRY: Final = int(ResponseCode.PULL_RETRY_IMMEDIATELY)
_MOVED: Final = int(ResponseCode.PULL_OFFSET_MOVED)
_COMMIT: Final = int(PullSysFlag.COMMIT_OFFSET)
_SUSPEND: Final = int(PullSysFlag.SUSPEND)
_SLAVE: Final = BrokerRole.SLAVE

# With these a pull got past something; with any other its offset lies outside the queue.
_SCANNED: Final = (GetMessageStatus.MESSAGE_WAS_REMOVING, GetMessageStatus.NO_MATCHED_MESSAGE)
# RocketMQ's slaves answer at once that the consumer should come again at once; it does, hundreds of times a second.
_OUT_OF_REACH_SECONDS: Final = 1.0

_CODES: Final = {
    GetMessageStatus.MESSAGE_WAS_REMOVING: _RETRY,
    GetMessageStatus.NO_MATCHED_MESSAGE: _RETRY,
    GetMessageStatus.OFFSET_FOUND_NULL: _NOT_FOUND,
    GetMessageStatus.OFFSET_OVERFLOW_ONE: _NOT_FOUND,
    GetMessageStatus.OFFSET_OVERFLOW_BADLY: _MOVED,
    GetMessageStatus.OFFSET_TOO_SMALL: _MOVED,
}
_reply_of = cache(PullReply)
_FOUND: Final = PullReply(_SUCCESS, GetMessageStatus.FOUND.value)

# The request code and the code of an answer, and its frame; no frame when the peer wants none.
_Answer = tuple[int, int, list[Buffer]]


class Pulls:
    """Hands messages to consumers."""

    codes: Final = frozenset((_PULL, int(RequestCode.LITE_PULL_MESSAGE)))

    def __init__(
        self,
        config: LiveConfig,
        checks: PullChecks,
        offsets: CommittedOffsets,
        store: MessageStore,
        waiting: WaitingPulls,
        writer: MessageWriter,
    ) -> None:
        self._config = config
        self._checks = checks
        self._offsets = offsets
        self._store = store
        self._waiting = waiting
        self._writer = writer
        self._statistics = writer.statistics
        self.accelerated = self.not_accelerated = 0
        """How many replies the compiled step has made, and how many were made in Python."""

    def take(self, frames: list[Frame], origins: list[Connection], at: int, stop: int) -> None:
        """Answer the pulls in `frames[at:stop]`, of which `frames[n]` came over `origins[n]`; all were admitted."""
        start = perf_counter()
        found = 0
        others: list[tuple[int, int]] = []
        replied: dict[Connection, None] = {}
        for number in range(at, stop):
            frame, origin = frames[number], origins[number]
            if origin.is_full:
                origin.defer(frame)
                continue
            try:
                answer = self._answer(frame, origin)
            except RemoteProtocolError as error:
                origin.break_off(error)
                continue
            except Exception as error:
                parts = _error_reply(frame, error)
            else:
                if answer is None:
                    continue
                request_code, code, parts = answer
                if request_code == _PULL and code == _SUCCESS:
                    found += 1
                else:
                    others.append((request_code, code))
            if parts:
                origin.reply_parts(parts)
                replied[origin] = None
        if found or others:
            self._count(found, others, (perf_counter() - start) * 1000)
        for origin in replied:
            origin.flush()

    def _count(self, found: int, others: list[tuple[int, int]], millis: float) -> None:
        """Count answered pulls; each took its share of the time."""
        each = millis / (found + len(others))
        if found:
            self._statistics.pulled_together(found, each * found)
        for request_code, code in others:
            self._statistics.rpc(request_code, code, each)
            self._statistics.get_latency(each)

    def _answer(self, frame: Frame, origin: Connection) -> _Answer | None:
        """The answer to one pull; None when it comes later, or never. Raises what `error_reply` is for."""
        parsed = parse_pull(frame)
        if parsed is not None:
            request_code = _PULL
            opaque, flag, request, offset, commit_offset = parsed
            if flag & RESPONSE_FLAG:
                return None
        else:
            command = decode_frame(frame)
            request_code, opaque, flag = command.code, command.opaque, command.flag
            if flag & RESPONSE_FLAG:
                return None
            request = command.header(PullMessageRequest)
            offset, commit_offset = request.queue_offset, request.commit_offset
        try:
            group, wanted = self._checks.agreed(request, origin.peer)
        except BrokerError as error:
            refusal = Command(error.code, opaque, RESPONSE_FLAG, {}, remark=error.remark, serialize_type=frame[0])
            return request_code, error.code, [] if flag & ONEWAY_FLAG else encode_reply(refusal)
        read, code, numbers = self._read(request, offset, group, wanted)
        sys_flag = request.sys_flag
        waits = code != _SUCCESS and sys_flag & _SUSPEND and _may_wait(code, read.status)
        if waits and origin.is_overloaded:
            raise SystemBusy("[OVERLOAD]system busy, start flow control for a while")
        if sys_flag & _COMMIT and self._config.store.broker_role is not _SLAVE:
            self._offsets.commit(request.topic, request.consumer_group, request.queue_id, commit_offset)
        if waits:
            again = partial(self._read_again, frame, opaque, flag, request, offset, group, wanted)
            pull = WaitingPull(TopicQueue(request.topic, request.queue_id), offset, wanted, origin, again)
            self._waiting.add(pull, self._wait_seconds(request, code))
            return None
        return request_code, code, [] if flag & ONEWAY_FLAG else self._encode(frame[0], opaque, code, numbers, read)

    def _read_again(
        self,
        frame: Frame,
        opaque: int,
        flag: int,
        request: PullMessageRequest,
        offset: int,
        group: SubscriptionGroupConfig,
        wanted: MessageFilter,
    ) -> list[Buffer]:
        """The reply to a pull that has waited, as things are now."""
        try:
            read, code, numbers = self._read(request, offset, group, wanted)
            return [] if flag & ONEWAY_FLAG else self._encode(frame[0], opaque, code, numbers, read)
        except Exception as error:
            return _error_reply(frame, error)

    def _read(
        self, request: PullMessageRequest, offset: int, group: SubscriptionGroupConfig, wanted: MessageFilter
    ) -> tuple[ReadResult, int, Numbers]:
        """The messages that a pull gets, the code of its reply and its numbers. Counts the pull."""
        broker = self._config.broker
        read = self._store.read(
            request.topic,
            request.queue_id,
            offset,
            request.max_msg_nums,
            matches=wanted.matches_entry,
            matches_record=wanted.matches_record,
            bulk_bytes=broker.max_transfer_bytes_on_bulk_pull if request.bulk else 0,
        )
        suggested = 0
        if broker.slave_read_enable:
            # A group that is slow reads messages that are no longer in our memory.
            is_slow = read.suggest_pulling_from_slave
            suggested = group.which_broker_when_consume_slowly if is_slow else group.broker_id
        next_offset: int = read.next_begin_offset
        if read.byte_count:
            code = _SUCCESS
            self._statistics.got(request.topic, request.consumer_group, read.message_count, read.byte_count)
        else:
            # A status without a code is that of an empty or unknown queue.
            code = _CODES.get(read.status, _MOVED if offset else _NOT_FOUND)
            self._statistics.get_missed()
            if code == _MOVED:
                store = self._config.store
                if store.broker_role is _SLAVE and not store.offset_check_in_slave:
                    code, suggested, next_offset = _RETRY, group.broker_id, offset  # its master knows better
                else:
                    self._note_moved(request, offset, next_offset)
        return read, code, (suggested, next_offset, read.min_offset, read.max_offset)

    def _encode(self, kind: int, opaque: int, code: int, numbers: Numbers, read: ReadResult) -> list[Buffer]:
        reply = _FOUND if code == _SUCCESS else _reply_of(code, read.status.value)
        pieces, records, byte_count = reply.pieces[kind], read.records, read.byte_count
        frame = encode_pull(pieces, kind, opaque, numbers, records, byte_count)
        if frame is not None:
            self.accelerated += 1
            return [frame]
        self.not_accelerated += 1
        return encode_parts(pieces, kind, opaque, numbers, records, byte_count)

    def _wait_seconds(self, request: PullMessageRequest, code: int) -> float:
        """How long a pull waits that may."""
        broker = self._config.broker
        millis = request.suspend_timeout_millis if broker.long_polling_enable else broker.short_polling_time_mills
        seconds = max(0, millis) / 1000
        return seconds if code == _NOT_FOUND else min(seconds, _OUT_OF_REACH_SECONDS)

    def _note_moved(self, request: PullMessageRequest, offset: int, next_offset: int) -> None:
        """Keep a note that an offset lay outside of its queue, as a message that operators can read."""
        broker = self._config.broker
        event = OffsetMovedEvent(
            consumer_group=request.consumer_group,
            message_queue=MessageQueue(request.topic, broker.broker_name, request.queue_id),
            offset_new=next_offset,
            offset_request=offset,
        )
        host = pack_host(broker.broker_ip1, broker.listen_port)
        properties = {names.TAGS: request.consumer_group, names.KEYS: request.consumer_group}
        self._writer.append_one(
            NewMessage(
                topic=OFFSET_MOVED_TOPIC,
                queue_id=0,
                body=encode_body(event),
                properties=stored_text(properties),
                born_timestamp=self._writer.now(),
                born_host=host,
                store_host=host,
            )
        )


def _may_wait(code: int, status: GetMessageStatus) -> bool:
    """Whether a read found nothing new, or was made on a slave that may lag behind."""
    return code == _NOT_FOUND or (code == _RETRY and status not in _SCANNED)


def _error_reply(frame: Frame, error: Exception) -> list[Buffer]:
    """The reply to a pull that failed; nothing when its peer wants none."""
    command = decode_frame(frame)
    reply = error_reply(command, error)
    return [] if command.is_oneway else encode_reply(reply)
