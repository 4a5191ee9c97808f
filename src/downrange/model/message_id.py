"""The two ids of a message.

The *offset id* says where a message lies: hex of store host, port (4 bytes) and physical offset (8 bytes).
The *unique id* is made by the producer before sending: hex of ip, pid (2), a constant of the process (4),
milliseconds since the month began (4), counter (2). Both have 32 characters with IPv4 and 56 with IPv6.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import NamedTuple

from downrange.model.errors import MessageError


class HostPort(NamedTuple):
    """An address as records store it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


# Parsing an address takes several microseconds, and most records name one of a few peers.
@lru_cache(maxsize=4096)
def pack_host(host: str, port: int) -> bytes:
    """4 or 16 address bytes, then the port as 4 bytes: 8 or 20 in all."""
    address = ipaddress.ip_address(host)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return address.packed + port.to_bytes(4, "big")


def unpack_host(raw: bytes | memoryview) -> HostPort:
    return _unpack_host(bytes(raw))


@lru_cache(maxsize=4096)
def _unpack_host(raw: bytes) -> HostPort:
    return HostPort(str(ipaddress.ip_address(raw[:-4])), int.from_bytes(raw[-4:], "big"))


def offset_message_id(packed_store_host: bytes, physical_offset: int) -> str:
    return f"{packed_store_host.hex()}{physical_offset:016x}".upper()


class OffsetMessageId(NamedTuple):
    store_host: HostPort
    physical_offset: int


def parse_offset_message_id(text: str) -> OffsetMessageId:
    if len(text) not in (32, 56):
        raise MessageError(f"not an offset message id: {text!r} has {len(text)} characters, 32 or 56 are expected")
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raise MessageError(f"not an offset message id: {text!r} is not hexadecimal") from None
    return OffsetMessageId(unpack_host(raw[:-8]), int.from_bytes(raw[-8:], "big"))
