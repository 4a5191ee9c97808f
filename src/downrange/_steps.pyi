from array import array
from collections.abc import Callable
from mmap import mmap
from typing import Any, Generic, ParamSpec, TypeVar

from typing_extensions import Buffer

from downrange.broker.due_messages import LogFile, Tick
from downrange.broker.handlers import usual_sends
from downrange.broker.pop.leases import Due, InFlight, Lease, Table
from downrange.broker.pop.popped import Popped
from downrange.broker.pop.records import AllTexts, Places
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.producer.outgoing import Outgoing, OutgoingRules, Target
from downrange.client.producer.send_result import Expected
from downrange.client.producer.stored_reply import ResultTypes
from downrange.client.unique_id import IdMonth
from downrange.model.message import Message, MessageQueue
from downrange.model.sql.condition import Condition
from downrange.protocol.bodies import send_replies
from downrange.protocol.bodies.pop_frames import AckGroup
from downrange.protocol.framing import Frame
from downrange.store import new_messages
from downrange.store.queue.backlog import Backlog, Picked, Records
from downrange.store.queue.queues import ConsumeQueues, QueueState
from downrange.store.timer.timed_records import Timed
from downrange.transport.outstanding import Asked

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Each does what its twin in Python does, or returns None and has done nothing.

VERSION: int
RECORD_LAYOUT: dict[str, int]

class NewMessages(new_messages.NewMessages): ...
class SendReplies(send_replies.SendReplies): ...
class UsualSends(usual_sends.UsualSends): ...

class TopicTable:
    def __len__(self) -> int: ...
    def forget(self, topic: str, /) -> None: ...
    def clear(self) -> None: ...

def cut_frames(data: bytes, max_length: int, max_header: int, /) -> tuple[list[Frame], int] | None: ...
def next_run(frames: list[Frame], at: int, families: dict[int, F], /) -> tuple[F | None, int]: ...
def write_records(
    messages: new_messages.NewMessages,
    number: int,
    memory: mmap | bytearray | None,
    at: int,
    limit: int,
    start: int,
    store_timestamp: int,
    rows: array[int],
    /,
) -> tuple[int, int]: ...
def put_entries(
    messages: new_messages.NewMessages, number: int, stop: int, rows: array[int], memory: bytearray, /
) -> tuple[int, list[int]]: ...
def index_keys(
    messages: new_messages.NewMessages,
    number: int,
    stop: int,
    memory: mmap | bytearray,
    slots: int,
    next_entry: int,
    limit: int,
    used_slots: int,
    end_offset: int,
    /,
) -> tuple[int, int, int, int] | None: ...
def follow_chain(memory: mmap, start: int, position: int, units: int, /) -> tuple[int, bytes, bytes, bytes]: ...
def timed_records(backlog: Backlog, /) -> list[Timed]: ...
def put_units(
    records: list[Timed],
    at: int,
    wheel: mmap,
    ticks: tuple[int, int],
    part: mmap,
    places: tuple[int, int, int],
    rules: tuple[int, int, int, int, int, int],
    /,
) -> tuple[int, int, int]: ...
def add_due(
    messages: new_messages.NewMessages,
    units: array[int],
    at: int,
    work: int,
    file: LogFile,
    tick: Tick,
    queues: ConsumeQueues,
    fits: int,
    /,
) -> tuple[int, int]: ...
def read_records(
    messages: new_messages.NewMessages,
    memory: mmap,
    at: int,
    limit: int,
    start: int,
    check_crc: bool,
    queues: ConsumeQueues,
    finds_queues: bool,
    /,
) -> int: ...
def encode_pull(
    pieces: tuple[bytes, ...],
    kind: int,
    opaque: int,
    numbers: tuple[int, int, int, int],
    records: Records,
    byte_count: int,
    /,
) -> bytes | None: ...
def encode_pops(pieces: tuple[bytes, ...], pops: list[Popped], opaques: list[int], /) -> bytes | None: ...
def take_unread(
    states: dict[tuple[str, int], QueueState],
    rows: array[int],
    memory: bytearray,
    topic: str,
    queues: int,
    offsets: dict[int, int],
    turns: tuple[int, int],
    most: int,
    readable: tuple[int, int, int],
    /,
) -> list[tuple[int, list[tuple[int, int, bytes, int]]]]: ...
def cut_pops(frames: list[Frame], at: int, stop: int, /) -> tuple[int, bytes, list[int], list[int]]: ...
def add_checkpoints(
    batch: NewMessages, leases: list[Lease], texts: AllTexts, places: Places, fits: int, now: int, /
) -> bool: ...
def add_acknowledgements(
    batch: NewMessages, ended: list[tuple[Lease, int]], texts: AllTexts, places: Places, fits: int, now: int, /
) -> bool: ...
def hold_leases(table: Table, in_flight: InFlight, due: Due, number: int, leases: list[Lease], /) -> int: ...
def end_leases(table: Table, in_flight: InFlight, ended: list[tuple[Lease, int]], /) -> int: ...
def read_acks(
    frames: list[Frame], at: int, stop: int, pieces: tuple[bytes, ...], /
) -> tuple[int, int, list[AckGroup], bytes]: ...
def offset_list(start: int, bits: int, /) -> bytes | None: ...
def pick_all(backlog: Backlog, most: int, most_bytes: int, /) -> Picked | None: ...
def pick_by_tags(backlog: Backlog, most: int, most_bytes: int, codes: bytes, /) -> Picked | None: ...
def pick_by_properties(
    backlog: Backlog, most: int, most_bytes: int, names: tuple[tuple[str, bytes], ...], condition: Condition, /
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
def read_usual(
    data: bytes, queue: MessageQueue, topic: str, min_offset: int, max_offset: int, kind: type[ReceivedMessage], /
) -> list[ReceivedMessage] | None: ...
def walk_records(buffer: Buffer, /) -> bytes | None: ...
def read_heads(buffer: Buffer, starts: Buffer, /) -> bytes | None: ...
def first_not_allowed(
    frames: list[Frame],
    origins: list[Any],
    at: int,
    stop: int,
    keys: dict[bytes, bytes],
    allowed: set[bytes],
    /,
) -> int: ...
def hmac_states(secret: bytes, /) -> bytes: ...
def split_properties(
    buffer: Buffer, starts: Buffer, stops: Buffer, names: tuple[bytes, ...], wants_map: bool, /
) -> (
    tuple[bool, tuple[tuple[bytes | None, bytes, bytes], ...], tuple[bytes, bytes, bytes, bytes, bytes] | None] | None
): ...

class Socket:
    requests: dict[int, Asked]
    descriptor: int
    is_gathered: bool
    is_full: bool
    has_queued: bool

    def send(self, data: Buffer, /) -> int: ...

F = TypeVar("F")
_S = TypeVar("_S", bound=Socket)

class Sockets(Generic[_S]):
    def __init__(self, max_length: int, max_header: int, /) -> None: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...
    def watch(self, socket: _S, events: int, /) -> None: ...
    def receive(self) -> tuple[list[Frame], list[_S], list[tuple[_S, bytes | int | None]]] | None: ...
    def receive_joined(self) -> tuple[bytes, list[_S], list[tuple[_S, bytes | int | None]]] | None: ...

def send_frames(sockets: list[_S], frames: Buffer, /) -> list[tuple[_S, bytes]]: ...
