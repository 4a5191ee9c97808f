"""The writing half of a connection, without a socket."""

from __future__ import annotations

from collections.abc import Iterable


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

    def get_extra_info(self, name: str) -> object:
        return self._peer if name == "peername" else None
