"""Makes plans and applies them: moves of offsets, deletions and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from downrange.client.admin.offsets import END, BrokerMoves, QueueMove
from downrange.client.admin.plans import Change, Plan, PlanDrifted, PlanKind, PlanRequest, drift, skipped
from downrange.client.brokers import Broker
from downrange.client.errors import GroupOnline
from downrange.client.per_server import PerServer
from downrange.model.errors import MessageError
from downrange.model.message import MessageQueue
from downrange.model.text import Text, plural
from downrange.model.topics import SubscriptionGroupConfig
from downrange.settings import camel_case

if TYPE_CHECKING:
    from downrange.client.admin import Admin

Outcome: TypeAlias = PerServer[Any, Any]
"""The result of each server, and the errors of others."""
_OFFSETS = (PlanKind.RESET, PlanKind.SKIP, PlanKind.CLONE, PlanKind.QUEUE)
_TOPIC_SETTINGS = ("readQueueNums", "writeQueueNums", "perm")
_NOT_SETTINGS = ("group_name", "group_retry_policy")  # the policy is no single value: `downrange group create` sets it


class PlanAdmin:
    """Plans what an operator asks for. Nothing changes until `apply`, which refuses a plan that drifted."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    async def reset(self, group: str, topic: str, timestamp: int, *, force: bool = True) -> Plan:
        """Let a group continue at the messages stored at a time; without `force` nothing is skipped."""
        return await self.make(PlanRequest(PlanKind.RESET, group, topic, timestamp, force))

    async def skip(self, group: str, topic: str) -> Plan:
        """Let a group continue with the next message sent."""
        return await self.make(PlanRequest(PlanKind.SKIP, group, topic, END))

    async def clone(self, source: str, target: str, topic: str) -> Plan:
        """Let `target` continue where `source` is."""
        return await self.make(PlanRequest(PlanKind.CLONE, target, topic, source=source))

    async def queue(self, group: str, queue: MessageQueue, offset: int) -> Plan:
        """Let a group continue at an offset of one queue."""
        return await self.make(PlanRequest(PlanKind.QUEUE, group, queue.topic, queue=queue, offset=offset))

    async def make(self, request: PlanRequest) -> Plan:
        """The plan of a request, from the state of the cluster as it is now."""
        if request.kind in _OFFSETS:
            plan = offset_plan(request, await self._moves(request))
        elif request.kind is PlanKind.DELETE_TOPIC:
            plan = await self._topic_deletion(request)
        elif request.kind is PlanKind.DELETE_GROUP:
            plan = await self._group_deletion(request)
        else:
            plan = await self._settings(request)
        return replace(plan, made=self._admin.session.clock.now())

    async def apply(self, plan: Plan, *, while_consuming: bool = False) -> Outcome:
        """Do what a plan says; raises PlanDrifted, and changes nothing, when the state it was made from has changed.

        `while_consuming`: the group may have gone on meanwhile, as a running group does.
        """
        now = await self.make(plan.request)
        differences = drift(consuming(plan, now) if while_consuming else plan, now)
        if differences:
            raise PlanDrifted(differences)
        request = plan.request
        match request.kind:
            case PlanKind.RESET | PlanKind.SKIP | PlanKind.CLONE | PlanKind.QUEUE:
                return await self._move(plan)
            case PlanKind.DELETE_TOPIC:
                deleted = await self._admin.topics.delete(request.name, request.cluster)
                return PerServer(
                    {**deleted.brokers.done, **deleted.namesrvs.done},
                    {**deleted.brokers.failed, **deleted.namesrvs.failed},
                )
            case PlanKind.DELETE_GROUP:
                return await self._admin.groups.delete(
                    request.name, request.cluster, request.broker, remove_offsets=request.remove_offsets
                )
            case _:
                return await self._put_settings(request)

    # --- offsets --------------------------------------------------------------------------------------------------

    async def _moves(self, request: PlanRequest) -> PerServer[Broker, BrokerMoves]:
        offsets, topic = self._admin.offsets, request.topic or ""
        match request:
            case PlanRequest(kind=PlanKind.CLONE, source=str(source)):
                return await offsets.clone(source, request.name, topic, dry_run=True)
            case PlanRequest(kind=PlanKind.QUEUE, queue=MessageQueue() as queue, offset=int(offset)):
                return await offsets.move_queue(request.name, queue, offset, dry_run=True)
            case PlanRequest(kind=PlanKind.RESET | PlanKind.SKIP, timestamp=int(timestamp)):
                return await offsets.reset(request.name, topic, timestamp, force=request.force, dry_run=True)
        raise MessageError(Text("a plan to {kind} needs more than it was given", kind=request.kind))

    async def _move(self, plan: Plan) -> PerServer[Broker, BrokerMoves]:
        """Tell the running members, or write exactly the offsets of the plan where nobody runs."""
        request = plan.request
        masters = {broker.name: broker for broker in await self._admin.session.masters_of_topic(request.topic or "")}
        written: dict[Broker, list[QueueMove]] = {}
        is_online = False
        for change in plan.changes:
            queue_id = int(str(change.context["queueId"]))
            move = QueueMove(
                MessageQueue(request.topic or "", change.server, queue_id),
                None,
                change.before if isinstance(change.before, int) else None,
                int(str(change.after)),
            )
            is_online = is_online or change.context["online"] == "yes"
            written.setdefault(masters[change.server], []).append(move)
        if not is_online:
            return await self._admin.offsets.write(request.name, written)
        if request.timestamp is None:
            raise GroupOnline(
                Text(
                    "members of {group} are running and would overwrite its offsets; stop them first",
                    group=request.name,
                )
            )
        return await self._admin.offsets.reset(
            request.name, request.topic or "", request.timestamp, force=request.force
        )

    # --- deletions ------------------------------------------------------------------------------------------------

    async def _topic_deletion(self, request: PlanRequest) -> Plan:
        """A topic with its messages on each broker, and the groups that still read it."""
        status = await self._admin.topics.status(request.name)
        readers = await self._admin.topics.groups(request.name)
        changes = [
            Change(
                broker.name,
                Text("topic {topic}", topic=request.name),
                plural(len(stats.offset_table), "{count} queue", "{count} queues"),
                None,
                {"messages": sum(one.max_offset - one.min_offset for one in stats.offset_table.values())},
            )
            for broker, stats in status.done.items()
        ]
        groups = sorted({group for found in readers.done.values() for group in found})
        notes = tuple(Text("the group {group} reads it", group=group) for group in groups)
        failed = {str(broker): error for broker, error in {**status.failed, **readers.failed}.items()}
        return Plan(request, 0, tuple(changes), destroys=True, notes=notes, failed=failed)

    async def _group_deletion(self, request: PlanRequest) -> Plan:
        """A group on each broker, with how far it is behind and whether members run."""
        summary = await self._admin.groups.summary(request.name)
        brokers = await self._admin.groups.brokers_of(request.name)
        notes = (plural(summary.members, "{count} member runs", "{count} members run"),) if summary.members else ()
        changes = tuple(
            Change(
                broker.name,
                Text("group {group}", group=request.name),
                Text("present"),
                None,
                {"behind": summary.behind},
            )
            for broker in brokers
        )
        failed = {str(broker): error for broker, error in summary.failed.items()}
        return Plan(request, 0, changes, destroys=True, notes=notes, failed=failed)

    # --- settings -------------------------------------------------------------------------------------------------

    async def _settings(self, request: PlanRequest) -> Plan:
        """Each setting that would change, with its present value on each broker."""
        found = await self._present(request)
        changes = tuple(
            Change(broker.name or broker.address, name, table.get(name), value)
            for broker, table in found.done.items()
            for name, value in request.settings.items()
        )
        return Plan(request, 0, changes, failed={str(broker): error for broker, error in found.failed.items()})

    async def _present(self, request: PlanRequest) -> PerServer[Broker, dict[str, str]]:
        match request.kind:
            case PlanKind.BROKER_SETTINGS:
                brokers = await self._admin.cluster.config(request.cluster, request.broker)
                return PerServer({one: config.table for one, config in brokers.done.items()}, brokers.failed)
            case PlanKind.TOPIC_SETTINGS:
                _topic_settings(request)
                topics = await self._admin.topics.configs_of(request.name)
                tables = {one: _table(asdict(config)) for one, config in topics.done.items()}
                return PerServer(tables, topics.failed)
            case _:
                groups = await self._admin.groups.configs(request.cluster, request.broker)
                configs = {one: table[request.name] for one, table in groups.done.items() if request.name in table}
                for config in configs.values():
                    _group_settings(config, request)
                return PerServer({one: _table(asdict(config)) for one, config in configs.items()}, groups.failed)

    async def _put_settings(self, request: PlanRequest) -> Outcome:
        match request.kind:
            case PlanKind.BROKER_SETTINGS:
                return await self._admin.cluster.update_config(request.settings, request.cluster, request.broker)
            case PlanKind.TOPIC_SETTINGS:
                changes = _topic_settings(request)
                return await self._admin.topics.update(
                    request.name,
                    read_queues=changes.get("readQueueNums"),
                    write_queues=changes.get("writeQueueNums"),
                    perm=changes.get("perm"),
                    cluster=request.cluster,
                    broker=request.broker,
                )
            case _:
                outcome: Outcome = PerServer()
                groups = await self._admin.groups.configs(request.cluster, request.broker)
                for broker, table in groups.done.items():
                    if request.name in table:
                        config = _group_settings(table[request.name], request)
                        put = await self._admin.groups.create(config, broker=broker.address)
                        outcome.done.update(dict.fromkeys(put.done))
                        outcome.failed.update(put.failed)
                outcome.failed.update(groups.failed)
                return outcome


def _topic_settings(request: PlanRequest) -> dict[str, int]:
    """The settings of a topic that a request changes; raises MessageError for what cannot be changed."""
    found = {}
    for name, value in request.settings.items():
        if name not in _TOPIC_SETTINGS or not value.isdecimal():
            raise MessageError(
                Text(
                    "{name}={value}: expected a number for one of {names}",
                    name=name,
                    value=value,
                    names=", ".join(_TOPIC_SETTINGS),
                )
            )
        found[name] = int(value)
    return found


def _group_settings(config: SubscriptionGroupConfig, request: PlanRequest) -> SubscriptionGroupConfig:
    """The configuration of a group with the settings of a request; raises MessageError for what cannot be changed."""
    known = {camel_case(one.name): one.name for one in fields(config) if one.name not in _NOT_SETTINGS}
    changed: dict[str, Any] = {}
    for name, value in request.settings.items():
        if name not in known:
            raise MessageError(
                Text("a group has no setting {name}; there are {names}", name=name, names=", ".join(sorted(known)))
            )
        is_number = isinstance(getattr(config, known[name]), int) and not isinstance(getattr(config, known[name]), bool)
        if is_number and not value.lstrip("-").isdecimal():
            raise MessageError(Text("{name}={value}: expected a number", name=name, value=value))
        if not is_number and value not in ("true", "false"):
            raise MessageError(Text("{name}={value}: expected true or false", name=name, value=value))
        changed[known[name]] = int(value) if is_number else value == "true"
    return replace(config, **changed)


def _table(values: Mapping[str, object]) -> dict[str, str]:
    return {camel_case(name): _setting(value) for name, value in values.items() if value is not None}


def _setting(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def offset_plan(request: PlanRequest, moves: PerServer[Broker, BrokerMoves]) -> Plan:
    """The plan of a move of offsets, from its dry run."""
    changes = tuple(
        Change(
            move.queue.broker_name,
            Text("queue {queue}", queue=move.queue.queue_id),
            move.committed,
            move.target,
            {"queueId": move.queue.queue_id, "end": move.max_offset, "online": "yes" if moved.online else "no"},
        )
        for moved in moves.done.values()
        for move in moved.moves
    )
    notes = tuple(
        Text("members of {group} run on {broker}: they will be told", group=request.name, broker=broker.name)
        for broker, moved in moves.done.items()
        if moved.online
    )
    failed = {str(broker): error for broker, error in moves.failed.items()}
    return Plan(request, 0, changes, any(skipped(one) for one in changes), notes, failed)


def consuming(seen: Plan, now: Plan) -> Plan:
    """The plan as if it had seen the offsets of now, where the group only went forward."""
    present = {(change.server, change.subject): change.before for change in now.changes}

    def moved_on(change: Change) -> Change:
        before = present.get((change.server, change.subject))
        is_forward = isinstance(before, int) and (not isinstance(change.before, int) or before >= change.before)
        return replace(change, before=before) if is_forward else change

    return replace(seen, changes=tuple(map(moved_on, seen.changes)))
