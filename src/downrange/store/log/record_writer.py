"""From messages to records in a mapped file of the log; the layout is that of `model/record.py`."""

from __future__ import annotations

import mmap
from array import array
from bisect import bisect_right
from itertools import islice
from zlib import crc32

from downrange.compiled import accelerated
from downrange.model.message import PhysicalOffset
from downrange.model.record import CRC_MASK, HEADS, MAGIC_V1
from downrange.store.config import BLANK_SIZE
from downrange.store.new_messages import NewMessages, Place

_NOT_IN_A_QUEUE = 4  # the bit of sysFlag that prepared and rolled-back messages have: they get no queue offset


@accelerated
def write_records(
    messages: NewMessages,
    number: int,
    memory: mmap.mmap | bytearray | None,
    at: int,
    limit: int,
    start: PhysicalOffset,
    store_timestamp: int,
    rows: array[int],
) -> tuple[int, int]:
    """Write records from message `number` on at position `at`, as many whole groups as end before `limit`.

    Return the number of the first message that was not written, and the position behind the last record. `start` is the
    offset of the file in the log, `rows` has the next offsets of all queues (`QueueTails`). The head of the first
    record is written last: until then the place reads as zeros, so that a process that dies here leaves no half record
    and a process that reads the files never sees one.
    """
    physical_offset = start + at
    end, stop = at, number
    pieces: list[bytes] = []
    written: list[Place] = []
    groups, all_messages, states = messages.group_ends, messages.messages, messages.states
    for group_end in islice(groups, bisect_right(groups, number), None):
        for message, state in zip(all_messages[stop:group_end], states[stop:group_end], strict=True):
            body, properties, sys_flag, topic = message.body, message.properties, message.sys_flag, state.topic_field
            head, host_flags = HEADS[len(message.born_host), len(message.store_host)]
            size = head.size + 2 + len(body) + len(topic) + len(properties)
            queue_offset = 0
            if not sys_flag & _NOT_IN_A_QUEUE:
                queue_offset = rows[state.row]
                rows[state.row] = queue_offset + 1
            pieces += (
                head.pack(
                    size, MAGIC_V1, crc32(body) & CRC_MASK, state.queue_id, message.flag, queue_offset, physical_offset,
                    sys_flag & ~48 | host_flags, message.born_timestamp, message.born_host, store_timestamp,
                    message.store_host, message.reconsume_times, message.prepared_transaction_offset, len(body),
                ),
                body,
                topic,
                len(properties).to_bytes(2, "big"),
                properties,
            )  # fmt: skip
            written.append((physical_offset, size, queue_offset))  # type: ignore[arg-type]  # NewTypes cost a call
            physical_offset += size
        if physical_offset - start > limit:  # the group gives its places back
            for message, state in zip(all_messages[stop:group_end], states[stop:group_end], strict=True):
                if not message.sys_flag & _NOT_IN_A_QUEUE:
                    rows[state.row] -= 1
            del written[stop - number :], pieces[5 * (stop - number) :]
            break
        end, stop = physical_offset - start, group_end
    if written:
        assert memory is not None  # a file that takes appends is mapped
        data = b"".join(pieces)
        memory[at + BLANK_SIZE : end] = memoryview(data)[BLANK_SIZE:]
        memory[at : at + BLANK_SIZE] = data[:BLANK_SIZE]
        messages.place(written, store_timestamp)
    return stop, end
