"""Checks that the master's log continues ours, with requests that every broker answers, before a slave follows it.

The replication stream has no checksums: a slave that appended to bytes that its master lost, or to bytes of another
broker, would have a log that no broker ever wrote.
"""

from __future__ import annotations

import logging

from downrange.broker.replication.errors import LogsDiffer, ReplicationError, SlaveAhead, SlaveTooFarBehind
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.kv_config import KVTable
from downrange.protocol.bodies.query import ViewMessageRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request
from downrange.store.message_store import MessageStore
from downrange.transport.pool import Pool

log = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 3.0


async def check_lineage(store: MessageStore, pool: Pool, master: str) -> None:
    """Raise a ReplicationError if this log cannot follow the log of the broker at `master`."""
    end = store.max_offset
    if not end:
        return
    reply = await pool.request(master, request(RequestCode.GET_BROKER_RUNTIME_INFO), _TIMEOUT_SECONDS)
    if reply.code != 0:
        log.warning("cannot compare logs, following without a check master=%s reason=%s", master, reply.remark)
        return
    table = decode_body(KVTable, reply.body_bytes).table
    try:
        lowest, highest = int(table["commitLogMinOffset"]), int(table["commitLogMaxOffset"])
    except (KeyError, ValueError):
        raise ReplicationError(f"the broker at {master} does not say where its log begins and ends") from None
    if end > highest:
        raise SlaveAhead(
            f"this slave's log ends at {end}, that of its master {master} at {highest}: the master lost what this "
            "slave has. Stop one of the two and decide which log is right; nothing was overwritten"
        )
    if end < lowest:
        raise SlaveTooFarBehind(
            f"this slave's log ends at {end}, that of its master {master} begins at {lowest}: give this slave an empty "
            "directory, or a copy of its master's"
        )
    await _compare_newest(store, pool, master, lowest)


async def _compare_newest(store: MessageStore, pool: Pool, master: str, lowest: int) -> None:
    newest = newest_record(store)
    if newest is None or newest[0] < lowest:
        return
    offset, ours = newest
    command = request(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageRequest(offset=offset))
    reply = await pool.request(master, command, _TIMEOUT_SECONDS)
    if reply.code != 0 or reply.body_bytes != ours:
        raise LogsDiffer(
            f"at {offset}, this slave's last message, its master {master} has another one: their logs went different "
            "ways. Give this slave an empty directory, or a copy of its master's; nothing was overwritten"
        )


def newest_record(store: MessageStore) -> tuple[int, bytes] | None:
    """Offset and bytes of the last record that has a queue entry."""
    newest = store.queues.newest()
    if newest is None:
        return None
    entries = store.entries(newest.topic, newest.queue_id, newest.queue.max_offset - 1, 1)
    record = store.record_at(entries[0].physical_offset) if entries else None
    return None if record is None else (entries[0].physical_offset, bytes(record))
