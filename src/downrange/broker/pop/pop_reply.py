"""The replies to pops: a head with numbers and texts, and the records as they lie in the log."""

from __future__ import annotations

from downrange.broker.pop.popped import Popped, PoppedQueue
from downrange.compiled import accelerated
from downrange.protocol.bodies.pop import PopMessageResponse, offset_list, order_count_info
from downrange.protocol.bodies.pop_frames import FOUND_PIECES, found_head
from downrange.protocol.command import Buffer


@accelerated
def encode_pops(pieces: tuple[bytes, ...], pops: list[Popped], opaques: list[int]) -> bytes | None:
    """The replies to pops that have found messages, in one buffer with copies of their records; None when these are not
    to be copied.

    `pieces` are `FOUND_PIECES`. Python does not copy records here: `encode_found` decides.
    """
    return None


def encode_found(popped: Popped, opaque: int) -> list[Buffer]:
    """The reply to a pop without order as buffers."""
    frame = encode_pops(FOUND_PIECES, [popped], [opaque])
    if frame is not None:
        return [frame]
    records, queues = popped.records(), popped.queues
    starts, offsets = offset_infos(queues)
    numbers = popped.pop_time, popped.request.invisible_millis, popped.revive_queue, popped.rest
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
