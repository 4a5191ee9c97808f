"""Key-value configuration of the name server."""

from __future__ import annotations

from typing import Final

from msgspec import field

from downrange.protocol.bodies.body import Body
from downrange.protocol.bodies.fields import Header

ORDER_TOPIC_CONFIG: Final = "ORDER_TOPIC_CONFIG"
"""The only namespace with a meaning for the name server: topic -> `broker-a:4;broker-b:4`."""


class PutKVConfigRequest(Header, frozen=True, kw_only=True):
    """Request 100 PUT_KV_CONFIG."""

    namespace: str
    key: str
    value: str


class KVConfigRequest(Header, frozen=True, kw_only=True):
    """Requests 101 GET_KV_CONFIG and 102 DELETE_KV_CONFIG."""

    namespace: str
    key: str


class GetKVConfigResponse(Header, frozen=True):
    """The answer to request 101."""

    value: str | None = None


class KVNamespaceRequest(Header, frozen=True):
    """Request 219 GET_KVLIST_BY_NAMESPACE."""

    namespace: str


class KVTable(Body, frozen=True):
    """The answer to requests 219, 103 (the namespace ORDER_TOPIC_CONFIG) and 28 (runtime information)."""

    table: dict[str, str] = field(default_factory=dict)
