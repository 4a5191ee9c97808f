"""The connections of a server to other servers, over which it signs its requests."""

from __future__ import annotations

from downrange.protocol.command import Command
from downrange.protocol.signing import Signer
from downrange.transport.pool import Pool
from downrange.transport.tls import ClientTls


class SignedPool(Pool):
    """The connections of a server to other servers; every request over them is signed with the servers' own account."""

    def __init__(self, signer: Signer | None, tls: ClientTls | None = None, *, connect_timeout: float = 3.0) -> None:
        super().__init__(tls=tls, connect_timeout=connect_timeout)
        self._signer = signer

    async def request(self, address: str, command: Command, timeout: float) -> Command:
        return await super().request(address, self._signed(command), timeout)

    async def oneway(self, address: str, command: Command, timeout: float = 3.0) -> None:
        await super().oneway(address, self._signed(command), timeout)

    def _signed(self, command: Command) -> Command:
        return command if self._signer is None else self._signer.sign(command)
