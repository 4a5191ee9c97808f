"""The bytes between a master and a slave under a controller. Pure. Layout: docs/formats/auto-switch.md.

Every frame begins with its state, as an int: 1 handshake, 2 transfer. In each direction a link begins with handshakes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from downrange.broker.replication.errors import ReplicationError
from downrange.store.epochs import Epoch, EpochList
from downrange.store.errors import StoreError

HANDSHAKE: Final = 1
TRANSFER: Final = 2

# state, syncFromLastFile, asyncLearner, own controller id
_SLAVE_HANDSHAKE: Final = struct.Struct(">ihhq")
# state, end of the log
_REPORT: Final = struct.Struct(">iq")
# state, bytes of entries, end of the log, last epoch; then the entries
_MASTER_HANDSHAKE: Final = struct.Struct(">iiqi")
_ENTRY: Final = struct.Struct(">iq")
# state, log bytes that follow, their offset, epoch, start of the epoch, confirm offset
_TRANSFER: Final = struct.Struct(">iiqiqq")
_STATE: Final = struct.Struct(">i")
MOST_ENTRIES: Final = 1000
"""RocketMQ has room for so many epochs; older ones are left out."""
_LONGEST_PACKET: Final = 1 << 30


class SlaveHandshake(NamedTuple):
    """The first frame of a slave. A learner gets the log and is never in sync."""

    broker_id: int
    from_last_file: bool = False
    is_learner: bool = False

    def encode(self) -> bytes:
        return _SLAVE_HANDSHAKE.pack(HANDSHAKE, self.from_last_file, self.is_learner, self.broker_id)


class MasterHandshake(NamedTuple):
    """The answer of a master: where its log ends, and its epochs."""

    max_offset: int
    epochs: EpochList

    def encode(self) -> bytes:
        entries = self.epochs.entries[-MOST_ENTRIES:]
        last = entries[-1].epoch if entries else -1
        head = _MASTER_HANDSHAKE.pack(HANDSHAKE, len(entries) * _ENTRY.size, self.max_offset, last)
        return head + b"".join(_ENTRY.pack(*entry) for entry in entries)


class TransferHeader(NamedTuple):
    """The head of a packet: `length` log bytes at `offset` follow. Without bytes it is a heartbeat.

    The last packet before the end of an epoch names the next epoch.
    """

    length: int
    offset: int
    epoch: Epoch
    confirm_offset: int

    def encode(self) -> bytes:
        return _TRANSFER.pack(TRANSFER, self.length, self.offset, *self.epoch, self.confirm_offset)


class LogPiece(NamedTuple):
    """Log bytes that arrived, and their offset: a packet, or a part of it."""

    offset: int
    data: memoryview


def encode_report(offset: int) -> bytes:
    return _REPORT.pack(TRANSFER, offset)


class SlaveFrames:
    """Reads the frames of a slave. Holds always: only an incomplete frame is kept. Raises ReplicationError."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> Iterator[SlaveHandshake | int]:
        """Handshakes and reports, in their order."""
        pending, at = self._pending + data, 0
        try:
            while len(pending) - at >= _REPORT.size:
                (state,) = _STATE.unpack_from(pending, at)
                if state == TRANSFER:
                    yield _REPORT.unpack_from(pending, at)[1]
                    at += _REPORT.size
                elif state == HANDSHAKE:
                    if len(pending) - at < _SLAVE_HANDSHAKE.size:
                        break
                    _, from_last_file, is_learner, broker_id = _SLAVE_HANDSHAKE.unpack_from(pending, at)
                    at += _SLAVE_HANDSHAKE.size
                    yield SlaveHandshake(broker_id, bool(from_last_file), bool(is_learner))
                else:
                    raise ReplicationError(f"no frame of a slave: it begins with {state}")
        finally:
            self._pending = pending[at:]


class MasterFrames:
    """Reads the frames of a master, without waiting for the rest of a packet.

    Holds always: only an incomplete head is kept. After an error the rest of the stream cannot be read.
    """

    def __init__(self) -> None:
        self._head = b""
        self._offset = 0
        self._missing = 0
        self._is_transferring = False

    def feed(self, data: memoryview) -> Iterator[MasterHandshake | TransferHeader | LogPiece]:
        """What is in `data`; pieces are slices of it. Raises ReplicationError."""
        at, end = 0, len(data)
        while at < end:
            if self._missing:
                part = data[at : at + self._missing]
                at += len(part)
                offset = self._offset
                self._offset += len(part)
                self._missing -= len(part)
                yield LogPiece(offset, part)
                continue
            wanted = self._head_size()
            taken = wanted - len(self._head)
            self._head += data[at : at + taken]
            at += taken
            if len(self._head) < wanted or self._head_size() > wanted:
                continue
            head, self._head = self._head, b""
            yield self._transfer(head) if _STATE.unpack_from(head)[0] == TRANSFER else self._handshake(head)

    def _head_size(self) -> int:
        """How many bytes the frame has that has begun, as far as it is known, without the log bytes."""
        if len(self._head) < _STATE.size:
            return _STATE.size
        (state,) = _STATE.unpack_from(self._head)
        if state == TRANSFER:
            return _TRANSFER.size
        if state != HANDSHAKE:
            raise ReplicationError(f"no frame of a master: it begins with {state}")
        if len(self._head) < _MASTER_HANDSHAKE.size:
            return _MASTER_HANDSHAKE.size
        size: int = _MASTER_HANDSHAKE.unpack_from(self._head)[1]
        if not 0 <= size <= MOST_ENTRIES * _ENTRY.size or size % _ENTRY.size:
            raise ReplicationError(f"no handshake of a master: {size} bytes of epochs")
        return _MASTER_HANDSHAKE.size + size

    def _transfer(self, head: bytes) -> TransferHeader:
        _, length, offset, epoch, start, confirm_offset = _TRANSFER.unpack(head)
        if not 0 <= length <= _LONGEST_PACKET or offset < -1 or (offset < 0 and length):
            raise ReplicationError(f"no packet of a master: {length} bytes at {offset}")
        self._offset, self._missing = offset, length
        return TransferHeader(length, offset, Epoch(epoch, start), confirm_offset)

    def _handshake(self, head: bytes) -> MasterHandshake:
        max_offset = _MASTER_HANDSHAKE.unpack_from(head)[2]
        entries = _ENTRY.iter_unpack(head[_MASTER_HANDSHAKE.size :])
        try:
            return MasterHandshake(max_offset, EpochList(map(Epoch._make, entries)))
        except StoreError as error:
            raise ReplicationError(f"the epochs of the master make no sense: {error}") from None
