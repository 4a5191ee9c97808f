from collections.abc import Iterable, Sequence
from mmap import mmap

from downrange.protocol.bodies.plain_send import Answer, PlainSend
from downrange.protocol.framing import Frame
from downrange.store.commit_log import Place
from downrange.store.queues import PlainMessage, QueueState

# Each does what its twin in Python does, or returns None and has done nothing.

def parse_send(frame: Frame, /) -> PlainSend | None: ...
def append_run(
    messages: Sequence[PlainMessage],
    born_host: bytes,
    store_host: bytes,
    store_timestamp: int,
    memory: mmap | bytearray | None,
    at: int,
    limit: int,
    start: int,
    /,
) -> list[Place] | None: ...
def queue_entries(
    messages: Sequence[PlainMessage], places: Sequence[Place], /
) -> list[tuple[QueueState, int, bytes]] | None: ...
def index_keys(
    messages: Sequence[PlainMessage],
    places: Sequence[Place],
    memory: mmap | bytearray,
    slots: int,
    next_entry: int,
    limit: int,
    used_slots: int,
    seconds: int,
    end_offset: int,
    /,
) -> tuple[int, int, int] | None: ...
def encode_replies(
    json_pieces: tuple[bytes, ...], binary_pieces: tuple[bytes, ...], answers: Iterable[Answer], /
) -> bytes | None: ...
