"""The connections of a broker to name servers, controllers and its master, over which it signs its requests."""

from __future__ import annotations

from downrange.broker.config import BrokerConfig
from downrange.broker.user_access import inner_user
from downrange.protocol.signing import Signer
from downrange.transport.signed_pool import SignedPool
from downrange.transport.tls import outgoing_tls


def signed_pool(config: BrokerConfig) -> SignedPool:
    inner = inner_user(config)
    signer = None if inner is None else Signer(inner.username, inner.password)
    return SignedPool(signer, outgoing_tls(config.tls))
