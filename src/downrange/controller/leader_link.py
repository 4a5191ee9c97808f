"""A connection to the controller that leads: it breaks when that process dies, long before its lease at etcd ends."""

from __future__ import annotations

import asyncio
from typing import Final

from downrange.transport.errors import ConnectFailed
from downrange.transport.pool import split_address

CONNECT_SECONDS: Final = 1.0
AGAIN_SECONDS: Final = 0.25
REFUSALS_OF_A_DEAD_PROCESS: Final = 2
REFUSED_AGAIN_SECONDS: Final = 0.05


class LeaderLink:
    """Tells when the process at an address is gone: its machine answers, twice, that nobody listens there.

    A leader that cannot be reached is not gone: it may well reach etcd.
    """

    def __init__(self) -> None:
        self._address = ""
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    def __repr__(self) -> str:
        return f"<LeaderLink {self._address} {'open' if self._reader is not None else 'closed'}>"

    async def gone(self, address: str) -> None:
        """Return when the process is gone. A caller that gives up may ask again: the connection stays."""
        if address != self._address:
            self.close()
            self._address = address
        refusals = 0
        while refusals < REFUSALS_OF_A_DEAD_PROCESS:
            try:
                await self._until_closed()
                refusals = 0
            except ConnectionRefusedError:
                refusals += 1
                await asyncio.sleep(REFUSED_AGAIN_SECONDS)
            except (OSError, TimeoutError, ConnectFailed):
                self.close()
                refusals = 0
                await asyncio.sleep(AGAIN_SECONDS)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None

    async def _until_closed(self) -> None:
        if self._reader is None:
            host, port = split_address(self._address)
            async with asyncio.timeout(CONNECT_SECONDS):
                self._reader, self._writer = await asyncio.open_connection(host, port)
        while await self._reader.read(1024):
            pass
        self.close()
