"""The servers of a simulated cluster: name servers and brokers, each on a machine of its own."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from downrange.broker.app import RunningBroker, broker
from downrange.broker.config import BrokerConfig
from downrange.broker.services.delay import DelayService
from downrange.model.errors import MQError
from downrange.namesrv.app import name_server
from downrange.namesrv.config import NamesrvConfig
from downrange.store.config import BrokerRole, FlushDiskType, StoreConfig
from tests.sim.process import Process, State
from tests.sim.world import World

NAMESRV_PORT = 9876
BROKER_PORT = 10911
LOG_FILE_SIZE = 64 * 1024
LONGEST_DELAY_SECONDS = 120
FLUSH_WINDOW_SECONDS = 11.0
"""The longest that a message may be in memory only: a regular flush, and the thorough one every 10 s."""
TIMER_ROLL_SLOTS = 10
"""Timer messages that wait for more than so many seconds are stored again on their way."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the seed says about a cluster."""

    name_servers: int
    flush_disk_type: FlushDiskType
    broker_role: BrokerRole
    has_second_master: bool
    has_timers: bool
    """Producers also send messages that are due at a time of their own."""
    has_poppers: bool
    has_pipeline: bool


class Node:
    """A server that can be started and killed again and again, on one machine."""

    def __init__(self, world: World, name: str, *, has_disk: bool = False) -> None:
        self.world = world
        self.name = name
        self.machine = world.machine(name, has_disk=has_disk)
        self.process: Process | None = None
        self._stopping: asyncio.Event | None = None

    def __repr__(self) -> str:
        return f"<Node {self.name} {self.process}>"

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.state is not State.DEAD

    def start(self) -> None:
        if not self.is_alive:
            self.machine.is_up = True
            self.process = self.world.process(self.name, self.machine)
            self.process.start(self._main(self.process))

    async def _main(self, process: Process) -> None:
        self._stopping = asyncio.Event()
        try:
            async with self._server() as running:
                self._began(running)
                await self._stopping.wait()
        except (MQError, OSError, ExceptionGroup) as error:
            self._failed(error)
        if process.state is not State.DEAD:
            process.kill()
            self.world.network.killed(process)
            self._ended()

    def _server(self) -> AbstractAsyncContextManager[Any]:
        raise NotImplementedError

    def _began(self, running: Any) -> None:
        pass

    def _failed(self, error: BaseException) -> None:
        self.world.problems.append(f"{self.world.loop.time():.3f} s {self.name} ended: {error!r}")

    def _ended(self) -> None:
        pass

    def ask_to_stop(self) -> None:
        """SIGTERM."""
        if self.is_alive and self._stopping is not None:
            self._stopping.set()

    def kill(self, *, with_machine: bool = False) -> None:
        if self.process is not None and self.process.state is not State.DEAD:
            self.world.record("process", "died", process=self.name)
            self.process.kill()
            self.machine.is_up = not with_machine
            self.world.network.killed(self.process, silently=with_machine)
            self._killed(with_machine=with_machine)

    def _killed(self, *, with_machine: bool) -> None:
        pass


class NameServer(Node):
    def __init__(self, world: World, name: str, directory: Path) -> None:
        super().__init__(world, name)
        self.address = f"{self.machine.address}:{NAMESRV_PORT}"
        self._directory = directory

    def _server(self) -> AbstractAsyncContextManager[Any]:
        config = NamesrvConfig(
            listen_port=NAMESRV_PORT,
            bind_address=self.machine.address,
            kv_config_path=self._directory / "kvConfig.json",
            config_store_path=self._directory / "namesrv.properties",
        )
        return name_server(config, self.machine.clock)


class Broker(Node):
    """A master, or the slave of one."""

    def __init__(self, world: World, name: str, namesrv: str, shape: Shape, *, broker_id: int = 0) -> None:
        super().__init__(world, name if broker_id == 0 else f"{name}-slave", has_disk=True)
        self._broker_name = name
        self._namesrv = namesrv
        self.shape = shape
        self.is_slave = broker_id > 0
        self._broker_id = broker_id
        self.disk = world.disks[self.machine.name]
        self.running: RunningBroker | None = None
        self.trouble: BaseException | None = None
        """Why the last run ended by itself."""
        self._hindrances: dict[str, float] = {}
        """What keeps the broker from syncing its log now, and since when nothing was synced."""

    def _server(self) -> AbstractAsyncContextManager[Any]:
        role = BrokerRole.SLAVE if self.is_slave else self.shape.broker_role
        config = BrokerConfig(
            namesrv_addr=self._namesrv,
            broker_name=self._broker_name,
            broker_id=self._broker_id,
            broker_ip1=self.machine.address,
            bind_address=self.machine.address,
            listen_port=BROKER_PORT,
            default_topic_queue_nums=2,
            metrics_port=-1,
            busy_poll_micros=0,
            flush_consumer_offset_interval=10_000,
            transaction_check_interval=3000,
            transaction_time_out=2000,
            transaction_check_max=1000,  # rounds in which no producer is there count, too
        )
        store = StoreConfig(
            store_path_root_dir=self.disk.root,
            mapped_file_size_commit_log=LOG_FILE_SIZE,
            mapped_file_size_consume_queue=200 * 20,
            max_hash_slot_num=50,
            max_index_num=200,
            flush_disk_type=self.shape.flush_disk_type,
            broker_role=role,
            timer_wheel_enable=self.shape.has_timers,
            timer_roll_window_slot=TIMER_ROLL_SLOTS,
            timer_flush_interval_ms=5000,
            flush_interval_commit_log=1000,
            flush_interval_consume_queue=5000,
            mapped_file_size_timer_log=4096,
        )
        return broker(config, store, self.machine.clock)

    def hinder(self, reason: str) -> None:
        """From now on the broker cannot sync its log. It may have been hindered already, for other reasons."""
        self._hindrances[reason] = min([self.world.loop.time(), *self._hindrances.values()])

    def hinder_no_more(self, reason: str) -> None:
        self._hindrances.pop(reason, None)

    def _began(self, running: RunningBroker) -> None:
        self.running = running
        self.trouble = None

    def _failed(self, error: BaseException) -> None:
        self.trouble = error
        if not self.disk.was_faulty:
            super()._failed(error)
        self.world.record("process", "died", process=self.name)

    def _ended(self) -> None:
        self.running = None
        self._hindrances.clear()
        self.disk.keep_all()

    def _killed(self, *, with_machine: bool) -> None:
        self.running = None
        if with_machine:
            self._record_cut()
            self.disk.lose_power()
        else:
            self.disk.keep_all()
        self._hindrances.clear()

    def _record_cut(self) -> None:
        is_async = self.shape.flush_disk_type is FlushDiskType.ASYNC_FLUSH
        now = self.world.loop.time()
        stuck_seconds = now - min([now, *self._hindrances.values()])
        self.world.cut.add(self.name)
        self.world.record(
            "cut", "ok", process=self.name,
            window_nanos=int(FLUSH_WINDOW_SECONDS * 1e9) if is_async else 0, stuck_nanos=int(stuck_seconds * 1e9),
        )  # fmt: skip

    @property
    def waiting_messages(self) -> int:
        """How many delayed and timer messages are not delivered yet."""
        assert self.running is not None
        delay: DelayService = self.running.transactions._writer.on_delayed.__self__  # type: ignore[attr-defined]
        delayed = sum(end - offset for offset, end in delay.progress().values())
        timer = self.running.timer
        return delayed + timer.enqueue_behind + timer.count_overdue() + timer.count_within(LONGEST_DELAY_SECONDS)

    def log_checksum(self, first: int, end: int) -> int:
        """Of the bytes of the log between two offsets; the first is that of a file."""
        total = 0
        for path in sorted((self.disk.root / "commitlog").iterdir()):
            start = int(path.name)
            if first <= start < end:
                total = crc32(path.read_bytes()[: end - start], total)
        return total
