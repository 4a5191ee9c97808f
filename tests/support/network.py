"""Hosts of their own on one machine: network namespaces joined by a router that loses packets when told to.

A namespace lives as long as the process that was started in it, so nothing is left behind when the drill ends, however
it ends. It takes the rights of root.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

MISSING = "network namespaces need the rights of root"


def may_make_networks() -> bool:
    return os.geteuid() == 0


@dataclass(frozen=True, slots=True)
class Host:
    """One end of the network; `pid` is the process that keeps its namespace, 0 for this process's own."""

    address: str
    pid: int = 0

    @property
    def program_prefix(self) -> tuple[str, ...]:
        """What a command line begins with to run on this host."""
        return ("nsenter", "--net", "--target", str(self.pid)) if self.pid else ()


@dataclass(eq=False)
class Network:
    """A router and its hosts. The client's end, `here`, is in the namespace of this process."""

    _keepers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _router: int = 0
    _count: int = 0
    _cuts: set[tuple[str, str]] = field(default_factory=set)
    here: Host = field(init=False)

    def __post_init__(self) -> None:
        chance = random.SystemRandom()
        # 198.18.0.0/15 is for tests of network equipment: nobody's own.
        self._prefix = f"198.{chance.choice((18, 19))}.{chance.randrange(256)}"
        self._link = f"dr{os.urandom(4).hex()}"
        try:
            self._router = self._keep()
            self._run(self._router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
            self._run(self._router, "ip", "link", "set", "lo", "up")
            self.here = self._join(0)
            self._run(0, "ip", "route", "add", f"{self._prefix}.0/24", "via", f"{self._prefix}.1")
        except BaseException:
            self.close()
            raise

    def host(self) -> Host:
        """A new host."""
        pid = self._keep()
        self._run(pid, "ip", "link", "set", "lo", "up")
        router = f"{self._prefix}.{8 * self._count + 1}"
        made = self._join(pid)
        self._run(pid, "ip", "route", "add", "default", "via", router)
        return made

    def cut(self, source: Host, target: Host) -> None:
        """Lose all packets from `source` to `target`; those of the other direction arrive."""
        pair = source.address, target.address
        if pair not in self._cuts:
            self._cuts.add(pair)
            self._rule("add", *pair)

    def heal(self) -> None:
        """Lose nothing any more."""
        while self._cuts:
            self._rule("del", *self._cuts.pop())

    def close(self) -> None:
        for keeper in self._keepers:
            keeper.kill()
            keeper.wait()

    def _rule(self, verb: str, source: str, target: str) -> None:
        self._run(self._router, "ip", "rule", verb, "from", source, "to", target, "blackhole")

    def _keep(self) -> int:
        keeper = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; exec sleep 1000000"], stdout=subprocess.PIPE)
        self._keepers.append(keeper)
        assert keeper.stdout is not None
        assert keeper.stdout.readline(), MISSING  # it is in its namespace now
        keeper.stdout.close()
        return keeper.pid

    def _join(self, pid: int) -> Host:
        """Lay a cable from a namespace to the router."""
        number, self._count = self._count, self._count + 1
        ours, theirs = f"{self._link}{number}", f"r{number}"
        self._run(pid, "ip", "link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", str(self._router))
        router, host = (f"{self._prefix}.{8 * number + end}" for end in (1, 2))
        self._run(pid, "ip", "address", "add", f"{host}/29", "dev", ours)
        self._run(pid, "ip", "link", "set", ours, "up")
        self._run(self._router, "ip", "address", "add", f"{router}/29", "dev", theirs)
        self._run(self._router, "ip", "link", "set", theirs, "up")
        return Host(host, pid)

    @staticmethod
    def _run(pid: int, *command: str) -> None:
        subprocess.run([*Host("", pid).program_prefix, *command], check=True, capture_output=True, text=True)


def _made(attempts: int = 5) -> Network:
    """A network; another process may have one with the same addresses, then others are tried."""
    for _ in range(attempts - 1):
        with suppress(subprocess.CalledProcessError):
            return Network()
    return Network()


@contextmanager
def network() -> Iterator[Network]:
    made = _made()
    try:
        yield made
    finally:
        made.close()
