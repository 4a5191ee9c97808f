"""Puts the simulation in the place of the machine: in the modules that listen, sync files, draw numbers, ask the time.

Meant for a process of its own that ends with the run (`tests.sim.run` forks one for every seed): nothing is put back.
"""

from __future__ import annotations

import asyncio
import encodings.idna  # noqa: F401  host names need it: else every seed would import it anew
import gc
import itertools
import os
import random
import sys
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

from downrange.broker import admission
from downrange.broker import app as broker_app
from downrange.broker.pop import revival
from downrange.broker.replication import master, slave
from downrange.broker.services import delay, flushing
from downrange.client import session, silent_brokers, unique_id
from downrange.client.producer import probing
from downrange.store.files import OS_FILES, OsFiles
from downrange.store.timer.timer_index import TimerIndex
from downrange.transport import server
from downrange.transport.connection import Connection
from tests.sim.disk import Disk
from tests.sim.loop import SimLoop
from tests.sim.network import Listening, Network, SimAcceptor
from tests.sim.process import CURRENT, current

FLOW_TICK_SECONDS = 30.0
"""The broker measures every 10 ms how late its loop is. A simulated loop is late only while its process is stopped."""
LOOK_SECONDS = 1.0
"""Services that look every 0.1 to 0.25 s whether something took too long look as often here."""

LONGEST_PAUSE_SECONDS = 5.0
"""Services that wait for a wall-clock time read the clock every second, since it may be set; here as often."""

TIMER_SLOTS = 1024
"""The wheel of a broker has room for two weeks: copies of it would take most of the time."""


def install(loop: SimLoop, network: Network, disks: dict[str, Disk]) -> None:
    """From now on this process is the simulated cluster."""
    _install_network(network)
    _install_files(disks)
    _install_chance()
    _install_time(loop)
    _install_collector()
    _number_hashes(loop)


def _put(name: str, value: Any) -> None:
    """Replace a name in all modules of Downrange that imported it."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("downrange.") and hasattr(module, name):
            setattr(module, name, value)


def _install_network(network: Network) -> None:
    network.install()
    server.READS_TOGETHER = False  # type: ignore[misc]
    server.duplicate = lambda listening: listening  # type: ignore[attr-defined]
    server.Acceptor = master.Acceptor = SimAcceptor  # type: ignore[assignment,attr-defined]
    broker_app.listening_socket = lambda host, port: Listening(network, host, port)  # type: ignore[assignment,attr-defined,return-value]
    unique_id.local_address = session.local_address = lambda: current().machine.address  # type: ignore[attr-defined]


def _install_files(disks: dict[str, Disk]) -> None:
    def disk() -> Disk:
        return disks[current().machine.name]

    def needing_room(real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            if CURRENT.get() is not None:
                disk().needs_room()
            return real(*arguments, **options)

        return operation

    def own_disk() -> Disk | None:
        """None: the process writes to a disk that never fails."""
        process = CURRENT.get()
        return None if process is None else disks.get(process.machine.name)

    def fsync(descriptor: int) -> None:
        if (own := own_disk()) is not None:
            own.may_sync()

    real_replace = os.replace

    def replace(source: Any, target: Any) -> None:
        real_replace(source, target)
        if (own := own_disk()) is not None:
            own.replaced(os.fspath(source), os.fspath(target))

    files: Any = OsFiles
    files.sync = lambda self, descriptor: disk().synced(descriptor)
    files.sync_directory = lambda self, path: disk().names_synced(os.fspath(path))
    files.sync_file_system = lambda self, path: disk().all_synced()
    for name in ("create", "write_at", "reserve"):
        setattr(files, name, needing_room(getattr(files, name)))
    os.fsync = fsync  # type: ignore[assignment]
    os.replace = replace  # type: ignore[assignment]
    os.getpid = lambda: current().process_id if CURRENT.get() is not None else 1


def _install_chance() -> None:
    """All that draws without a source of its own draws from the one that the seed began."""

    class Seeded(random.Random):
        def __init__(self, seed: Any = None) -> None:
            super().__init__(random.getrandbits(64) if seed is None else seed)

    random.Random = Seeded  # type: ignore[assignment,misc]
    os.urandom = random.randbytes
    uuid.uuid4 = lambda: uuid.UUID(int=random.getrandbits(128), version=4)


def _install_collector() -> None:
    """A broker collects garbage when it starts: nothing may be collected here, and it would take most of the time."""
    gc.disable()
    gc.collect = lambda *_: 0
    gc.freeze = lambda: None
    broker_app.give_back_memory = lambda: None  # type: ignore[attr-defined]


def _install_time(loop: SimLoop) -> None:
    _put("perf_counter", loop.time)
    _put("monotonic", loop.time)
    _put("thread_time", lambda: 0.0)  # processors are never busy here, processes are stopped at most
    TimerIndex.__init__.__defaults__ = (OS_FILES, TIMER_SLOTS)
    admission.TICK_SECONDS = FLOW_TICK_SECONDS  # type: ignore[misc]
    flushing.EXPIRE_SECONDS = LOOK_SECONDS  # type: ignore[misc]
    silent_brokers.LOOK_SECONDS = probing.LOOK_SECONDS = LOOK_SECONDS  # type: ignore[misc]
    delay._LONGEST_PAUSE_SECONDS = revival._LONGEST_PAUSE_SECONDS = LONGEST_PAUSE_SECONDS  # type: ignore[misc]
    master._TICK_SECONDS = slave._TICK_SECONDS = LOOK_SECONDS  # type: ignore[misc]


def _number_hashes(loop: SimLoop) -> None:
    """Sets of these objects would have the order of their addresses, which the seed does not determine."""
    numbers = itertools.count(1)

    class Task(asyncio.Task):  # type: ignore[type-arg]
        _number = 0

        def __hash__(self) -> int:
            if not self._number:
                self._number = next(numbers)
            return self._number

    class Future(asyncio.Future):  # type: ignore[type-arg]
        _number = 0
        __hash__ = Task.__hash__

    def numbered(self: Any) -> int:
        if "_sim_number" not in self.__dict__:
            self._sim_number = next(numbers)
        return self._sim_number  # type: ignore[no-any-return]

    asyncio.tasks._all_tasks.add = loop.kept.append  # type: ignore[attr-defined]  # instead of a set of weak references
    loop.create_task = partial(Task, loop=loop)  # type: ignore[method-assign]
    loop.create_future = partial(Future, loop=loop)  # type: ignore[method-assign]
    Connection.__hash__ = numbered  # type: ignore[method-assign]
    master.SlaveLink.__hash__ = numbered  # type: ignore[method-assign]
