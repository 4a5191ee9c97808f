"""One simulated cluster: its loop, network, machines and disks, the random numbers of its seed, and its history."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from zlib import crc32

from downrange.broker.handlers.offsets import OffsetHandlers
from downrange.model.topics import RETRY_PREFIX
from downrange.protocol.bodies.offsets import UpdateConsumerOffsetRequest
from downrange.protocol.command import Command
from downrange.store.message_store import MessageStore
from downrange.store.recovery import RecoveryReport
from downrange.transport.connection import Connection
from tests.sim import seams
from tests.sim.disk import Disk
from tests.sim.loop import SimLoop, sleep
from tests.sim.network import Network, SimTransport
from tests.sim.process import CURRENT, Machine, Process, SimClock, current
from tests.support.history import Event


class World:
    """All that a run consists of. Two of one seed do the same, to the byte."""

    def __init__(self, seed: int, directory: Path) -> None:
        random.seed(seed)
        self.seed = seed
        self.chance = random.Random(f"{seed} workload")
        self.loop = SimLoop(random.Random(f"{seed} threads"))
        self.network = Network(self.loop, random.Random(f"{seed} network"))
        self.disks: dict[str, Disk] = {}
        self.history: list[Event] = []
        self.problems: list[str] = []
        """Errors that nobody handled; each is a fault, whatever the history says."""
        self._directory = directory
        self.loop.set_exception_handler(self._unhandled)
        seams.install(self.loop, self.network, self.disks)
        self.cut: set[str] = set()
        """Brokers whose machines lost power, and whose stores are not open again."""
        self._record_commits()
        self._record_ends()

    def machine(self, name: str, *, has_disk: bool = False) -> Machine:
        machine = Machine(name, f"10.0.0.{len(self.network.machines) + 1}", SimClock(self.loop, sleep))
        self.network.machines[machine.address] = machine
        if has_disk:
            self.disks[name] = Disk(self._directory / name, random.Random(f"{self.seed} disk {name}"))
        return machine

    def process(self, name: str, machine: Machine) -> Process:
        return Process(name, machine, self.loop)

    def record(
        self, op: str, phase: str, *, process: str | None = None, time: int | None = None, **members: Any
    ) -> None:
        """Put an event into the history, as of now or of an earlier time."""
        if process is None:
            owner = CURRENT.get()
            process = owner.name if owner is not None else "simulation"
        if time is None:
            time = int(self.loop.time() * 1e9)
        self.history.append(Event(time=time, process=process, op=op, phase=phase, **members))

    def _record_commits(self) -> None:
        """Brokers note in the history what members of groups commit."""
        right = OffsetHandlers.commit

        def commit(handlers: OffsetHandlers, command: Command, connection: Connection) -> Command:
            reply = right(handlers, command, connection)
            header = command.header(UpdateConsumerOffsetRequest)
            transport = connection._transport
            assert isinstance(transport, SimTransport)
            queue = f"{current().name}/{header.queue_id}"
            where: dict[str, Any] = {"topic": header.topic, "queue": queue, "offset": header.commit_offset}
            member = transport.peer.process.name
            self.record("commit", "ok", process=member, group=header.consumer_group, **where)
            return reply

        OffsetHandlers.commit = commit  # type: ignore[method-assign,assignment]

    def _record_ends(self) -> None:
        """Brokers note in the history where their queues end after a power cut."""
        right = MessageStore.start

        def start(store: MessageStore) -> RecoveryReport:
            report = right(store)
            broker = current().name if CURRENT.get() is not None else ""
            if broker in self.cut:
                self.cut.remove(broker)
                for topic, queue_id in store.queues.names():
                    state = store.queues.get(topic, queue_id)
                    if state is not None and state.queue.max_offset:
                        self._record_end(broker, topic, queue_id, state.queue.max_offset)
            return report

        MessageStore.start = start  # type: ignore[assignment,method-assign]

    def _record_end(self, broker: str, topic: str, queue_id: int, end: int) -> None:
        if topic.startswith(RETRY_PREFIX):
            self.record("end", "ok", queue=f"{broker}/{topic}/{queue_id}", offset=end)
        else:
            self.record("end", "ok", topic=topic, queue=f"{broker}/{queue_id}", offset=end)

    def _unhandled(self, loop: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        where = ""
        if error is not None and error.__traceback__ is not None:
            trace = error.__traceback__
            while trace.tb_next is not None:
                trace = trace.tb_next
            where = f" at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
        process = CURRENT.get()
        name = process.name if process is not None else "?"
        self.problems.append(f"{loop.time():.3f} s {name}: {context['message']}: {error!r}{where}")


def checksum(body: bytes) -> int:
    return crc32(body)
