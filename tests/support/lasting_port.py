"""Ports for servers that die and come back to the port they had, and ports where nobody is."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

# From 32768 on the system gives ports to anybody: what was free when a server died need not be free when it is back,
# and who calls such a port while nobody listens there may be given that very port, and be connected to himself.
_ours = list(range(10_002, 32_000, 4))
_chance = random.SystemRandom()  # processes that were forked from one another draw different ports


def lasting_port() -> int:
    """A free one, whose neighbours are free, too: a broker also takes the second before it and the one behind it."""
    while True:
        port = _ours.pop(_chance.randrange(len(_ours)))  # no two get the same
        with ExitStack() as taken:
            try:
                for number in (port - 2, port, port + 1):
                    taken.enter_context(socket.create_server(("127.0.0.1", number)))
            except OSError:
                continue
            return port
