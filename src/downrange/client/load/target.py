"""The broker under load: where it is, the topic it gets, the queues of that topic."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from downrange.client.config import ClientConfig
from downrange.client.errors import BrokerNotFound
from downrange.client.load.plans import MAX_QUEUES
from downrange.client.load.server_process import ServerProcess, listening_at
from downrange.client.session import Broker, Session, reachable
from downrange.model.topics import AUTO_CREATE_TOPIC, check_topic_name
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.statistics import TopicStats
from downrange.protocol.bodies.topics import CreateTopicRequest, TopicRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request
from downrange.protocol.errors import BrokerError, TopicNotExist
from downrange.settings import ConfigError


@dataclass(frozen=True, slots=True)
class Target:
    """One broker and one topic of it. `ranges`: the first offset and the end of each queue, before the load."""

    address: str
    topic: str
    queues: int
    broker_name: str = ""
    ranges: Mapping[int, tuple[int, int]] | None = None
    server: ServerProcess | None = None


async def find_target(
    *, topic: str, queues: int, namesrv: str | None = None, broker: str | None = None, server_pid: int | None = None
) -> Target:
    """Find the broker, and create the topic unless it is there: then it keeps its queues, of which ten are used."""
    check_topic_name(topic)
    if not 1 <= queues <= MAX_QUEUES:
        raise ConfigError(f"queues {queues}: expected 1 to {MAX_QUEUES}")
    async with Session(ClientConfig.of(namesrv)) as session:
        one = reachable(await session.broker(broker) if broker else await _only_broker(session))
        ranges = await _ranges(session, one.address, topic)
        if not ranges:
            await _create(session, one.address, topic, queues)
            ranges = dict.fromkeys(range(queues), (0, 0))
    server = listening_at(one.address) if server_pid is None else ServerProcess(server_pid)
    return Target(one.address, topic, min(len(ranges), MAX_QUEUES), one.name, ranges, server)


async def _only_broker(session: Session) -> Broker:
    masters = await session.masters()
    if not masters:
        raise BrokerNotFound(f"no broker is registered with name server {session.namesrv}; start one first")
    if len(masters) > 1:
        names = ", ".join(one.name for one in masters)
        raise ConfigError(f"the load goes to one broker; choose with --broker one of {names}")
    return masters[0]


async def _ranges(session: Session, address: str, topic: str) -> dict[int, tuple[int, int]]:
    """The reach of each queue, of none when there is no such topic."""
    try:
        reply = await session.invoke(address, request(RequestCode.GET_TOPIC_STATS_INFO, TopicRequest(topic)))
    except TopicNotExist:
        return {}
    table = decode_body(TopicStats, reply.body_bytes).offset_table
    reach = {queue.queue_id: (offset.min_offset, offset.max_offset) for queue, offset in table.items()}
    return dict(sorted(reach.items()))


async def _create(session: Session, address: str, topic: str, queues: int) -> None:
    header = CreateTopicRequest(
        topic=topic,
        default_topic=AUTO_CREATE_TOPIC,
        read_queue_nums=queues,
        write_queue_nums=queues,
        perm=6,
        topic_filter_type="SINGLE_TAG",
    )
    # Not everybody may create topics; perhaps the broker does so when the first message arrives.
    with suppress(BrokerError):
        await session.invoke(address, request(RequestCode.UPDATE_AND_CREATE_TOPIC, header))
