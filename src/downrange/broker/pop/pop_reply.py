"""The replies to pops: a head with numbers and texts, and the records as they lie in the log."""

from __future__ import annotations

from downrange.broker.pop.popped import Popped, PoppedQueue
from downrange.compiled import accelerated
from downrange.protocol.bodies.pop import PopMessageResponse, offset_list, order_count_info
from downrange.protocol.bodies.pop_frames import FOUND_PIECES, found_head
from downrange.protocol.command import Buffer

Numbers = tuple[int, int, int, int]
"""Pop time, invisible time, revive queue, and how many messages are left."""


@accelerated
def encode_popped(
    pieces: tuple[bytes, ...], numbers: Numbers, opaque: int, queues: list[PoppedQueue], byte_count: int
) -> bytes | None:
    """The reply in one buffer, with a copy of records that have so many bytes; None when they are not to be copied.

    `pieces` are `FOUND_PIECES`. Python does not copy records here: `encode_found` decides.
    """
    return None


def encode_found(popped: Popped, opaque: int) -> list[Buffer]:
    """The reply to a pop without order as buffers."""
    queues, size = popped.queues, 0
    for queue in queues:
        size += queue.byte_count
    numbers = popped.pop_time, popped.request.invisible_millis, popped.revive_queue, popped.rest
    frame = encode_popped(FOUND_PIECES, numbers, opaque, queues, size)
    if frame is not None:
        return [frame]
    records = popped.records()
    starts, offsets = offset_infos(queues)
    return [found_head(numbers, starts, offsets, opaque, sum(map(len, records))), *records]


def offset_infos(queues: list[PoppedQueue]) -> tuple[bytes, bytes]:
    """startOffsetInfo and msgOffsetInfo."""
    starts = b";".join([b"%d %d %d" % (one.retry_flag, one.queue_id, one.start_offset) for one in queues])
    lists = [b"%d %d %b" % (one.retry_flag, one.queue_id, offset_list(one.start_offset, one.bits)) for one in queues]
    return starts, b";".join(lists)


def pop_response(popped: Popped) -> PopMessageResponse:
    """The header of any answer to a pop that was carried out."""
    starts, offsets = offset_infos(popped.queues)
    counts = None
    if popped.request.is_orderly:
        counts = ";".join(
            [order_count_info(one.queue_id, zip(one.offsets, one.counts or (), strict=True)) for one in popped.queues]
        )
    return PopMessageResponse(
        pop_time=popped.pop_time,
        invisible_time=popped.request.invisible_millis,
        revive_qid=popped.revive_queue,
        rest_num=popped.rest,
        start_offset_info=starts.decode(),
        msg_offset_info=offsets.decode(),
        order_count_info=counts,
    )
