"""CPU time and memory of a server on this machine, as the kernel counts them."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from downrange.settings import ConfigError
from downrange.transport.pool import split_address

_TICK: Final = os.sysconf("SC_CLK_TCK")
_LISTENING: Final = "0A"


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A process by its id; it may be a JVM as well as one of our servers."""

    pid: int

    @property
    def cpu_seconds(self) -> float:
        """User and system time of all threads so far."""
        fields = self._read("stat").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICK

    @property
    def private_bytes(self) -> int:
        """Memory without mapped files, since the kernel decides how many pages of store files are in memory."""
        return self._status("RssAnon")

    @property
    def resident_bytes(self) -> int:
        return self._status("VmRSS")

    def _status(self, name: str) -> int:
        for line in self._read("status").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
        return 0

    def _read(self, name: str) -> str:
        try:
            return Path(f"/proc/{self.pid}/{name}").read_text()
        except OSError:
            raise ConfigError(f"there is no process {self.pid} on this machine, or no /proc to look at it") from None


def listening_at(address: str) -> ServerProcess | None:
    """The process that listens at a local address; None if the address is remote or the process cannot be found."""
    host, port = split_address(address)
    if not _is_this_machine(host):
        return None
    inodes = set(_listening_inodes(port))
    for directory in Path("/proc").glob("[0-9]*/fd"):
        try:
            for descriptor in directory.iterdir():
                if os.readlink(descriptor).removeprefix("socket:[").rstrip("]") in inodes:
                    return ServerProcess(int(directory.parent.name))
        except OSError:
            continue  # the process of another user, or one that has just ended
    return None


def _is_this_machine(host: str) -> bool:
    """Whether the address is one of this machine; names other than localhost are not looked up."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(("127.0.0.1" if host == "localhost" else str(ipaddress.ip_address(host)), 0))
        except (OSError, ValueError):
            return False
    return True


def _listening_inodes(port: int) -> Iterator[str]:
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]
