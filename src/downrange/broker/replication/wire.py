"""The bytes between a master and a slave. Pure: bytes in, values out. Layout: docs/formats/replication.md."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from downrange.broker.replication.errors import ReplicationError

# Slave to master: the end of the slave's log.
REPORT: Final = struct.Struct(">q")
# Master to slave: offset of the first byte that follows, number of bytes; 0 bytes are a heartbeat.
HEADER: Final = struct.Struct(">qi")


class Piece(NamedTuple):
    """Log bytes that arrived: a packet, or the part of it that is there. A heartbeat is a packet without bytes."""

    offset: int
    data: memoryview
    ends_packet: bool


class ReportReader:
    """Reads the reports of a slave; only the newest counts."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> int | None:
        """The newest complete report; None when there is no new one."""
        pending = self._pending + data
        whole = len(pending) // REPORT.size * REPORT.size
        self._pending = pending[whole:]
        if not whole:
            return None
        offset: int = REPORT.unpack_from(pending, whole - REPORT.size)[0]
        return offset


class PacketReader:
    """Reads the packets of a master, without waiting for the rest of a packet.

    Holds always: only an incomplete header is kept. After an error the rest of the stream cannot be read.
    """

    def __init__(self) -> None:
        self._header = b""
        self._offset = 0
        self._missing = 0

    def feed(self, data: memoryview) -> list[Piece]:
        """The pieces of packets in `data`, as slices of it."""
        pieces = []
        at, end = 0, len(data)
        while at < end:
            if not self._missing:
                taken = HEADER.size - len(self._header)
                header = self._header + data[at : at + taken]
                at += taken
                if len(header) < HEADER.size:
                    self._header = header
                    break
                self._header = b""
                self._offset, self._missing = HEADER.unpack(header)
                if self._offset < 0 or self._missing < 0:
                    raise ReplicationError(f"no replication packet: {header.hex()}")
                if not self._missing:
                    pieces.append(Piece(self._offset, data[:0], True))
                continue
            part = data[at : at + self._missing]
            at += len(part)
            self._missing -= len(part)
            pieces.append(Piece(self._offset, part, not self._missing))
            self._offset += len(part)
        return pieces
