"""Key-value configuration of the name server."""

from __future__ import annotations

from typing import Final

from msgspec import field

from downrange.protocol.bodies.body import Body
from downrange.protocol.bodies.fields import Header

ORDER_TOPIC_CONFIG: Final = "ORDER_TOPIC_CONFIG"
"""The one namespace with a meaning of its own: topic -> `broker-a:4;broker-b:4`."""


class PutKVConfigRequest(Header, frozen=True, kw_only=True):
    """100."""

    namespace: str
    key: str
    value: str


class KVConfigRequest(Header, frozen=True, kw_only=True):
    """101 GET_KV_CONFIG and 102 DELETE_KV_CONFIG."""

    namespace: str
    key: str


class GetKVConfigResponse(Header, frozen=True):
    """Answers 101."""

    value: str | None = None


class KVNamespaceRequest(Header, frozen=True):
    """219 GET_KVLIST_BY_NAMESPACE."""

    namespace: str


class KVTable(Body, frozen=True):
    """Answers 219, 103 (the namespace ORDER_TOPIC_CONFIG) and 28 (runtime information)."""

    table: dict[str, str] = field(default_factory=dict)
