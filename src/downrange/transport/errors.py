"""What can go wrong between two sockets. All of it may work on the next try, perhaps with another peer."""

from __future__ import annotations

import os

from downrange.model.errors import MQError


class TransportError(MQError):
    """A request did not get its answer; whether the peer carried it out is unknown unless the class says so."""

    retriable = True


class ConnectFailed(TransportError):
    """No connection: the request was never sent."""


class ListenFailed(TransportError):
    """This address cannot be listened on: in use, not ours, or not allowed."""

    retriable = False


def listen_failed(host: str, port: int, error: OSError | OverflowError, what_for: str = "") -> ListenFailed:
    """The kernel's reason in a word: what event loops put around it says the address once more."""
    number = error.errno if isinstance(error, OSError) else None
    reason = os.strerror(number) if number and number > 0 else getattr(error, "strerror", None) or str(error)
    return ListenFailed(f"cannot listen on {host}:{port}{what_for}: {reason.lower()}")


class ConnectionLost(TransportError):
    """The connection ended before the answer came."""


class RequestTimedOut(TransportError):
    """No answer in time."""


class TransportClosed(TransportError):
    """This connection or pool was closed by us."""

    retriable = False
