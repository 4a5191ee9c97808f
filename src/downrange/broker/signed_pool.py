"""The connections of a broker to name servers, controllers and its master, over which it signs its requests."""

from __future__ import annotations

from downrange.broker.config import BrokerConfig
from downrange.broker.user_access import inner_user
from downrange.protocol.command import Command
from downrange.protocol.signing import Signer
from downrange.transport.pool import Pool
from downrange.transport.tls import ClientTls, outgoing_tls


class SignedPool(Pool):
    """The connections of a broker to other servers; every request over them is signed with the brokers' own account."""

    def __init__(self, signer: Signer | None, tls: ClientTls | None = None) -> None:
        super().__init__(tls=tls)
        self._signer = signer

    async def request(self, address: str, command: Command, timeout: float) -> Command:
        return await super().request(address, self._signed(command), timeout)

    async def oneway(self, address: str, command: Command, timeout: float = 3.0) -> None:
        await super().oneway(address, self._signed(command), timeout)

    def _signed(self, command: Command) -> Command:
        return command if self._signer is None else self._signer.sign(command)


def signed_pool(config: BrokerConfig) -> SignedPool:
    inner = inner_user(config)
    signer = None if inner is None else Signer(inner.username, inner.password)
    return SignedPool(signer, outgoing_tls(config.tls))
