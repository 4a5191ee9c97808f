"""The clients of a round as processes, what they wrote down, and what an auditor reads in the end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

import msgspec

from downrange.model.record import decode_records
from tests.chaos.clients import QUEUES, TOPIC, checksum, id_of
from tests.support.broker_client import BrokerClient
from tests.support.checked_store import REPOSITORY
from tests.support.history import Event, HistoryWriter, load
from tests.support.processes import Running
from tests.support.requests import connected, create_topic, max_offset, wait_for_route

PROGRAM: Final = (sys.executable, "-m", "tests.chaos.clients")
GROUP: Final = "chaos-consumers"
_PULLED: Final = 1024
_OK: Final = b'"phase":"ok"'


class Stage:
    """Starts clients, follows their histories, and ends them. Each writes a file of its own."""

    def __init__(self, directory: Path, namesrv: str) -> None:
        self._directory = directory / "history"
        self._directory.mkdir(parents=True)
        self._namesrv = namesrv
        self._numbers = count(1)
        self.clients: dict[str, Running] = {}
        self.notes = HistoryWriter(self._directory / "notes.jsonl", "runner")

    async def start(self, kind: str, last: str = GROUP, *, prefix: tuple[str, ...] = ()) -> str:
        """A new client; its name. `prefix` is what its command line begins with."""
        name = f"{kind}{next(self._numbers)}"
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        arguments = (kind, self._namesrv, str(self._directory / f"{name}.jsonl"), name, last)
        client = Running(*arguments, program=(*prefix, *PROGRAM), env={"PYTHONPATH": path})
        self.clients[name] = client
        await asyncio.to_thread(client.wait_for, "ready")
        return name

    def events(self, names: str = "*") -> list[Event]:
        return load(*self._directory.glob(f"{names}.jsonl"))

    def written(self, name: str) -> int:
        """How many bytes a client has written down so far."""
        path = self._directory / f"{name}.jsonl"
        return path.stat().st_size if path.exists() else 0

    def answered(self, name: str) -> int:
        """How many sends of a producer were acknowledged so far, or how many messages a consumer got."""
        return (self._directory / f"{name}.jsonl").read_bytes().count(_OK)

    async def goes_on(self, name: str, bytes_more: int, seconds: float = 60.0) -> None:
        """Wait until a client has got so much further."""
        wanted = self.written(name) + bytes_more
        try:
            async with asyncio.timeout(seconds):
                while self.written(name) < wanted:
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"{name} did not go on within {seconds:g} s: {self.clients[name].errors}") from None

    async def acknowledged(self, name: str, more: int, seconds: float = 60.0) -> None:
        """Wait until so many more sends of a producer were acknowledged."""
        place, found = self.written(name), 0
        async with asyncio.timeout(seconds):
            while found < more:
                await asyncio.sleep(0.01)
                with (self._directory / f"{name}.jsonl").open("rb") as file:
                    file.seek(place)
                    data = file.read()
                place += len(data)
                found += data.count(_OK)

    async def rebalanced(self, members: Sequence[str], seconds: float = 60.0) -> None:
        """Wait until each member has consumed some message since now, and they together some of each queue."""
        places = {name: self.written(name) for name in members}
        idle, queues = set(members), {f'"queue":"broker-a/{number}"'.encode() for number in range(QUEUES)}
        try:
            async with asyncio.timeout(seconds):
                while idle or queues:
                    await asyncio.sleep(0.02)
                    for name in members:
                        with (self._directory / f"{name}.jsonl").open("rb") as file:
                            file.seek(places[name])
                            data = file.read()
                        places[name] += len(data)
                        queues -= {queue for queue in queues if queue in data}
                        idle -= {name} if data else set()
        except TimeoutError:
            raise AssertionError(f"nobody consumes {queues}, and {idle} nothing, after {seconds:g} s") from None

    async def kill(self, name: str) -> None:
        """kill -9; the history knows of it before anybody else can."""
        client = self.clients.pop(name)
        client.signal(signal.SIGSTOP)
        note = HistoryWriter(self._directory / "notes.jsonl", name)
        note.write("process", "died")
        note.close()
        await asyncio.to_thread(client.kill)
        client.close()

    async def leave(self, name: str) -> None:
        """End one client in order."""
        client = self.clients.pop(name)
        code = await asyncio.to_thread(client.stop)
        errors = client.errors
        client.close()
        assert code == 0, f"{name} ended with {code}: {errors}"

    async def end(self, *kinds: str) -> None:
        """End the clients of these kinds in order."""
        for name in [name for name in self.clients if name.rstrip("0123456789") in kinds]:
            await self.leave(name)

    async def until_consumed(self, kind: str, seconds: float = 90.0) -> None:
        """Until consumers have got what was acknowledged; if they do not, the checker will tell what is missing."""
        wanted = {
            event.id for event in await asyncio.to_thread(self.events) if event.op == "send" and event.phase == "ok"
        }
        places = dict.fromkeys(self._directory.glob(f"{kind}*.jsonl"), 0)
        decoder = msgspec.json.Decoder(Event)
        deadline = asyncio.get_running_loop().time() + seconds
        while wanted and asyncio.get_running_loop().time() < deadline:
            for path in places:
                with path.open("rb") as file:
                    file.seek(places[path])
                    data = file.read()
                whole = data[: data.rfind(b"\n") + 1]
                places[path] += len(whole)
                wanted.difference_update(decoder.decode(line).id for line in whole.splitlines())
            await asyncio.sleep(0.1)

    async def audit(
        self, addresses: Iterable[str], begins: Sequence[int] = (0,) * QUEUES, ends: Sequence[int] | None = None
    ) -> None:
        """Read every queue of these brokers: as a whole, or from its offset in `begins` to the one in `ends`."""
        writer = HistoryWriter(self._directory / "auditor.jsonl", "auditor")
        for address in addresses:
            async with connected(address) as client:
                for queue_id in range(QUEUES):
                    end = await max_offset(client, TOPIC, queue_id) if ends is None else ends[queue_id]
                    await self._read(client, writer, queue_id, begins[queue_id], end)
        writer.close()

    @staticmethod
    async def _read(client: BrokerClient, writer: HistoryWriter, queue_id: int, offset: int, end: int) -> None:
        """One queue from an offset to another, which is not read any more."""
        while offset < end:
            command = client.pull_command(TOPIC, queue_id=queue_id, offset=offset, most=_PULLED, group="auditors")
            reply = await client.connection.request(command, 10)
            messages = list(decode_records(reply.body_bytes)) if reply.code == 0 else []
            assert messages, f"no message at {offset} of queue {queue_id}, which ends at {end}: {reply.remark}"
            for message in messages[: end - offset]:
                place: dict[str, Any] = {"queue": f"broker-a/{queue_id}", "offset": message.queue_offset}
                body = message.body
                writer.write("read", "ok", topic=TOPIC, **place, id=id_of(body), crc=checksum(body))
            offset = messages[-1].queue_offset + 1

    def close(self) -> None:
        for client in self.clients.values():
            client.close()
        self.notes.close()


@asynccontextmanager
async def stage(directory: Path, namesrv: str, broker: str) -> AsyncIterator[Stage]:
    """Clients of a cluster that has the topic."""
    async with connected(broker) as client:
        await create_topic(client, TOPIC, QUEUES)
    async with connected(namesrv) as client:
        await wait_for_route(client, TOPIC)
    made = Stage(directory, namesrv)
    try:
        yield made
    finally:
        made.close()
