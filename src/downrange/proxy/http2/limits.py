"""What one peer may make the server hold, and for how long."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Http2Limits:
    """Limits of each connection."""

    max_streams: int = 4096
    """Calls at once; every waiting receive and every telemetry stream is one."""
    max_frame_bytes: int = 256 * 1024
    max_header_bytes: int = 64 * 1024
    max_message_bytes: int = 32 * 1024 * 1024
    stream_window: int = 1024 * 1024
    connection_window: int = 16 * 1024 * 1024
    max_held_bytes: int = 64 * 1024 * 1024
    """Bytes of requests that are not answered, and of answers that the peer does not take."""
    max_resets: int = 1000
    """Calls given up by the peer within `reset_seconds`."""
    reset_seconds: float = 10.0
    preface_seconds: float = 10.0
    """The time for the first bytes and a TLS handshake."""
    idle_seconds: float = 120.0
    """A connection without calls is closed after this time."""
    ping_seconds: float = 60.0
    """A connection with calls on which nothing was heard is asked whether it lives, and closed after the same again."""
