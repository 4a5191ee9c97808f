"""How much memory one peer, and all peers together, may make this process hold."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one endpoint. A request counts from its arrival until its reply is handed to the socket."""

    max_requests_per_connection: int = 20_000
    max_requests: int = 200_000
    max_unsent_bytes_per_connection: int = 64 * MIB
    max_unsent_bytes: int = 512 * MIB
    idle_seconds: float = 120.0
    frame_seconds: float = 60.0
    """How long a peer may take to send one frame after the frame's first byte."""
    handshake_seconds: float = 10.0
    """How long a TLS handshake may take after the peer's first byte."""
    unacknowledged_seconds: float | None = None
    """How long a peer's machine may leave bytes unacknowledged before its connection counts as lost; None: as TCP."""
    drain_seconds: float = 5.0
    """How long a server that stops waits for the replies under way on each connection."""


@dataclass(eq=False, slots=True)
class Usage:
    """What all connections of one endpoint hold at this moment. Changed by the connections, on the loop's thread."""

    requests: int = 0
    unsent_bytes: int = 0
