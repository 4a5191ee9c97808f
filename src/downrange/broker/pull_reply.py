"""The replies to pulls: a head with four numbers, and the records as they lie in the log."""

from __future__ import annotations

from downrange.compiled import accelerated_if_usual
from downrange.protocol.bodies.pull_frames import Numbers, encode_head
from downrange.protocol.command import Buffer
from downrange.store.queue.backlog import Records, are_better_copied, pieces_of


@accelerated_if_usual
def encode_pull(
    pieces: tuple[bytes, ...], kind: int, opaque: int, numbers: Numbers, records: Records, byte_count: int
) -> bytes | list[Buffer]:
    """The whole reply, whose records have so many bytes, as buffers; in one piece from the compiled step.

    `pieces` are those of a `PullReply` for this kind of header.
    """
    head = encode_head(pieces, kind, opaque, numbers, byte_count)
    if not byte_count:
        return [head]
    found = pieces_of(records, byte_count)
    return [b"".join((head, *found))] if are_better_copied(found, byte_count) else [head, *found]
