"""Single messages: by offset in the log, by key, and as entries of a consume queue."""

from __future__ import annotations

from typing import Final

from downrange.broker.clients import Consumers
from downrange.broker.filtering import tag_filter
from downrange.broker.routes import RouteTable
from downrange.broker.stored_topics import named_record
from downrange.protocol.bodies.body import encode_body
from downrange.protocol.bodies.query import (
    ConsumeQueueData,
    ConsumeQueueEntries,
    QueryConsumeQueueRequest,
    QueryMessageRequest,
    QueryMessageResponse,
    ViewMessageRequest,
)
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError
from downrange.store.message_store import MessageStore
from downrange.transport.connection import Connection

# A whole file of entries would not fit a frame, and encoding it would delay all other requests.
MAX_ENTRIES: Final = 1000


class QueryHandlers:
    """Requests for single stored messages."""

    def __init__(self, store: MessageStore, consumers: Consumers) -> None:
        self._store = store
        self._consumers = consumers

    @property
    def routes(self) -> RouteTable:
        return {
            RequestCode.VIEW_MESSAGE_BY_ID: self.view,
            RequestCode.QUERY_MESSAGE: self.query,
            RequestCode.QUERY_CONSUME_QUEUE: self.query_consume_queue,
        }

    def view(self, command: Command, connection: Connection) -> Command:
        """Request 33: the record at an offset of the log."""
        return command.reply(body=record_at(self._store, command.header(ViewMessageRequest).offset))

    def query(self, command: Command, connection: Connection) -> Command:
        """Request 12: records by key. The index has only hashes of topic and key; the client compares the keys."""
        header = command.header(QueryMessageRequest)
        wanted = self._store.config.default_query_max_num if header.unique_key_query else header.max_num
        found = self._store.query(header.topic, header.key, wanted, header.begin_timestamp, header.end_timestamp)
        if not found.slices:
            return command.reply(
                ResponseCode.QUERY_NOT_FOUND,
                "can not find message, maybe time range not correct",
                header=QueryMessageResponse(index_last_update_timestamp=0, index_last_update_phyoffset=0),
            )
        return command.reply(
            header=QueryMessageResponse(
                index_last_update_timestamp=found.index_last_update_timestamp,
                index_last_update_phyoffset=found.index_last_update_physical_offset,
            ),
            body=found.slices,
        )

    def query_consume_queue(self, command: Command, connection: Connection) -> Command:
        """Request 321: entries of a queue; if a group is named, with the result of its filter for each."""
        header = command.header(QueryConsumeQueueRequest)
        place = f"{header.queue_id}@{header.topic}"
        if self._store.queues.get(header.topic, header.queue_id) is None:
            raise BrokerError(f"{place} is not exist!")
        entries = self._store.entries(header.topic, header.queue_id, header.index, min(header.count, MAX_ENTRIES))
        if not entries:
            raise BrokerError(f"Index {header.index} of {place} is not exist!")
        group = header.consumer_group
        subscription = self._consumers.subscription(group, header.topic) if group else None
        matches = tag_filter(subscription).matches_entry if subscription else None
        body = ConsumeQueueEntries(
            min_queue_index=self._store.min_offset_of(header.topic, header.queue_id),
            max_queue_index=self._store.max_offset_of(header.topic, header.queue_id),
            queue_data=tuple(
                ConsumeQueueData(
                    physic_offset=entry.physical_offset,
                    physic_size=entry.size,
                    tags_code=entry.tags_code,
                    eval=subscription is not None and (matches is None or matches(entry.tags_code, None)),
                )
                for entry in entries
            ),
            subscription_data=subscription,
            filter_data=f"{group}@{header.topic} is not online!" if group and subscription is None else None,
        )
        return command.reply(body=encode_body(body))


def record_at(store: MessageStore, offset: int) -> memoryview:
    """The record that begins at this offset of the log; raises BrokerError when none does."""
    found = named_record(store, offset)
    if found is None:
        raise BrokerError(f"can not find message by the offset, {offset}")
    return found[0]
