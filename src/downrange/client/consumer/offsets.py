"""How far a consumer is: committed at the broker for a group that shares, in a local file for one that broadcasts."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from downrange.client.consumer.addresses import address_of
from downrange.client.session import Session
from downrange.clock import Clock
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue
from downrange.model.topics import RETRY_PREFIX
from downrange.protocol.bodies.body import BodyError, decode_body
from downrange.protocol.bodies.consumers import QueueOffsets
from downrange.protocol.bodies.groups import ConsumeFromWhere
from downrange.protocol.bodies.offsets import (
    GetMaxOffsetRequest,
    OffsetResponse,
    QueryConsumerOffsetRequest,
    QueueRequest,
    SearchOffsetRequest,
    UpdateConsumerOffsetRequest,
)
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from downrange.protocol.errors import QueryNotFound
from downrange.settings import ConfigError
from downrange.transport.own_address import own_address

if TYPE_CHECKING:
    from downrange.client.consumer.config import ConsumerConfig
    from downrange.client.consumer.lite_pull_config import LitePullConfig

log = logging.getLogger(__name__)

PERSIST_SECONDS: Final = 5.0
LOCAL_DIRECTORY: Final = ".rocketmq_offsets"
HALF_AN_HOUR_MILLIS: Final = 30 * 60 * 1000


# --- asking brokers


async def committed_offset(session: Session, group: str, queue: MessageQueue) -> int | None:
    """What a group has committed, None when nothing. A broker answers 0 for a young queue, whatever group asks."""
    header = QueryConsumerOffsetRequest(
        consumer_group=group, topic=queue.topic, queue_id=queue.queue_id, bname=queue.broker_name
    )
    try:
        offset = await _ask_offset(session, queue, request(RequestCode.QUERY_CONSUMER_OFFSET, header))
    except QueryNotFound:
        return None
    return offset if offset >= 0 else None


async def max_offset(session: Session, queue: MessageQueue) -> int:
    """The offset the next message of the queue will get."""
    header = GetMaxOffsetRequest(topic=queue.topic, queue_id=queue.queue_id, bname=queue.broker_name)
    return await _ask_offset(session, queue, request(RequestCode.GET_MAX_OFFSET, header))


async def min_offset(session: Session, queue: MessageQueue) -> int:
    """The offset of the oldest message that is still there."""
    header = QueueRequest(topic=queue.topic, queue_id=queue.queue_id, bname=queue.broker_name)
    return await _ask_offset(session, queue, request(RequestCode.GET_MIN_OFFSET, header))


async def offset_by_time(session: Session, queue: MessageQueue, millis: int) -> int:
    """Where the messages stored at `millis` since 1970 begin."""
    header = SearchOffsetRequest(topic=queue.topic, queue_id=queue.queue_id, timestamp=millis, bname=queue.broker_name)
    return await _ask_offset(session, queue, request(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header))


async def commit_offset(
    session: Session, group: str, queue: MessageQueue, offset: int, *, confirmed: bool = True
) -> None:
    """Commit, and wait for the broker's word unless `confirmed` is False: then it may be lost with the connection."""
    header = UpdateConsumerOffsetRequest(
        consumer_group=group,
        topic=queue.topic,
        queue_id=queue.queue_id,
        commit_offset=offset,
        bname=queue.broker_name,
    )
    address = (await address_of(session, queue)).address
    if confirmed:
        await session.invoke(address, request(RequestCode.UPDATE_CONSUMER_OFFSET, header))
    else:
        await session.oneway(address, request(RequestCode.UPDATE_CONSUMER_OFFSET, header, oneway=True))


async def _ask_offset(session: Session, queue: MessageQueue, command: Command) -> int:
    address = (await address_of(session, queue)).address
    return (await session.invoke(address, command)).header(OffsetResponse).offset


async def start_offset(
    session: Session, queue: MessageQueue, known: int | None, where: ConsumeFromWhere, start_millis: int
) -> int:
    """Where to begin with a queue: at `known`, else as `where` says. Any failure means: not now."""
    if known is not None:
        return known
    is_retry = queue.topic.startswith(RETRY_PREFIX)
    match where:
        case ConsumeFromWhere.FIRST_OFFSET:
            return 0  # when older messages are gone, the first pull is told where the queue begins
        case ConsumeFromWhere.TIMESTAMP:
            return await (max_offset(session, queue) if is_retry else offset_by_time(session, queue, start_millis))
        case ConsumeFromWhere.LAST_OFFSET:
            return 0 if is_retry else await max_offset(session, queue)


# --- remembering


class OffsetTable:
    """The offset to go on from in each queue, and which of the offsets are not saved yet."""

    def __init__(self) -> None:
        self._offsets: dict[MessageQueue, int] = {}
        self._changed: set[MessageQueue] = set()

    def __repr__(self) -> str:
        return f"<OffsetTable {len(self._offsets)} queues, {len(self._changed)} changed>"

    def get(self, queue: MessageQueue) -> int | None:
        return self._offsets.get(queue)

    def all(self) -> dict[MessageQueue, int]:
        return dict(self._offsets)

    def update(self, queue: MessageQueue, offset: int, *, increase_only: bool = False) -> None:
        """Note that messages below `offset` are done. With `increase_only` a late call does not take an offset back."""
        known = self._offsets.get(queue)
        if known == offset or (increase_only and known is not None and known > offset):
            return
        self._offsets[queue] = offset
        self._changed.add(queue)

    def remember(self, queue: MessageQueue, offset: int) -> None:
        """Note an offset that is already kept elsewhere."""
        self._offsets[queue] = offset
        self._changed.discard(queue)

    def forget(self, queue: MessageQueue) -> None:
        self._offsets.pop(queue, None)
        self._changed.discard(queue)

    def take_changed(self, queues: Iterable[MessageQueue] | None = None) -> dict[MessageQueue, int]:
        """The changes that are not saved yet, of these queues or of all; from now on they count as saved."""
        wanted = self._changed & set(queues) if queues is not None else set(self._changed)
        self._changed -= wanted
        return {queue: self._offsets[queue] for queue in sorted(wanted)}

    def put_back(self, queue: MessageQueue) -> None:
        """Telling failed: try again with the next round."""
        if queue in self._offsets:
            self._changed.add(queue)


class OffsetStore(Protocol):
    """Where a consumer keeps its offsets. `table` is the memory; `load` and `persist` are the way in and out."""

    table: OffsetTable

    async def load(self, queue: MessageQueue) -> int | None:
        """What was kept for a queue, None when nothing; raises when that cannot be found out now."""
        ...

    async def persist(self, queues: Collection[MessageQueue] | None = None, *, confirmed: bool = False) -> bool:
        """Save the changed offsets, of these queues or of all; whether all were saved, as far as is known."""
        ...

    def forget(self, queue: MessageQueue) -> None:
        """The queue was given up; call it after `persist`."""
        ...


class RemoteOffsets:
    """Offsets of a group that shares its messages: the brokers keep them."""

    def __init__(self, session: Session, group: str) -> None:
        self.table = OffsetTable()
        self._session = session
        self._group = group

    def __repr__(self) -> str:
        return f"<RemoteOffsets {self._group} {self.table!r}>"

    async def load(self, queue: MessageQueue) -> int | None:
        return await committed_offset(self._session, self._group, queue)

    def forget(self, queue: MessageQueue) -> None:
        """Another member moves this offset now: ours would be stale when the queue comes back."""
        self.table.forget(queue)

    async def persist(self, queues: Collection[MessageQueue] | None = None, *, confirmed: bool = False) -> bool:
        """One request per queue, without waiting for answers unless `confirmed`."""
        everything_arrived = True
        for queue, offset in self.table.take_changed(queues).items():
            try:
                await commit_offset(self._session, self._group, queue, offset, confirmed=confirmed)
            except MQError as error:
                log.warning("offset not committed group=%s queue=%s reason=%s", self._group, queue, error)
                self.table.put_back(queue)
                everything_arrived = False
            except BaseException:
                self.table.put_back(queue)
                raise
        return everything_arrived


class LocalOffsets:
    """Offsets of a consumer that broadcasts: a file of this machine, in the form and place of Java's.

    `<directory>/<client id>/<group>/offsets.json`, and the state before it as `offsets.json.bak`, from which we read
    when the newer one cannot be read.
    """

    def __init__(self, directory: Path, client_id: str, group: str) -> None:
        self.table = OffsetTable()
        self.path = directory / client_id / group / "offsets.json"
        self._loaded = False

    def __repr__(self) -> str:
        return f"<LocalOffsets {self.path} {self.table!r}>"

    @property
    def _backup(self) -> Path:
        return self.path.with_name(self.path.name + ".bak")

    async def load(self, queue: MessageQueue) -> int | None:
        if not self._loaded:
            self._loaded = True
            for known, offset in self._read().items():
                if self.table.get(known) is None:
                    self.table.remember(known, offset)
        return self.table.get(queue)

    def forget(self, queue: MessageQueue) -> None:
        """Broadcasting consumers move their offsets alone, and the file keeps them."""

    def _read(self) -> dict[MessageQueue, int]:
        problem: Exception | None = None
        for path in (self.path, self._backup):
            try:
                return dict(decode_body(QueueOffsets, path.read_bytes()).offset_table)
            except FileNotFoundError:
                continue
            except (OSError, BodyError) as error:
                problem = error
                log.warning("offset file cannot be read path=%s reason=%s", path, error)
        if problem is not None:
            raise ConfigError(
                f"neither {self.path} nor its .bak can be read ({problem}); repair them, or delete both to start anew"
            )
        return {}

    async def persist(self, queues: Collection[MessageQueue] | None = None, *, confirmed: bool = False) -> bool:
        """Write all offsets when one of them changed. A file cut short by a crash never takes the place of a whole."""
        changed = self.table.take_changed()
        if not changed:
            return True
        try:
            self._write(_pretty(self.table.all()))
        except OSError as error:
            log.error("offset file cannot be written path=%s reason=%s", self.path, error)
            for queue in changed:
                self.table.put_back(queue)
            return False
        return True

    def _write(self, data: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_name(self.path.name + ".tmp")
        with fresh.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if self.path.exists():
            self.path.replace(self._backup)
        fresh.replace(self.path)


def offset_store(session: Session, group: str, config: ConsumerConfig | LitePullConfig) -> OffsetStore:
    """Where a consumer with this configuration keeps its offsets."""
    if not config.is_broadcasting:
        return RemoteOffsets(session, group)
    client_id = f"{own_address()}@{config.instance_name}"
    return LocalOffsets(config.local_offset_store_dir, client_id, group)


async def persist_regularly(offsets: OffsetStore, clock: Clock, period_seconds: float) -> None:
    """Store what changed, for ever."""
    while True:
        await clock.sleep(period_seconds)
        await offsets.persist()


def _pretty(offsets: dict[MessageQueue, int]) -> bytes:
    """As Java writes it: indented by tabs, the queue itself in the place of a key."""
    rows = [
        f"""{{
\t\t\t"brokerName":{json.dumps(queue.broker_name)},
\t\t\t"queueId":{queue.queue_id},
\t\t\t"topic":{json.dumps(queue.topic)}
\t\t}}:{offset}"""
        for queue, offset in sorted(offsets.items())
    ]
    return ('{\n\t"offsetTable":{' + ",".join(rows) + "\n\t}\n}").encode()
