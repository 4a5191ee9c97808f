"""The address by which other machines reach this one.

The host name is no help: on Debian it resolves to 127.0.1.1. The kernel knows from which address a packet to another
machine would leave; a datagram socket that is connected tells it, and nothing is sent.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable
from typing import Final

LOOPBACK: Final = "127.0.0.1"
EVERY_ADDRESS: Final = ("0.0.0.0", "::", "")
"""What a server is told to listen on when it shall listen on every address."""
# Any address of another network does: no packet is sent to it.
_ELSEWHERE: Final = ("10.255.255.255", 1)
_SIOCGIFADDR: Final = 0x8915


def own_address(peers: Iterable[str] = ()) -> str:
    """The IPv4 address of this machine for others: that which `peers` (`host:port`) see, else that of its network.

    127.0.0.1 when this machine has no network.
    """
    for host, _, port in (peer.rpartition(":") for peer in peers):
        if port.isdecimal() and (found := _source_address((host, int(port)))) is not None:
            return found
    return _source_address(_ELSEWHERE) or _address_of_an_interface() or LOOPBACK


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _source_address(destination: tuple[str, int]) -> str | None:
    """The address from which packets to a destination leave; None if that is no address for other machines."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(destination)
            found = str(probe.getsockname()[0])
        except OSError:
            return None
    return None if is_loopback(found) or found in EVERY_ADDRESS else found


def _address_of_an_interface() -> str | None:
    """The first address of a network card, for a machine whose networks lead nowhere else."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # this card has no IPv4 address
                continue
            found = socket.inet_ntoa(answer[20:24])
            if not is_loopback(found):
                return found
    return None
