"""The replies to pulls: a head with four numbers, and the records as they lie in the log."""

from __future__ import annotations

from downrange.compiled import accelerated
from downrange.protocol.bodies.pull_frames import Numbers, encode_head
from downrange.protocol.command import Buffer
from downrange.store.queue.backlog import Records, are_better_copied, pieces_of


@accelerated
def encode_pull(
    pieces: tuple[bytes, ...], kind: int, opaque: int, numbers: Numbers, records: Records, byte_count: int
) -> bytes | None:
    """The reply in one buffer, with a copy of records that have so many bytes; None when they are not to be copied.

    `pieces` are those of a `PullReply` for this kind of header. Python does not copy them here: `encode_parts` decides.
    """
    return None


def encode_parts(
    pieces: tuple[bytes, ...], kind: int, opaque: int, numbers: Numbers, records: Records, byte_count: int
) -> list[Buffer]:
    """The reply as buffers, with records as they lie in the log, unless they are small and lie apart."""
    head = encode_head(pieces, kind, opaque, numbers, byte_count)
    if not byte_count:
        return [head]
    found = pieces_of(records, byte_count)
    return [b"".join((head, *found))] if are_better_copied(found, byte_count) else [head, *found]
