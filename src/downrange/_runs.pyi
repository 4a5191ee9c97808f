from array import array
from collections.abc import Mapping, Sequence
from mmap import mmap

from typing_extensions import Buffer

from downrange.broker.message_writer import PlainRun
from downrange.protocol.bodies.plain_send import Sent
from downrange.protocol.framing import Frame
from downrange.store.commit_log import Place
from downrange.store.message_reader import Backlog
from downrange.store.queues import PlainMessage, QueueState

# Each does what its twin in Python does, or returns None and has done nothing.

def cut_frames(data: bytes, max_length: int, max_header: int, /) -> tuple[list[Frame], int] | None: ...
def plain_run(
    frames: Sequence[Frame],
    at: int,
    write_queues: Mapping[str, int],
    queues_of: Mapping[str, Sequence[QueueState | None]],
    fits: int,
    batch_fits: int,
    cluster: bytes,
    /,
) -> PlainRun | None: ...
def append_run(
    messages: Sequence[PlainMessage],
    born_host: bytes,
    store_host: bytes,
    store_timestamp: int,
    memory: mmap | bytearray | None,
    at: int,
    limit: int,
    start: int,
    rows: array[int],
    /,
) -> list[Place] | None: ...
def put_entries(
    messages: Sequence[PlainMessage], places: Sequence[Place], rows: array[int], memory: bytearray, /
) -> list[QueueState] | None: ...
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
def encode_answers(
    json_pieces: tuple[bytes, ...],
    binary_pieces: tuple[bytes, ...],
    id_size: int,
    sends: Sequence[Sent],
    places: Sequence[Place],
    /,
) -> bytes | None: ...
def encode_pull(
    pieces: tuple[bytes, ...], kind: int, opaque: int, numbers: tuple[int, int, int, int], backlog: Backlog, /
) -> tuple[bytes, int] | None: ...
def walk_records(buffer: Buffer, /) -> bytes | None: ...
def split_properties(
    buffer: Buffer, starts: Buffer, stops: Buffer, names: tuple[bytes, ...], wants_map: bool, /
) -> (
    tuple[bool, tuple[tuple[bytes | None, bytes, bytes], ...], tuple[bytes, bytes, bytes, bytes, bytes] | None] | None
): ...
