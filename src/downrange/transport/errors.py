"""The errors between two sockets. Most are retriable: the next try may succeed, perhaps with another peer."""

from __future__ import annotations

import os

from downrange.model.errors import MQError


class TransportError(MQError):
    """A request did not get its answer; whether the peer carried it out is unknown unless the class says so."""

    retriable = True


class ConnectFailed(TransportError):
    """The connection could not be opened: the request was never sent."""


class ListenFailed(TransportError):
    """This address cannot be listened on: it is in use, not of this machine, or not allowed."""

    retriable = False

    def __init__(self, problem: str, port: int | None = None) -> None:
        super().__init__(problem)
        self.port = port


def listen_failed(host: str, port: int, error: OSError | OverflowError, what_for: str = "") -> ListenFailed:
    """The error with the kernel's reason alone: the text that event loops add repeats the address."""
    number = error.errno if isinstance(error, OSError) else None
    reason = os.strerror(number) if number and number > 0 else getattr(error, "strerror", None) or str(error)
    return ListenFailed(f"cannot listen on {host}:{port}{what_for}: {reason.lower()}", port)


class ConnectionLost(TransportError):
    """The connection ended before the answer came."""


class RequestTimedOut(TransportError):
    """The answer did not come in time."""


class TransportClosed(TransportError):
    """This end has closed the connection or pool."""

    retriable = False
