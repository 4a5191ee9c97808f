"""`downrange group reset-offset` and others: where a group goes on, and how old what waits for it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from downrange.cli.cluster_actions import asks, shows
from downrange.cli.options import DryRun, Group, Topic, UsageError
from downrange.cli.output import Answer, Column, Table
from downrange.cli.times import parse_time, time_text

if TYPE_CHECKING:
    from downrange.client.admin import Admin
    from downrange.client.admin.offsets import BrokerMoves
    from downrange.client.brokers import Broker as BrokerProcess
    from downrange.client.per_server import PerServer


@asks
async def reset_offset(
    admin: Admin,
    group: Group,
    topic: Topic,
    to: Annotated[str, typer.Option("--time", "-s", help="`now` (the end), a local time, or milliseconds since 1970.")],
    force: Annotated[bool, typer.Option("--force/--no-force", help="Move forward, too, and skip messages.")] = True,
    dry_run: DryRun = False,
    cpp: Annotated[bool, typer.Option("--cpp", help="Tell running members in the form that C++ clients read.")] = False,
) -> Answer:
    """Let a group continue at the messages stored at a given time, whether its members are running or not."""
    timestamp = -1 if to in ("now", "-1") else parse_time(to)
    moves = await admin.offsets.reset(group, topic, timestamp, force=force, dry_run=dry_run, for_cpp=cpp)
    return _moves(group, topic, moves)


@asks
async def skip(admin: Admin, group: Group, topic: Topic, dry_run: DryRun = False) -> Answer:
    """Let a group continue with the next message that is sent. It will not consume messages that wait now."""
    return _moves(group, topic, await admin.offsets.skip_accumulated(group, topic, dry_run=dry_run))


@asks
async def clone(
    admin: Admin,
    source: Annotated[str, typer.Argument(help="Group whose offsets are taken.")],
    target: Annotated[str, typer.Argument(help="Group that gets the offsets.")],
    topic: Topic,
    dry_run: DryRun = False,
) -> Answer:
    """Copy the offsets of one group to another."""
    if source == target:
        raise UsageError("source and target are the same group")
    return _moves(target, topic, await admin.offsets.clone(source, target, topic, dry_run=dry_run))


@asks
async def set_offset(
    admin: Admin,
    group: Group,
    topic: Topic,
    broker: Annotated[str, typer.Argument(help="Broker name.")],
    queue: Annotated[int, typer.Argument(min=0, help="Queue id.")],
    offset: Annotated[int, typer.Argument(min=0, help="Offset of the next message that the group consumes.")],
    dry_run: DryRun = False,
) -> Answer:
    """Let a group whose members are stopped continue at an offset of one queue."""
    from downrange.model.message import MessageQueue

    place = MessageQueue(topic, broker, queue)
    return _moves(group, topic, await admin.offsets.move_queue(group, place, offset, dry_run=dry_run))


@shows
async def ages(admin: Admin, group: Group, topic: Topic) -> Answer:
    """Show the age of the oldest waiting message of each queue."""
    spans = await admin.offsets.time_spans(group, topic)
    rows = [
        {
            "broker": span.message_queue.broker_name,
            "queueId": span.message_queue.queue_id,
            "minTimestamp": span.min_time_stamp,
            "maxTimestamp": span.max_time_stamp,
            "consumeTimestamp": span.consume_time_stamp,
            "delayMillis": span.delay_time,
        }
        for found in spans.done.values()
        for span in found
    ]
    columns = [
        Column("Broker Name", "broker"),
        Column("QID", "queueId"),
        Column("Oldest", "minTimestamp", time_text),
        Column("Newest", "maxTimestamp", time_text),
        Column("Consumed", "consumeTimestamp", time_text),
        Column("Late", "delayMillis", lambda millis: f"{millis / 1000:.1f} s"),
    ]
    return Answer({"group": group, "topic": topic, "queues": rows}, [Table(columns, rows)], spans.failed)


def _moves(group: str, topic: str, outcomes: PerServer[BrokerProcess, BrokerMoves]) -> Answer:
    rows = [
        {
            "broker": move.queue.broker_name,
            "queueId": move.queue.queue_id,
            "brokerOffset": move.max_offset,
            "consumerOffset": move.committed,
            "resetOffset": move.target,
            "how": how(moved),
        }
        for moved in outcomes.done.values()
        for move in moved.moves
    ]
    columns = [
        Column("brokerName", "broker"),
        Column("queueId", "queueId"),
        Column("brokerOffset", "brokerOffset"),
        Column("consumerOffset", "consumerOffset"),
        Column("resetOffset", "resetOffset"),
        Column("how", "how"),
    ]
    return Answer({"group": group, "topic": topic, "queues": rows}, [Table(columns, rows)], outcomes.failed)


def how(moved: BrokerMoves) -> str:
    """`members told`: running members move within a few seconds; `written`: the group starts there next time."""
    if not moved.applied:
        return "dry run, online" if moved.online else "dry run, offline"
    return "members told" if moved.online else "written"
