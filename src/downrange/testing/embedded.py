"""A broker and a name server on a thread of their own, on free ports, in a directory that is deleted at the end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import tempfile
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:  # pytest loads this file at every start, so the imports wait until a test asks for a broker
    from downrange.broker.app import RunningBroker
    from downrange.client.config import ProducerConfig
    from downrange.client.consumer.messages import ReceivedMessage
    from downrange.client.producer.blocking.producer import Producer
    from downrange.clock import ManualClock

T = TypeVar("T")

BROKER_NAME: Final = "broker-a"
# Small files, and no refusal of messages because the disk of a developer is nearly full.
_PROPERTIES: Final = {
    "mappedFileSizeCommitLog": str(64 << 20),
    "maxHashSlotNum": "10000",
    "maxIndexNum": "40000",
    "diskSpaceWarningLevelRatio": "100",
    "diskSpaceCleanForciblyRatio": "99",
    "diskMaxUsedSpaceRatio": "95",
    "metricsPort": "-1",
    "waitTimeMillsInSendQueue": "5000",  # a busy machine must not make sends fail
    "listenPort": "0",
    "brokerName": BROKER_NAME,
}


class EmbeddedBroker:
    """A running broker and its name server. Made by `broker()` only; any thread may call its methods."""

    def __init__(
        self,
        namesrv: str,
        running: RunningBroker,
        data: Path,
        loop: asyncio.AbstractEventLoop,
        clock: ManualClock | None,
    ) -> None:
        self.namesrv = namesrv
        """The address of the name server, for clients: `host:port`."""
        self.address = running.config.broker.address
        """The address of the broker itself."""
        self.data = data
        self._running = running
        self._loop = loop
        self._clock = clock
        self.clients = ExitStack()
        """Closes clients before the broker stops; `mq.clients.enter_context(…)` adds one of your own."""

    def __repr__(self) -> str:
        return f"<EmbeddedBroker namesrv={self.namesrv} broker={self.address}>"

    def producer(self, group: str = "testing", config: ProducerConfig | None = None) -> Producer:
        """A started producer; closed with the broker at the latest."""
        from downrange.client.producer.blocking.producer import Producer

        return self.clients.enter_context(Producer(group, self.namesrv, config))

    def create_topic(self, topic: str, queues: int = 4) -> None:
        """Create a topic with a certain number of queues; without this, the first message creates its topic."""
        from downrange.client.admin import Admin
        from downrange.client.config import ClientConfig
        from downrange.model.topics import TopicConfig

        async def create() -> None:
            async with Admin(ClientConfig.of(self.namesrv)) as admin:
                (await admin.topics.create(TopicConfig(topic, queues, queues))).raise_if_none()

        self._run(create())

    def messages(self, topic: str) -> list[ReceivedMessage]:
        """All messages of a topic in the order of their arrival, with the bodies as they were sent."""

        async def read() -> list[ReceivedMessage]:  # the store belongs to the broker's thread
            return self._read(topic)

        return self._run(read())

    def wait_for(self, topic: str, count: int, timeout: float = 5.0) -> list[ReceivedMessage]:
        """Wait until a topic has `count` messages and return all; TimeoutError when they do not come."""

        async def wait() -> list[ReceivedMessage]:
            try:
                async with asyncio.timeout(timeout):
                    while self._count(topic) < count:  # noqa: ASYNC110  a store tells nobody that it grew
                        await asyncio.sleep(0.002)
            except TimeoutError:
                raise TimeoutError(f"{self._count(topic)} of {count} messages in {topic} after {timeout:g} s") from None
            return self._read(topic)

        return self._run(wait())

    def advance(self, seconds: float) -> None:
        """Move the broker's clock, which makes delayed messages and retries due. Needs `broker(clock=…)`."""
        if self._clock is None:
            raise RuntimeError("this broker runs on the machine's clock: start it with broker(clock=ManualClock())")
        self._run(self._clock.advance(seconds))

    def _count(self, topic: str) -> int:
        store = self._running.store
        return sum(
            store.max_offset_of(topic, queue_id) - store.min_offset_of(topic, queue_id)
            for queue_id in self._queue_ids(topic)
        )

    def _queue_ids(self, topic: str) -> list[int]:
        return sorted(queue_id for name, queue_id in self._running.store.queues.names() if name == topic)

    def _read(self, topic: str) -> list[ReceivedMessage]:
        from downrange.client.consumer.messages import read_pulled
        from downrange.model.message import MessageQueue

        store = self._running.store
        found: list[ReceivedMessage] = []
        for queue_id in self._queue_ids(topic):
            queue = MessageQueue(topic, self._running.config.broker.broker_name, queue_id)
            offset: int = store.min_offset_of(topic, queue_id)
            end = store.max_offset_of(topic, queue_id)
            while offset < end:
                result = store.read(topic, queue_id, offset, 1000)
                for records in result.slices:
                    found += read_pulled(
                        bytes(records), queue, min_offset=result.min_offset, max_offset=result.max_offset
                    )
                offset = max(result.next_begin_offset, offset + 1)
        return sorted(found, key=lambda message: message.physical_offset)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class _Servers:
    """The thread that runs a name server and a broker. `start` returns when both serve, `stop` when both are gone."""

    def __init__(self, data: Path, properties: Mapping[str, str], clock: ManualClock | None) -> None:
        self._data = data
        self._properties = properties
        self._clock = clock
        self._started: concurrent.futures.Future[EmbeddedBroker] = concurrent.futures.Future()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wanted = asyncio.Event()
        # A daemon: an aborted test run must not wait for this thread.
        self._thread = threading.Thread(target=self._main, name="downrange broker", daemon=True)

    def start(self) -> EmbeddedBroker:
        self._thread.start()
        return self._started.result()

    def stop(self) -> None:
        """Stop both servers; raises the error with which the broker failed, if it did."""
        if self._loop is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the broker failed and its loop is closed already
                self._loop.call_soon_threadsafe(self._wanted.set)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _main(self) -> None:
        from downrange.transport.loop import run

        try:
            run(self._serve())
        except BaseException as error:  # raised in the thread that waits for us
            if self._started.done():
                self._failure = error
            else:
                self._started.set_exception(error)

    async def _serve(self) -> None:
        from downrange.broker.app import broker, load_config
        from downrange.namesrv.app import name_server
        from downrange.namesrv.config import NamesrvConfig
        from downrange.settings import Property

        self._loop = asyncio.get_running_loop()
        names = NamesrvConfig(
            listen_port=0,
            kv_config_path=self._data / "namesrv" / "kvConfig.json",
            config_store_path=self._data / "namesrv" / "namesrv.properties",
        )
        async with name_server(names) as namesrv:
            address = f"127.0.0.1:{namesrv.port}"
            given = {**_PROPERTIES, "namesrvAddr": address, "storePathRootDir": str(self._data / "store")}
            given |= self._properties
            config, store, _ = load_config(None, {key: Property(value, "test") for key, value in given.items()})
            async with broker(config, store, self._clock) as running:
                self._started.set_result(EmbeddedBroker(address, running, self._data, self._loop, self._clock))
                await self._wanted.wait()


@contextmanager
def broker(
    properties: Mapping[str, str] | None = None, *, data: Path | None = None, clock: ManualClock | None = None
) -> Iterator[EmbeddedBroker]:
    """A broker that runs for the length of a `with` block.

    `properties` are keys of a broker.conf, `data` a directory to keep, `clock` a clock that moves only with
    `EmbeddedBroker.advance`. A broker that failed meanwhile raises its error at the end of the block.
    """
    with ExitStack() as stack:
        directory = data or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="downrange-")))
        servers = _Servers(directory, dict(properties or {}), clock)
        stack.callback(servers.stop)
        running = servers.start()
        with running.clients:
            yield running
