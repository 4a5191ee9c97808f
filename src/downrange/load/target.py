"""The broker under load: its address, and the topics and queues for the load."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from downrange.client.brokers import Broker, reachable
from downrange.client.config import ClientConfig
from downrange.client.errors import BrokerNotFound
from downrange.client.session import Session
from downrange.load.plans import MAX_QUEUES, MAX_TOPICS, TOPIC_DIGITS, check_range
from downrange.load.server_process import ServerProcess, listening_at
from downrange.model.topics import AUTO_CREATE_TOPIC, check_topic_name
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.statistics import TopicStats
from downrange.protocol.bodies.topics import CreateTopicRequest, TopicConfigTable, TopicRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request
from downrange.protocol.errors import BrokerError, TopicNotExist
from downrange.protocol.signing import Signer
from downrange.settings import ConfigError
from downrange.transport.tls import ClientTls

_CREATED_AT_ONCE: Final = 500


@dataclass(frozen=True, slots=True)
class Target:
    """One broker with one topic, or with several topics, whose names are `topic` and a number.

    `ranges` has the first offset and the end of each queue of a single topic, before the load.
    """

    address: str
    topic: str
    queues: int
    broker_name: str = ""
    ranges: Mapping[int, tuple[int, int]] | None = None
    server: ServerProcess | None = None
    topics: int = 1
    tls: ClientTls | None = None
    signer: Signer | None = None
    """The account of sends, if the broker asks for one."""


async def find_target(
    *,
    topic: str,
    queues: int,
    topics: int = 1,
    namesrv: str | None = None,
    broker: str | None = None,
    server_pid: int | None = None,
    config: ClientConfig | None = None,
) -> Target:
    """Find the broker and create missing topics; an existing topic keeps its queues, of which at most ten are used."""
    check_range("queues", queues, 1, MAX_QUEUES)
    check_range("topics", topics, 1, MAX_TOPICS)
    check_topic_name(_names(topic, topics)[-1])
    async with Session(config or ClientConfig.of(namesrv)) as session:
        one = reachable(await session.broker(broker) if broker else await _only_broker(session))
        ranges: dict[int, tuple[int, int]] = {}
        if topics == 1:
            ranges = await _ranges(session, one.address, topic)
            if not ranges:
                await _create(session, one.address, topic, queues)
                ranges = dict.fromkeys(range(queues), (0, 0))
            queues = len(ranges)
        else:
            queues = await _create_missing(session, one.address, _names(topic, topics), queues)
    server = listening_at(one.address) if server_pid is None else ServerProcess(server_pid)
    most = min(queues, MAX_QUEUES)
    return Target(one.address, topic, most, one.name, ranges, server, topics, session.tls, session.signer)


def _names(topic: str, topics: int) -> list[str]:
    return [topic] if topics == 1 else [f"{topic}-{number:0{TOPIC_DIGITS}}" for number in range(1, topics + 1)]


async def _only_broker(session: Session) -> Broker:
    masters = await session.masters()
    if not masters:
        raise BrokerNotFound(f"no broker is registered with name server {session.namesrv}; start one first")
    if len(masters) > 1:
        names = ", ".join(one.name for one in masters)
        raise ConfigError(f"the load goes to one broker; choose with --broker one of {names}")
    return masters[0]


async def _ranges(session: Session, address: str, topic: str) -> dict[int, tuple[int, int]]:
    """The offset range of each queue; empty when there is no such topic."""
    try:
        reply = await session.invoke(address, request(RequestCode.GET_TOPIC_STATS_INFO, TopicRequest(topic)))
    except TopicNotExist:
        return {}
    table = decode_body(TopicStats, reply.body_bytes).offset_table
    reach = {queue.queue_id: (offset.min_offset, offset.max_offset) for queue, offset in table.items()}
    return dict(sorted(reach.items()))


async def _create_missing(session: Session, address: str, names: list[str], queues: int) -> int:
    """Create missing topics; return the smallest number of queues of a topic."""
    reply = await session.invoke(address, request(RequestCode.GET_ALL_TOPIC_CONFIG))
    known = decode_body(TopicConfigTable, reply.body_bytes).topic_config_table
    missing = [name for name in names if name not in known]
    # Many at the same time, since the broker registers each topic with the name servers before it answers.
    for first in range(0, len(missing), _CREATED_AT_ONCE):
        await asyncio.gather(
            *(_create(session, address, name, queues) for name in missing[first : first + _CREATED_AT_ONCE])
        )
    there = [known[name].write_queue_nums for name in names if name in known]
    return min(there + [queues] * bool(missing))


async def _create(session: Session, address: str, topic: str, queues: int) -> None:
    header = CreateTopicRequest(
        topic=topic,
        default_topic=AUTO_CREATE_TOPIC,
        read_queue_nums=queues,
        write_queue_nums=queues,
        perm=6,
        topic_filter_type="SINGLE_TAG",
    )
    # We may not be allowed to create topics; perhaps the broker creates them when the first message arrives.
    with suppress(BrokerError):
        await session.invoke(address, request(RequestCode.UPDATE_AND_CREATE_TOPIC, header))
