from array import array
from collections.abc import Callable, Mapping, Sequence
from mmap import mmap
from typing import Generic, ParamSpec, TypeVar

from typing_extensions import Buffer

from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.producer.outgoing import Outgoing, OutgoingRules, Target
from downrange.client.producer.send_result import Expected
from downrange.client.producer.stored_reply import ResultTypes
from downrange.client.unique_id import IdMonth
from downrange.model.message import Message, MessageQueue
from downrange.protocol.bodies.plain_send import Stored
from downrange.protocol.framing import Frame
from downrange.store import run
from downrange.store.check.check_index import CheckedPlace
from downrange.store.index.key_index import IndexPlace
from downrange.store.queue.backlog import Backlog, Picked
from downrange.store.queue.property_filter import Condition
from downrange.store.queue.queues import QueueState
from downrange.transport.outstanding import Asked

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Each does what its twin in Python does, or returns None and has done nothing.

class Run(run.Run): ...

class TopicTable:
    def __len__(self) -> int: ...
    def forget(self, topic: str, /) -> None: ...
    def clear(self) -> None: ...

def cut_frames(data: bytes, max_length: int, max_header: int, /) -> tuple[list[Frame], int] | None: ...
def run_of(messages: list[run.PlainMessage], sends: list[run.Sent], code: int, /) -> Run | None: ...
def plain_run(
    frames: Sequence[Frame],
    at: int,
    topics: TopicTable,
    learn: Callable[[str], bytes | None],
    states_by_row: list[QueueState | None],
    fits: int,
    batch_fits: int,
    cluster: bytes,
    /,
) -> Run | None: ...
def append_run(
    run: run.Run,
    born_host: bytes | list[bytes],
    store_host: bytes,
    store_timestamp: int,
    memory: mmap | bytearray | None,
    at: int,
    limit: int,
    start: int,
    rows: array[int],
    /,
) -> int | None: ...
def put_entries(run: run.Run, rows: array[int], memory: bytearray, /) -> list[int] | None: ...
def index_keys(
    run: run.Run,
    memory: mmap | bytearray,
    slots: int,
    next_entry: int,
    limit: int,
    used_slots: int,
    seconds: int,
    end_offset: int,
    /,
) -> tuple[int, int, int] | None: ...
def replay_records(
    memory: mmap,
    at: int,
    limit: int,
    start: int,
    check_crc: bool,
    queues: Mapping[tuple[bytes, int], QueueState | None] | None,
    topics: TopicTable,
    states_by_row: list[QueueState | None],
    sizes: dict[tuple[str, int], list[int]] | None,
    watched: Mapping[tuple[str, int], object] | None,
    rows: array[int],
    entries: bytearray,
    index: IndexPlace | tuple[()] | None,
    indexed_up_to: int,
    /,
) -> tuple[int, int, int, int, int | None, list[tuple[str, int, int, bytes, int, int]], int, int, int, int] | None: ...
def check_records(
    memory: mmap,
    at: int,
    limit: int,
    start: int,
    queues: Mapping[tuple[bytes, int], int],
    topics: TopicTable,
    rows: array[int],
    blocks: bytearray,
    block_size: int,
    index: CheckedPlace | tuple[()] | None,
    last_timestamp: int,
    /,
) -> tuple[int, int, int, int, int, int | None, int] | None: ...
def encode_answers(
    json_pieces: tuple[bytes, ...], binary_pieces: tuple[bytes, ...], id_size: int, run: Stored, /
) -> bytes | None: ...
def encode_pull(
    pieces: tuple[bytes, ...], kind: int, opaque: int, numbers: tuple[int, int, int, int], backlog: Backlog, /
) -> tuple[bytes, int] | None: ...
def pick_by_tags(entries: bytes, codes: bytes, most: int, most_bytes: int, /) -> Picked | None: ...
def pick_by_properties(
    backlog: Backlog, most: int, names: tuple[tuple[str, bytes], ...], condition: Condition, /
) -> Picked | None: ...
def first_usual(step: Callable[_P, _R | None], python: Callable[_P, _R], /) -> Callable[_P, _R]: ...
def make_outgoing(
    message: Message, topic: str, stem: str, number: int, now: int, rules: OutgoingRules, /
) -> Outgoing | None: ...
def make_send(
    message: Message,
    topic: str,
    month: IdMonth,
    nanoseconds: int,
    rules: OutgoingRules,
    target: Target,
    opaque: int,
    /,
) -> tuple[Outgoing, bytes, Expected] | None: ...
def make_batch(
    messages: tuple[Message, ...],
    topic: str,
    wire_topic: str,
    stem: str,
    next_number: Callable[[], int],
    now: int,
    rules: OutgoingRules,
    /,
) -> tuple[Outgoing] | None: ...
def encode_send(
    pieces: tuple[bytes, ...],
    opaque: int,
    queue_id: int,
    sys_flag: int,
    born_timestamp: int,
    flag: int,
    properties: str,
    body: bytes,
    longest: int,
    /,
) -> bytes | None: ...
def take_stored_replies(frames: list[Frame], at: int, requests: dict[int, Asked], types: ResultTypes, /) -> int: ...
def read_pulled(
    data: bytes, queue: MessageQueue, topic: str, min_offset: int, max_offset: int, kind: type[ReceivedMessage], /
) -> list[ReceivedMessage] | None: ...
def walk_records(buffer: Buffer, /) -> bytes | None: ...
def split_properties(
    buffer: Buffer, starts: Buffer, stops: Buffer, names: tuple[bytes, ...], wants_map: bool, /
) -> (
    tuple[bool, tuple[tuple[bytes | None, bytes, bytes], ...], tuple[bytes, bytes, bytes, bytes, bytes] | None] | None
): ...

class Socket:
    host: bytes
    descriptor: int
    is_between_frames: bool
    is_full: bool

    def send(self, data: Buffer, /) -> int: ...

_S = TypeVar("_S", bound=Socket)

class Sockets(Generic[_S]):
    def __init__(self, max_length: int, max_header: int, /) -> None: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...
    def watch(self, socket: _S, events: int, /) -> None: ...
    def receive(self) -> tuple[list[Frame], list[_S], list[bytes], list[tuple[_S, bytes | int | None]]] | None: ...
    def receive_joined(self) -> tuple[bytes, list[_S], list[tuple[_S, bytes | int | None]]] | None: ...

def send_frames(sockets: list[_S], frames: Buffer, /) -> list[tuple[_S, bytes]]: ...
