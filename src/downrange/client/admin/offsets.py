"""Moving a group to another place in a topic: by time, to the end, or to where another group is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from downrange.client.admin.groups import GroupAdmin
from downrange.client.admin.queue_reading import committed_at
from downrange.client.brokers import Broker, master_of, reachable, sorted_brokers
from downrange.client.errors import GroupNotFound, GroupOnline, NoRoute
from downrange.client.per_server import PerServer, ask_each
from downrange.client.session import Session
from downrange.model.errors import MessageError
from downrange.model.message import MessageQueue
from downrange.model.text import Text
from downrange.model.topics import Perm
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.consumers import QueueOffsets, ResetOffsetRequest
from downrange.protocol.bodies.offsets import (
    GetMaxOffsetRequest,
    OffsetResponse,
    SearchOffsetRequest,
    UpdateConsumerOffsetRequest,
)
from downrange.protocol.bodies.routes import TopicRouteData
from downrange.protocol.bodies.statistics import ConsumeStats, ConsumeTimeSpanRequest, ConsumeTimeSpans, QueueTimeSpan
from downrange.protocol.codes import LanguageCode, RequestCode
from downrange.protocol.command import Command, request
from downrange.protocol.errors import ConsumerNotOnline, InternalError

END = -1
"""As a timestamp: the end of every queue."""


@dataclass(frozen=True, slots=True)
class QueueMove:
    """One queue of a reset: its end, the group's offset before, and the new one.

    Unknown are the first two when the broker did the move, and the committed offset when there is none.
    """

    queue: MessageQueue
    max_offset: int | None
    committed: int | None
    target: int


@dataclass(frozen=True, slots=True)
class BrokerMoves:
    """The effect of a reset on one broker. `online`: the broker told the running members; else offsets were written."""

    moves: tuple[QueueMove, ...]
    online: bool
    applied: bool


class OffsetAdmin:
    """Actions on committed offsets, on all brokers of a topic."""

    def __init__(self, session: Session, groups: GroupAdmin) -> None:
        self._session = session
        self._groups = groups

    async def reset(
        self,
        group: str,
        topic: str,
        timestamp: int,
        *,
        force: bool = True,
        dry_run: bool = False,
        for_cpp: bool = False,
    ) -> PerServer[Broker, BrokerMoves]:
        """Let a group continue at the messages stored at `timestamp`, or at the END.

        Running members are told by their broker, with `for_cpp` in the form that C++ clients read. Where none is
        connected the offsets are written as if the group had committed them. Without `force` no queue moves forward, so
        nothing is skipped. A dry run changes nothing.
        """
        route = await self._session.look_up_route(topic)

        async def ask(broker: Broker) -> BrokerMoves:
            queues = read_queues(route, topic, broker)
            if dry_run:
                online = await self._groups.connections_on(reachable(broker), group) is not None
                return BrokerMoves(await self._plan(broker, group, queues, timestamp, force), online, applied=False)
            header = ResetOffsetRequest(topic=topic, group=group, timestamp=timestamp, is_force=force)
            return await self._reset_on(broker, header, queues, for_cpp)

        return await ask_each([master_of(data) for data in sorted_brokers(route)], ask)

    async def skip_accumulated(
        self, group: str, topic: str, *, dry_run: bool = False
    ) -> PerServer[Broker, BrokerMoves]:
        """Let a group continue with the next message sent, without the messages that wait."""
        return await self.reset(group, topic, END, force=True, dry_run=dry_run)

    async def clone(
        self, source: str, target: str, topic: str, *, dry_run: bool = False
    ) -> PerServer[Broker, BrokerMoves]:
        """Let `target` continue where `source` is. Refused while members of `target` are running."""
        stats = await self._groups.progress(source, topic)
        if not stats.failed and not any(one.offset_table for one in stats.done.values()):
            raise GroupNotFound(Text("the group {source} has committed nothing of {topic}", source=source, topic=topic))

        async def ask(broker: Broker) -> BrokerMoves:
            moves = tuple(
                QueueMove(queue, offsets.broker_offset, None, offsets.consumer_offset)
                for queue, offsets in sorted(stats.done[broker].offset_table.items())
                if queue.topic == topic
            )
            return await self._write(broker, target, moves, dry_run)

        cloned = await ask_each(stats.done, ask)
        return PerServer(cloned.done, {**stats.failed, **cloned.failed})

    async def move_queue(
        self, group: str, queue: MessageQueue, offset: int, *, dry_run: bool = False
    ) -> PerServer[Broker, BrokerMoves]:
        """Let a group continue at an offset of one queue. Refused while members of the group are running."""
        route = await self._session.look_up_route(queue.topic)
        brokers = [master_of(data) for data in route.broker_datas if data.broker_name == queue.broker_name]
        if not brokers or queue not in read_queues(route, queue.topic, brokers[0]):
            raise NoRoute(
                queue.topic,
                Text(
                    "the topic {topic} has no queue {queue_id} on {broker_name}",
                    topic=queue.topic,
                    queue_id=queue.queue_id,
                    broker_name=queue.broker_name,
                ),
            )

        async def ask(broker: Broker) -> BrokerMoves:
            end = await self._end(broker, queue)
            if not 0 <= offset <= end:
                raise MessageError(
                    Text(
                        "queue {queue_id} of {broker_name} ends at {end}; {offset} is beyond",
                        queue_id=queue.queue_id,
                        broker_name=queue.broker_name,
                        end=end,
                        offset=offset,
                    )
                )
            await self._check_group(broker, group)
            return await self._write(broker, group, (QueueMove(queue, end, None, offset),), dry_run)

        return await ask_each(brokers, ask)

    async def write(self, group: str, moves: Mapping[Broker, Sequence[QueueMove]]) -> PerServer[Broker, BrokerMoves]:
        """Write offsets of a group that were planned before. Refused where members of the group are running."""

        async def ask(broker: Broker) -> BrokerMoves:
            await self._check_group(broker, group)
            return await self._write(broker, group, tuple(moves[broker]), dry_run=False)

        return await ask_each(moves, ask)

    async def time_spans(self, group: str, topic: str) -> PerServer[Broker, tuple[QueueTimeSpan, ...]]:
        """Store times of the oldest, the newest and the last consumed message of each queue, and how late a group is.

        `delay_time` is the age of the oldest message that waits, in milliseconds; 0 where none waits.
        """
        return await ask_each(
            await self._session.masters_of_topic(topic), lambda broker: self.time_spans_on(broker, group, topic)
        )

    async def time_spans_on(self, broker: Broker, group: str, topic: str) -> tuple[QueueTimeSpan, ...]:
        command = request(RequestCode.QUERY_CONSUME_TIME_SPAN, ConsumeTimeSpanRequest(topic, group))
        reply = await self._session.ask(broker, command)
        return decode_body(ConsumeTimeSpans, reply.body_bytes).consume_time_span_set

    async def ages(self, group: str, progress: Mapping[Broker, ConsumeStats]) -> dict[MessageQueue, int]:
        """The age in milliseconds of the oldest message that waits for a group, by queue, where a broker tells it.

        `progress` is the progress of the group on each broker: only topics in which something waits are asked for.
        """
        asked = {
            (broker, queue.topic)
            for broker, stats in progress.items()
            for queue, offsets in stats.offset_table.items()
            if offsets.behind > 0
        }
        spans = await ask_each(asked, lambda one: self.time_spans_on(one[0], group, one[1]))
        return {span.message_queue: span.delay_time for told in spans.done.values() for span in told}

    async def _write(self, broker: Broker, group: str, moves: tuple[QueueMove, ...], dry_run: bool) -> BrokerMoves:
        online = await self._groups.connections_on(broker, group) is not None
        if dry_run:
            seen = [
                replace(move, committed=await committed_at(self._session, broker, group, move.queue)) for move in moves
            ]
            return BrokerMoves(tuple(seen), online, applied=False)
        if online:
            raise GroupOnline(
                Text("members of {group} are running and would overwrite its offsets; stop them first", group=group)
            )
        for move in moves:
            await self._commit(broker, group, move)
        return BrokerMoves(moves, online=False, applied=True)

    async def _check_group(self, broker: Broker, group: str) -> None:
        """A mistyped group must not get offsets: only one the broker knows does."""
        if group not in await self._groups.configs_of(broker):
            raise GroupNotFound(
                Text("the consumer group {group} is unknown on this broker; create it first", group=group)
            )

    async def _reset_on(
        self, broker: Broker, header: ResetOffsetRequest, queues: list[MessageQueue], for_cpp: bool
    ) -> BrokerMoves:
        group, topic = header.group, header.topic
        command = request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header)
        try:
            # A broker tells its members in the form for the language of the one who asks.
            if for_cpp:
                command = msgspec.structs.replace(command, language=LanguageCode.CPP)
            reply = await self._session.ask(broker, command)
        except ConsumerNotOnline:
            pass
        except InternalError as error:
            # 4.9 answers so when a queue has no committed offset, whether members are running or not.
            if "not exist" not in error.remark:
                raise
            if await self._groups.connections_on(broker, group) is not None:
                raise GroupOnline(
                    Text(
                        "{group} has not committed every queue of {topic} yet ({remark}); wait for its next commit",
                        group=group,
                        topic=topic,
                        remark=error.remark,
                    )
                ) from None
        else:
            offsets = decode_body(QueueOffsets, reply.body_bytes).offset_table
            moves = tuple(QueueMove(queue, None, None, offset) for queue, offset in sorted(offsets.items()))
            return BrokerMoves(moves, online=True, applied=True)
        await self._check_group(broker, group)
        moves = await self._plan(broker, group, queues, header.timestamp, header.is_force)
        for move in moves:
            await self._commit(broker, group, move)
        return BrokerMoves(moves, online=False, applied=True)

    async def _plan(
        self, broker: Broker, group: str, queues: list[MessageQueue], timestamp: int, force: bool
    ) -> tuple[QueueMove, ...]:
        moves = []
        for queue in queues:
            _, name, queue_id = queue
            max_offset = await self._end(broker, queue)
            committed = await committed_at(self._session, broker, group, queue)
            wanted = max_offset
            if timestamp != END:
                search = SearchOffsetRequest(topic=queue.topic, queue_id=queue_id, timestamp=timestamp, bname=name)
                wanted = await self._offset(broker, request(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, search))
            moves.append(QueueMove(queue, max_offset, committed, target_offset(wanted, committed, force)))
        return tuple(moves)

    async def _end(self, broker: Broker, queue: MessageQueue) -> int:
        header = GetMaxOffsetRequest(topic=queue.topic, queue_id=queue.queue_id, bname=queue.broker_name)
        return await self._offset(broker, request(RequestCode.GET_MAX_OFFSET, header))

    async def _commit(self, broker: Broker, group: str, move: QueueMove) -> None:
        header = UpdateConsumerOffsetRequest(
            consumer_group=group,
            topic=move.queue.topic,
            queue_id=move.queue.queue_id,
            commit_offset=move.target,
            bname=move.queue.broker_name,
        )
        await self._session.ask(broker, request(RequestCode.UPDATE_CONSUMER_OFFSET, header))

    async def _offset(self, broker: Broker, command: Command) -> int:
        return (await self._session.ask(broker, command)).header(OffsetResponse).offset


def target_offset(wanted: int, committed: int | None, force: bool) -> int:
    """The new offset of a queue; without `force` it only goes backwards, as when brokers reset offsets."""
    target = max(wanted, 0)
    return target if force or committed is None else min(target, committed)


def read_queues(route: TopicRouteData, topic: str, broker: Broker) -> list[MessageQueue]:
    """The queues consumers read on one broker."""
    return [
        MessageQueue(topic, broker.name, queue_id)
        for data in route.queue_datas
        if data.broker_name == broker.name and data.perm & Perm.READ
        for queue_id in range(data.read_queue_nums)
    ]
