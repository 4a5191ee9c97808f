"""Offsets that groups committed (requests 14, 15, 43), and offset ranges of queues (29, 30, 31, 32)."""

from __future__ import annotations

from downrange.broker.groups import CommittedOffsets
from downrange.broker.routes import RouteTable
from downrange.model.errors import MessageError
from downrange.protocol.bodies.body import encode_body
from downrange.protocol.bodies.offsets import (
    EarliestStoreTimeResponse,
    GetMaxOffsetRequest,
    OffsetResponse,
    QueryConsumerOffsetRequest,
    QueueRequest,
    SearchOffsetRequest,
    UpdateConsumerOffsetRequest,
)
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.store.message_store import MessageStore
from downrange.transport.connection import Connection

NOT_FOUND = "Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first"


class OffsetHandlers:
    """Answers questions about offsets, and takes commits: from any client, for any topic, also on a slave."""

    def __init__(self, store: MessageStore, offsets: CommittedOffsets) -> None:
        self._store = store
        self._offsets = offsets

    @property
    def routes(self) -> RouteTable:
        return {
            RequestCode.QUERY_CONSUMER_OFFSET: self.query,
            RequestCode.UPDATE_CONSUMER_OFFSET: self.commit,
            RequestCode.GET_ALL_CONSUMER_OFFSET: self.all_committed,
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: self.search,
            RequestCode.GET_MAX_OFFSET: self.max_offset,
            RequestCode.GET_MIN_OFFSET: self.min_offset,
            RequestCode.GET_EARLIEST_MSG_STORETIME: self.earliest_store_time,
        }

    # --- committed ----------------------------------------------------------------------------------------------

    def query(self, command: Command, connection: Connection) -> Command:
        header = command.header(QueryConsumerOffsetRequest)
        offset = self._offsets.get(header.topic, header.consumer_group, header.queue_id)
        if offset is None or offset < 0:
            if header.set_zero_if_not_found is False or not self._is_young(header.topic, header.queue_id):
                return command.reply(ResponseCode.QUERY_NOT_FOUND, NOT_FOUND, ext_fields={})
            offset = 0
        return command.reply(header=OffsetResponse(offset))

    def _is_young(self, topic: str, queue_id: int) -> bool:
        """Whether the queue's first message is there and still in memory: then every new group begins with it."""
        store = self._store
        return store.min_offset_of(topic, queue_id) <= 0 and not store.is_beyond_memory(topic, queue_id, 0)

    def commit(self, command: Command, connection: Connection) -> Command:
        header = command.header(UpdateConsumerOffsetRequest)
        for name in (header.topic, header.consumer_group):
            if "@" in name:  # the file joins topic and group with '@': this name would be read back as two
                raise MessageError(f"{name!r} is neither a topic nor a group: '@' is not allowed in names")
        self._offsets.commit(header.topic, header.consumer_group, header.queue_id, header.commit_offset)
        return command.reply(ext_fields={})

    def all_committed(self, command: Command, connection: Connection) -> Command:
        return command.reply(body=encode_body(self._offsets.table()))

    # --- of queues ----------------------------------------------------------------------------------------------

    def search(self, command: Command, connection: Connection) -> Command:
        header = command.header(SearchOffsetRequest)
        offset = self._store.offset_by_time(header.topic, header.queue_id, header.timestamp)
        return command.reply(header=OffsetResponse(offset))

    def max_offset(self, command: Command, connection: Connection) -> Command:
        header = command.header(GetMaxOffsetRequest)
        return command.reply(header=OffsetResponse(self._store.max_offset_of(header.topic, header.queue_id)))

    def min_offset(self, command: Command, connection: Connection) -> Command:
        header = command.header(QueueRequest)
        return command.reply(header=OffsetResponse(self._store.min_offset_of(header.topic, header.queue_id)))

    def earliest_store_time(self, command: Command, connection: Connection) -> Command:
        header = command.header(QueueRequest)
        timestamp = self._store.earliest_store_time_of(header.topic, header.queue_id)
        return command.reply(header=EarliestStoreTimeResponse(timestamp))
