"""The file `config/timercheck`: how far the delivery of timer messages is, and how much of their index is on disk."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from downrange.store.files import Files, write_synced

# Read time, end of the timer log, queue offset, the master's queue offset, data version: state, timestamp, counter.
LONGS: Final = struct.Struct(">7q")
# Ours, behind RocketMQ's: a mark, and the precision of the wheel.
_OURS: Final = struct.Struct(">qq")
_MARK: Final = 0x446F776E72616E67
_FILE_SIZE: Final = 4096


@dataclass(frozen=True, slots=True)
class TimerCheckpoint:
    """Everything due before `read_time` was delivered; all messages before `queue_offset` of the timer topic are in the
    timer log, which is safe up to `log_end`."""

    read_time: int = 0
    log_end: int = 0
    queue_offset: int = 0
    master_queue_offset: int = 0
    state_version: int = 0
    timestamp: int = 0
    counter: int = 0
    precision: int = 0
    """0 when RocketMQ wrote the file."""

    @property
    def encoded(self) -> bytes:
        """The 56 bytes that request 60 is answered with."""
        return LONGS.pack(
            self.read_time, self.log_end, self.queue_offset, self.master_queue_offset,
            self.state_version, self.timestamp, self.counter,
        )  # fmt: skip

    @staticmethod
    def decode(raw: bytes) -> TimerCheckpoint | None:
        """The checkpoint of a file, or of a master's answer; None when it is too short, or empty."""
        if len(raw) < LONGS.size:
            return None
        mark, precision = _OURS.unpack_from(raw, LONGS.size) if len(raw) >= LONGS.size + _OURS.size else (0, 0)
        checkpoint = replace(TimerCheckpoint(*LONGS.unpack_from(raw)), precision=precision if mark == _MARK else 0)
        return checkpoint if checkpoint.read_time > 0 else None

    @staticmethod
    def load(path: Path) -> TimerCheckpoint | None:
        try:
            return TimerCheckpoint.decode(path.read_bytes())
        except FileNotFoundError:
            return None


def write_checkpoint(checkpoint: TimerCheckpoint, path: Path, files: Files) -> None:
    """Write a checkpoint to the disk. May run in a worker thread."""
    write_synced(files, path, _FILE_SIZE, checkpoint.encoded + _OURS.pack(_MARK, checkpoint.precision))
