"""A whole cluster on this machine for trying things out: its directory, its processes, starting and stopping them.

    DIRECTORY/cluster.json            the members with their ports, and the process each runs in
    DIRECTORY/conf/NAME.conf          the configuration of one server with RocketMQ's keys; users may edit it
    DIRECTORY/data/NAME               the files of this server: the store of a broker
    DIRECTORY/logs/NAME.log           the log of this server

Ports are chosen once and kept, so that a cluster that was stopped comes back where clients look for it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

from downrange.cli import run_files
from downrange.cli.etcd_process import etcd_command, is_healthy
from downrange.cli.options import UsageError
from downrange.model.errors import MQError

HOST = "127.0.0.1"
_READY = "ready on "
_READY_SECONDS = 30.0
_PORT_ATTEMPTS = 50
_LASTING_PORTS = range(10_000, 32_000)
_chance = random.SystemRandom()
_VIP_PORT_BELOW = 2
_HA_PORT_ABOVE = 1


class Kind(StrEnum):
    """The kinds of servers, in the order in which they are started."""

    NAMESRV = "namesrv"
    ETCD = "etcd"
    CONTROLLER = "controller"
    MASTER = "master"
    SLAVE = "slave"


_START: tuple[tuple[Kind, ...], ...] = ((Kind.NAMESRV, Kind.ETCD), (Kind.CONTROLLER,), (Kind.MASTER,), (Kind.SLAVE,))
# Controllers go first, so that they elect nobody because a master stops; slaves get the end of the log.
_STOP: tuple[tuple[Kind, ...], ...] = ((Kind.CONTROLLER,), (Kind.MASTER,), (Kind.SLAVE,), (Kind.NAMESRV, Kind.ETCD))


class ClusterFailed(MQError):
    """A process of a local cluster did not start or did not stop."""


@dataclass(frozen=True, slots=True)
class Member:
    """One server of the cluster. `pid` and `since` identify its process; they are 0 and empty before it ever ran."""

    name: str
    broker: str  # empty: no broker
    broker_id: int
    port: int
    pid: int = 0
    since: str = ""
    kind: str = ""

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def role(self) -> Kind:
        """The kind of server; the replicas of a set that has a controller are all masters-to-be."""
        if self.kind:
            return Kind(self.kind)
        return Kind.NAMESRV if not self.broker else Kind.SLAVE if self.broker_id else Kind.MASTER

    @property
    def is_running(self) -> bool:
        return bool(self.pid) and run_files.started(self.pid) == self.since


@dataclass(frozen=True, slots=True)
class Layout:
    """How a new cluster shall look."""

    brokers: int
    replicas: int
    is_sync: bool = False
    namesrv_port: int = 0
    controllers: int = 0
    """0: the first replica of each broker is its master for ever."""
    etcd_nodes: int = 0

    def coordinators(self, taken: ExitStack) -> list[Member]:
        """The nodes of etcd and the controllers."""
        nodes = [("etcd", number, Kind.ETCD) for number in range(self.etcd_nodes)]
        nodes += [("controller", number, Kind.CONTROLLER) for number in range(self.controllers)]
        return [
            Member(f"{name}-{number}", "", number, _take(taken, for_broker=True), kind=kind)
            for name, number, kind in nodes
        ]

    def broker(self, broker: str, replica: int, taken: ExitStack) -> Member:
        """One copy of a broker."""
        port = _take(taken, for_broker=True)
        if self.controllers:
            return Member(f"{broker}-{replica + 1}", broker, replica, port, kind=Kind.MASTER)
        name = broker if replica == 0 else f"{broker}-s{replica}" if self.replicas > 2 else f"{broker}-s"
        return Member(name, broker, replica, port)

    def settings(self, member: Member, others: list[Member]) -> dict[str, object]:
        """The settings that say who is master."""
        if self.controllers:
            controllers = ";".join(one.address for one in others if one.role is Kind.CONTROLLER)
            return {"enableControllerMode": "true", "controllerAddr": controllers}
        role = "SLAVE" if member.broker_id else "SYNC_MASTER" if self.is_sync else "ASYNC_MASTER"
        return {"brokerId": member.broker_id, "brokerRole": role}


class LocalCluster:
    """A cluster in a directory. Holds always: `cluster.json` names the processes that were started last."""

    def __init__(self, directory: Path, members: list[Member]) -> None:
        self.directory = directory
        self.members = members

    @classmethod
    def load(cls, directory: Path) -> LocalCluster | None:
        """The cluster of a directory; None when the directory holds none."""
        directory = directory.resolve()
        try:
            document = json.loads((directory / "cluster.json").read_text())
            return cls(directory, [Member(**member) for member in document["members"]])
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{directory / 'cluster.json'} cannot be read ({error}): repair or remove it") from error

    @classmethod
    def create(cls, directory: Path, layout: Layout, tls_file: Path | None = None) -> LocalCluster:
        """Lay out a new cluster: choose ports and write the configuration of every server.

        With a properties file of tls keys the servers take TLS only, but for etcd, which listens on loopback.
        """
        common: dict[str, object] = {}
        if tls_file is not None:
            common = {"tls.server.mode": "enforcing", "tls.config.file": tls_file.absolute()}
        directory = directory.resolve()
        try:
            for folder in ("conf", "data", "logs"):
                (directory / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{directory}: {error.strerror}: give another directory with --data") from error
        with ExitStack() as taken:
            members = [Member("namesrv", "", 0, layout.namesrv_port or _take(taken))]
            members += layout.coordinators(taken)
            for member in members:
                _write_settings(directory, member, common)
            for number in range(layout.brokers):
                for replica in range(layout.replicas):
                    member = layout.broker(f"broker-{_letters(number)}", replica, taken)
                    settings = {
                        **layout.settings(member, members),
                        "brokerClusterName": "DefaultCluster",
                        "brokerName": member.broker,
                        "namesrvAddr": members[0].address,
                        "brokerIP1": HOST,
                        "brokerIP2": HOST,
                        "bindAddress": HOST,
                        "listenPort": member.port,
                        "storePathRootDir": directory / "data" / member.name,
                        "metricsPort": -1,
                        "grpcServerPort": -1,
                        **common,
                    }
                    _write_settings(directory, member, settings)
                    members.append(member)
        cluster = cls(directory, members)
        cluster._save()
        return cluster

    @property
    def namesrv(self) -> str:
        return next(member.address for member in self.members if member.role is Kind.NAMESRV)

    @property
    def controllers(self) -> list[str]:
        """The addresses of the controllers; none if masters are fixed."""
        return [member.address for member in self.members if member.role is Kind.CONTROLLER]

    @property
    def running(self) -> list[Member]:
        return [member for member in self.members if member.is_running]

    def start(self) -> None:
        """Start what does not run: name server, then masters, then slaves, each kind when the last is ready."""
        with _interrupt_later() as raise_if_interrupted:
            for stage in _START:
                starting = []
                for member in self.members:
                    if member.role in stage:
                        starting.append(self._launch(member))
                        raise_if_interrupted()
                deadline = time.monotonic() + _READY_SECONDS
                for member, log_start in starting:
                    self._wait_ready(member, log_start, deadline, raise_if_interrupted)

    def forget(self) -> None:
        """Remove `cluster.json`, so that a new layout can replace this one; configuration, stores and logs stay."""
        (self.directory / "cluster.json").unlink(missing_ok=True)

    def stop(self, seconds: float, except_for: Collection[Member] = ()) -> list[Member]:
        """Stop masters, then slaves, which so get the end of the log, then the name server; return those stopped."""
        stopped = []
        for stage in _STOP:
            members = [
                member
                for member in self.members
                if member.role in stage and member.is_running and member not in except_for
            ]
            for member in members:
                with suppress(ProcessLookupError):
                    os.kill(member.pid, signal.SIGTERM)
            deadline = time.monotonic() + seconds
            for member in members:
                while member.is_running:
                    if time.monotonic() > deadline:
                        raise ClusterFailed(
                            f"{member.name} (pid {member.pid}) still runs after {seconds:g} s: see {self.log(member)}"
                        )
                    time.sleep(0.02)
            stopped += members
        return stopped

    def log(self, member: Member) -> Path:
        return self.directory / "logs" / f"{member.name}.log"

    def _launch(self, member: Member) -> tuple[Member, int]:
        """Start a member unless it runs; return it with the size that its log file had before."""
        log_path = self.log(member)
        if member.is_running:
            return member, 0
        with log_path.open("ab") as log:
            log_start = log.tell()
            process = subprocess.Popen(  # noqa: S603  our own command
                self._command(member),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # Ctrl-C at the terminal must not reach it
            )
        started = replace(member, pid=process.pid, since=run_files.started(process.pid))
        self.members[self.members.index(member)] = started
        self._save()  # at once: a process that is not in the file could not be stopped
        return started, log_start

    def _command(self, member: Member) -> list[str]:
        """The command line of a server."""
        data = str(self.directory / "data" / member.name)
        if member.role is Kind.ETCD:
            return etcd_command(member, self._of(Kind.ETCD), data)
        common = ["--config", str(_settings_file(self.directory, member)), "--log-level", "WARNING"]
        if member.role is Kind.CONTROLLER:
            endpoints = ";".join(f"http://{one.address}" for one in self._of(Kind.ETCD))
            own = ["controller", "--id", member.name, "--listen", member.address, "--etcd", endpoints, "--data", data]
        elif member.role is Kind.NAMESRV:
            own = ["namesrv", "--data", data, "--port", str(member.port)]
        else:
            own = ["broker", "--port", str(member.port)]
        return [sys.executable, "-m", "downrange.cli.main", *own, *common]

    def _of(self, kind: Kind) -> list[Member]:
        return [member for member in self.members if member.role is kind]

    def _wait_ready(
        self, member: Member, log_start: int, deadline: float, raise_if_interrupted: Callable[[], None]
    ) -> None:
        while True:
            raise_if_interrupted()
            with self.log(member).open("rb") as log:
                log.seek(log_start)
                said = log.read().decode("utf-8", "replace")
            if _READY in said or (member.role is Kind.ETCD and is_healthy(member.address)):
                return
            if not member.is_running:
                last = said.strip().splitlines()[-1:] or ["it said nothing"]
                raise ClusterFailed(f"{member.name} did not start: {last[0].removeprefix('downrange: ')}")
            if time.monotonic() > deadline:
                raise ClusterFailed(f"{member.name} is not ready after {_READY_SECONDS:g} s: see {self.log(member)}")
            time.sleep(0.02)

    def _save(self) -> None:
        path = self.directory / "cluster.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"members": [asdict(member) for member in self.members]}, indent=2) + "\n")
        new.replace(path)


def _settings_file(directory: Path, member: Member) -> Path:
    return directory / "conf" / f"{member.name}.conf"


def _write_settings(directory: Path, member: Member, settings: Mapping[str, object]) -> None:
    if member.role is not Kind.ETCD:
        text = "".join(f"{key}={value}\n" for key, value in settings.items())
        _settings_file(directory, member).write_text(text)


@contextmanager
def _interrupt_later() -> Iterator[Callable[[], None]]:
    """Delay Ctrl-C until the yielded function is called: at other moments a process just started could be lost."""
    pressed: list[int] = []

    def raise_if_interrupted() -> None:
        if pressed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield raise_if_interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _letters(number: int) -> str:
    """The letters with this number in the series a, b, … z, aa, ab, …"""
    text = ""
    number += 1
    while number:
        number, letter = divmod(number - 1, 26)
        text = chr(ord("a") + letter) + text
    return text


def _take(taken: ExitStack, *, for_broker: bool = False) -> int:
    """A free port, held until the layout is complete; for a broker with free ports for its VIP channel and its slaves.

    It is not in the range for outgoing connections: later starts of the cluster need the same port again.
    """
    for _ in range(_PORT_ATTEMPTS):
        attempt = ExitStack()
        try:
            port = _bind(attempt, _chance.choice(_LASTING_PORTS))
            if for_broker:
                _bind(attempt, port - _VIP_PORT_BELOW)
                _bind(attempt, port + _HA_PORT_ABOVE)
        except OSError:
            attempt.close()
            continue
        taken.push(attempt.pop_all())
        return port
    raise ClusterFailed("no free ports could be found on this machine")


def _bind(stack: ExitStack, port: int) -> int:
    listener = stack.enter_context(socket.socket())
    listener.bind((HOST, port))
    return int(listener.getsockname()[1])


def names(members: Iterable[Member]) -> str:
    return ", ".join(member.name for member in members)
