"""How many gRPC calls were answered, with which codes, and how long that took."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sized
from enum import IntEnum
from typing import Final

from downrange.model.histogram import RPC_MILLIS_BOUNDS, Histogram
from downrange.proxy.clients import Clients
from downrange.proxy.wire.enums import ClientType, Code

_WORDS: Final = re.compile(r"(?<!^)(?=[A-Z])")


class CallFigures:
    """Counts calls; `Service` tells of each. Telemetry streams are no calls here: they have no end to wait for."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._open: Sized = ()
        self.calls: dict[tuple[str, str], Histogram] = {}
        """Milliseconds by the name of the method and of the code that answered it, both in lower case."""

    def count_connections(self, connections: Sized) -> None:
        """Tell where open connections are counted."""
        self._open = connections

    def answered(self, method: str, code: int, seconds: float) -> None:
        key = method, _name_of(Code, code)
        histogram = self.calls.get(key)
        if histogram is None:
            histogram = self.calls[key] = Histogram(RPC_MILLIS_BOUNDS)
        histogram.observe(seconds * 1000)

    @property
    def connections(self) -> int:
        """Open connections."""
        return len(self._open)

    @property
    def clients(self) -> Mapping[str, int]:
        """Clients that have told their settings, by type."""
        kinds = Counter(client.kind for client in self._clients)
        return {_name_of(ClientType, kind): count for kind, count in kinds.items()}


def method_name(call: str) -> str:
    """SendMessage -> send_message."""
    return _WORDS.sub("_", call).lower()


def _name_of(kind: type[IntEnum], number: int) -> str:
    return kind(number).name.lower() if number in kind._value2member_map_ else str(number)
