"""The writing half of a connection, without a socket."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from downrange.transport.connection import Connection


class FakeTransport:
    """Keeps what was written until it is taken; never slow unless a test says so to the protocol itself."""

    def __init__(self, peer: tuple[str, int] = ("10.0.0.2", 42911)) -> None:
        self._peer = peer
        self.written = b""
        self.is_aborted = False

    def taken(self) -> bytes:
        written, self.written = self.written, b""
        return written

    def write(self, data: bytes | memoryview) -> None:
        self.written += data

    def writelines(self, pieces: Iterable[bytes | memoryview]) -> None:
        self.written += b"".join(pieces)

    def abort(self) -> None:
        self.is_aborted = True

    def close(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_aborted

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_extra_info(self, name: str) -> object:
        return self._peer if name == "peername" else None


class SlowTransport(FakeTransport):
    """Pauses its protocol after so many bytes, until it is told to go on."""

    def __init__(self, pause_after: int) -> None:
        super().__init__()
        self._pause_after = pause_after
        self.protocol: Connection | None = None

    def writelines(self, pieces: Any) -> None:
        super().writelines(pieces)
        self._look()

    def write(self, data: bytes | memoryview) -> None:
        super().write(data)
        self._look()

    def _look(self) -> None:
        if len(self.written) > self._pause_after and self.protocol is not None and self.protocol.is_writable:
            self.protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return len(self.written)

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass
