"""Findings say in sentences what is wrong with a cluster and what to do: pure rules over a snapshot, worst first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import tzinfo
from enum import IntEnum
from typing import Final
from urllib.parse import quote

from downrange.console.formats import moment, number, percent, span
from downrange.console.history import History
from downrange.console.snapshot import BrokerState, GroupState, Member, Snapshot
from downrange.model.text import Text, as_is, joined, plural
from downrange.model.topics import RETRY_PREFIX

DISK_WARNING: Final = 0.75
SLAVE_BEHIND_BYTES: Final = 16 << 20
HALF_OLD_MILLIS: Final = 15 * 60_000
DELAYED_LATE_MILLIS: Final = 60_000
STALE_MILLIS: Final = 15_000
_HOUR: Final = 3600.0


class Harm(IntEnum):
    """How bad a finding is; the smallest comes first."""

    LOSS = 1
    """Messages are refused or get lost."""
    DELAY = 2
    """Messages wait."""
    RISK = 3
    """It may become worse."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence, where to look, and what to do. `subject` is a broker or a group, whose page shows it, too."""

    harm: Harm
    text: Text
    link: str
    kind: str
    subject: str = ""
    todo: Text = Text("")

    @property
    def word(self) -> str:
        """What colour says, in a word."""
        return "bad" if self.harm is Harm.LOSS else "warning" if self.harm is Harm.DELAY else "note"


@dataclass(frozen=True, slots=True)
class Looked:
    """What the rules look at: a snapshot, its history, the time, and the zone in which times are told."""

    snapshot: Snapshot
    history: History
    now: int
    zone: tzinfo

    def at(self, page: str, name: str = "") -> str:
        path = f"/c/{self.snapshot.name}/{page}"
        return f"{path}/{quote(name, safe='')}" if name else path

    def time(self, millis: float | None) -> str:
        return moment(millis, self.zone, self.now)


def findings(looked: Looked) -> list[Finding]:
    """All findings, the most harmful first."""
    found = [finding for rule in RULES for finding in rule(looked)]
    return sorted(found, key=lambda finding: finding.harm)


def _cluster_unknown(look: Looked) -> Iterator[Finding]:
    if look.snapshot.error is not None:
        known = Text(" Figures are of {at}.", at=look.time(look.snapshot.at)) if look.snapshot.at else Text("")
        text = Text("No name server answers: {error}.{known}", error=look.snapshot.error, known=known)
        todo = Text("Look whether the name servers run, and whether this machine reaches their port.")
        yield Finding(Harm.LOSS, text, look.at("name-servers"), "no-namesrv", todo=todo)
    for address, error in look.snapshot.namesrv_errors.items():
        if look.snapshot.error is None:
            text = Text("Name server {address} does not answer: {error}.", address=address, error=error)
            todo = Text("Start it again; the others serve routes meanwhile.")
            yield Finding(Harm.RISK, text, look.at("name-servers"), "namesrv-gone", address, todo)


def _brokers_gone(look: Looked) -> Iterator[Finding]:
    for name, since in look.snapshot.lost.items():
        text = Text("{name} is gone since {since}: no name server lists its master.", name=name, since=look.time(since))
        todo = Text("Start it again: what it stored waits on its disk.")
        yield Finding(Harm.LOSS, text, look.at("brokers"), "broker-gone", name, todo)
    for (name, broker_id), since in look.snapshot.lost_slaves.items():
        if look.snapshot.controllers is None:  # a controller gives other ids when roles change
            text = Text(
                "Slave {broker_id} of {name} is gone since {since}.",
                broker_id=broker_id,
                name=name,
                since=look.time(since),
            )
            yield Finding(Harm.RISK, text, look.at("brokers"), "slave-gone", name, Text("Start it again."))
    for state in look.snapshot.brokers.values():
        if state.error is None:
            continue
        role = Text("") if state.is_master else Text(" (slave {broker_id})", broker_id=state.broker.broker_id)
        age = Text(" Its figures are of {at}.", at=look.time(state.at)) if state.at else Text("")
        text = Text(
            "{name}{role} does not answer: {error}.{age}", name=state.name, role=role, error=state.error, age=age
        )
        todo = Text("Look at its process, its machine and the network between here and there.")
        yield Finding(Harm.LOSS, text, look.at("brokers", state.name), "broker-silent", state.name, todo)


def _broker_state(look: Looked) -> Iterator[Finding]:
    for state in look.snapshot.masters:
        link = look.at("brokers", state.name)
        if state.settings.get("brokerPermission") in ("4", "0"):
            text = Text("{name} is read-only: it takes no messages (brokerPermission).", name=state.name)
            todo = Text("Set brokerPermission=6 on its page when it may take messages again.")
            yield Finding(Harm.LOSS, text, link, "broker-read-only", state.name, todo)
    for state in look.snapshot.brokers.values():
        ratio = state.runtime.disk_ratio if state.runtime is not None else None
        if ratio is not None and ratio >= DISK_WARNING:
            refuses = _refuses_at(state)
            harm = Harm.LOSS if ratio >= refuses else Harm.RISK
            says = (
                Text("refuses messages")
                if harm is Harm.LOSS
                else Text("refuses messages at {refuses}", refuses=percent(refuses))
            )
            text = Text("{name}: disk {ratio}, {says}.", name=state.name, ratio=percent(ratio), says=says)
            todo = Text("Make room, or set a shorter fileReservedTime on its page.")
            yield Finding(harm, text, look.at("brokers", state.name), "disk", state.name, todo)


def _refuses_at(state: BrokerState) -> float:
    text = state.settings.get("diskSpaceWarningLevelRatio", "90")
    try:
        return float(text) / (100 if float(text) > 1 else 1)
    except ValueError:
        return 0.9


def _slaves_behind(look: Looked) -> Iterator[Finding]:
    ends = {one.name: one.runtime.max_offset for one in look.snapshot.masters if one.runtime is not None}
    for state in look.snapshot.brokers.values():
        end, runtime = ends.get(state.name), state.runtime
        if state.is_master or end is None or runtime is None or runtime.max_offset is None:
            continue
        lag = end - runtime.max_offset
        if lag > SLAVE_BEHIND_BYTES:
            text = Text(
                "Slave {broker_id} of {name} is {size} behind its master.",
                broker_id=state.broker.broker_id,
                name=state.name,
                size=Text("{count} MiB", count=number(lag / (1 << 20))),
            )
            todo = Text("Look at the network and at the disk of the slave; do not stop the master now.")
            yield Finding(Harm.RISK, text, look.at("brokers", state.name), "slave-behind", state.name, todo)


def _controllers(look: Looked) -> Iterator[Finding]:
    known = look.snapshot.controllers
    if known is None:
        return
    if not known.leader:
        text = Text("No controller leads: a master that is lost is not replaced.")
        todo = Text("Start controllers, and look whether they reach their etcd.")
        yield Finding(Harm.RISK, text, look.at("brokers"), "no-controller", todo=todo)
    for address, error in known.errors.items():
        text = Text("Controller {address} does not answer: {error}.", address=address, error=error)
        yield Finding(Harm.RISK, text, look.at("brokers"), "controller-silent", address, Text("Start it again."))
    for name, replicas in known.sets.items():
        link = look.at("brokers", name)
        if not replicas.master:
            text = Text("{name} has no master: the controller has found no replica that may become one.", name=name)
            todo = Text("Start a replica that was in sync; `downrange controller elect --unclean` loses messages.")
            yield Finding(Harm.LOSS, text, link, "no-master", name, todo)
        if replicas.behind:
            ids = ", ".join(map(str, replicas.behind))
            text = plural(
                len(replicas.behind),
                "{name}: {count} replica ({ids}) not in sync, which cannot become master.",
                "{name}: {count} replicas ({ids}) not in sync, which cannot become master.",
                name=name,
                ids=ids,
            )
            todo = Text("Start them if they do not run; else they are catching up.")
            yield Finding(Harm.RISK, text, link, "not-in-sync", name, todo)


def _groups_behind(look: Looked) -> Iterator[Finding]:
    for group in look.snapshot.groups_behind:
        behind = group.behind or 0
        link = look.at("groups", group.name)
        since = Text(" since {time}", time=look.time(group.behind_since)) if group.behind_since else Text("")
        oldest = (
            Text(", the oldest waits for {span}", span=span(group.oldest)) if group.oldest is not None else Text("")
        )
        if not group.members and group.members_at:
            text = Text(
                "{group} is {behind} behind{since}, and no member runs.",
                group=group.name,
                behind=number(behind),
                since=since,
            )
            todo = Text("Start a consumer of it; if nobody reads it any more, delete the group.")
            yield Finding(Harm.DELAY, text, link, "group-without-members", group.name, todo)
        elif stuck := group.stuck_queues:
            waiting = sum(group.queues[queue].behind for queue in stuck)
            text = Text(
                "{group} is stuck: {queues} with {messages} and no progress for a minute{oldest}.",
                group=group.name,
                queues=plural(len(stuck), "{count} queue", "{count} queues"),
                messages=plural(waiting, "{count} message", "{count} messages"),
                oldest=oldest,
            )
            todo = Text("Look at the stack of the member that holds the queue.")
            yield Finding(Harm.DELAY, text, f"{link}?tab=members", "group-stuck", group.name, todo)
        elif (growth := growth_of(look, group.name)) is not None and growth > 0.5:
            text = Text(
                "{group} is {behind} behind{since}, +{growth}/s{oldest}.",
                group=group.name,
                behind=number(behind),
                since=since,
                growth=number(growth),
                oldest=oldest,
            )
            yield Finding(Harm.DELAY, text, link, "group-growing", group.name, _how_to_keep_up(group))


def _how_to_keep_up(group: GroupState) -> Text:
    """A queue of a clustering group has one member: more members than queues do not help."""
    queues = sum(1 for queue in group.queues if not queue.topic.startswith(RETRY_PREFIX))
    members = len(group.members)
    if group.consume_type == "CONSUME_POP" or members < queues:
        return Text(
            "Start more members: {members} for {queues}.",
            members=plural(members, "{count} member", "{count} members"),
            queues=plural(queues, "{count} queue", "{count} queues"),
        )
    return Text("Every queue has a member of its own: make the members quicker, or add queues to the topic.")


def growth_of(look: Looked, group: str, seconds: float = 120.0) -> float | None:
    """How fast the number of waiting messages grows, a second; None when there is not enough history."""
    now = look.now / 1000
    rows = [row for row in look.history.rows(f"group:{group}", now - seconds, now) if row[1] == row[1]]
    if len(rows) < 2 or rows[-1][0] - rows[0][0] < 9:
        return None
    return (rows[-1][1] - rows[0][1]) / (rows[-1][0] - rows[0][0])


def differences(group: GroupState) -> dict[str, dict[str, list[Member]]]:
    """Topics to which members subscribe differently: topic -> expression (`-`: not at all) -> members."""
    told = [one for one in group.members.values() if one.subscriptions is not None]
    topics: dict[str, dict[str, list[Member]]] = {}
    for topic in sorted({sub.topic for one in told for sub in one.subscriptions or ()}):
        by_expression: dict[str, list[Member]] = {}
        for member in told:
            mine = [sub.expression for sub in member.subscriptions or () if sub.topic == topic]
            by_expression.setdefault(mine[0] if mine else "-", []).append(member)
        if len(by_expression) > 1:
            topics[topic] = by_expression
    return topics


def _members_differ(look: Looked) -> Iterator[Finding]:
    for group in look.snapshot.groups.values():
        for topic, by_expression in differences(group).items():
            parts = joined(
                ", ",
                [
                    plural(
                        len(members),
                        '{count} member with "{expression}"',
                        '{count} members with "{expression}"',
                        expression=expression,
                    )
                    if expression != "-"
                    else plural(len(members), "{count} member not at all", "{count} members not at all")
                    for expression, members in by_expression.items()
                ],
            )
            text = Text(
                "Members of {group} subscribe to {topic} differently: {parts}. Messages get lost.",
                group=group.name,
                topic=topic,
                parts=parts,
            )
            link = look.at("groups", group.name) + "?tab=subscriptions"
            todo = Text("Give all members of the group the same subscription.")
            yield Finding(Harm.LOSS, text, link, "subscriptions-differ", group.name, todo)


def _queues_without_member(look: Looked) -> Iterator[Finding]:
    unheard = look.snapshot.unheard
    for group in look.snapshot.groups.values():
        if not group.knows_holders or group.is_broadcasting or group.consume_type == "CONSUME_POP":
            continue
        free = [
            queue
            for queue, at in group.queues.items()
            if at.behind and group.holder(queue) is None and queue.broker_name not in unheard
        ]
        if free:
            text = plural(
                len(free),
                "{count} queue of {group} with waiting messages has no member.",
                "{count} queues of {group} with waiting messages have no member.",
                group=group.name,
            )
            todo = Text("It should pass within seconds; if it stays, restart the members one by one.")
            yield Finding(Harm.DELAY, text, look.at("groups", group.name), "queue-without-member", group.name, todo)


def _dead_letters_rise(look: Looked) -> Iterator[Finding]:
    now = look.now / 1000
    for group in look.snapshot.groups:
        dead = look.snapshot.dead_letters(group)
        if not dead:
            continue
        then = look.history.before(f"group:{group}", now - 24 * _HOUR, now)
        rise = dead - then[3] if then is not None and then[3] == then[3] else 0
        link = look.at("dead-letters", group)
        todo = Text("Find out why its members refuse them, then send them again from that page.")
        if then is not None and rise > 0:
            text = plural(
                dead,
                "{count} dead letter of {group}, {rise} of them since {time}.",
                "{count} dead letters of {group}, {rise} of them since {time}.",
                group=group,
                rise=number(rise),
                time=look.time(then[0] * 1000),
            )
            yield Finding(Harm.DELAY, text, link, "dead-letters-rise", group, todo)
        else:
            text = plural(dead, "{count} dead letter of {group}.", "{count} dead letters of {group}.", group=group)
            yield Finding(Harm.RISK, text, link, "dead-letters", group, todo)


def _half_and_delayed(look: Looked) -> Iterator[Finding]:
    oldest = look.snapshot.half_oldest
    if look.snapshot.half and oldest is not None and oldest > HALF_OLD_MILLIS:
        text = plural(
            look.snapshot.half,
            "{count} half message without an answer, the oldest for {oldest}.",
            "{count} half messages without an answer, the oldest for {oldest}.",
            oldest=span(oldest),
        )
        todo = Text("Start the producer group that sent them: brokers ask its members how the transaction ended.")
        yield Finding(Harm.DELAY, text, look.at("transactions"), "half-old", todo=todo)
    late = look.snapshot.delayed_late
    if late is not None and late > DELAYED_LATE_MILLIS:
        text = Text("Delayed messages are late by {late}.", late=span(late))
        todo = Text("Look at the load and at the disk of the broker that keeps them.")
        yield Finding(Harm.DELAY, text, look.at("delayed"), "delayed-late", todo=todo)


def _topics_on_one_broker(look: Looked) -> Iterator[Finding]:
    masters = look.snapshot.masters
    if len(masters) < 2 or look.snapshot.lost:  # topics of a broker that is gone look as if they had one broker less
        return
    alone = [
        topic.name for topic in look.snapshot.user_topics() if len(look.snapshot.brokers_of_topic(topic.name)) == 1
    ]
    if alone:
        text = plural(
            len(alone),
            "{count} topic is on one broker only: {names}.",
            "{count} topics are on one broker only: {names}.",
            names=_some(sorted(alone), 3),
        )
        todo = Text("Create them on the other brokers, too, or nothing can be sent while that broker is down.")
        yield Finding(Harm.RISK, text, look.at("topics") + "?kind=one-broker", "one-broker", todo=todo)


def _namesrvs_differ(look: Looked) -> Iterator[Finding]:
    tables = look.snapshot.namesrvs
    if len(tables) > 1 and (keys := differing_keys(tables)):
        text = Text("Name servers have different settings: {names}.", names=_some(keys, 4))
        todo = Text("Give all name servers the same settings.")
        yield Finding(Harm.RISK, text, look.at("name-servers"), "namesrv-differ", todo=todo)


def _some(names: list[str], most: int) -> Text:
    """The first names of a list; that there are others is said."""
    shown = ", ".join(names[:most])
    return Text("{names} and others", names=shown) if len(names) > most else as_is(shown)


_OWN: Final = (
    *("listenPort", "bindAddress", "kvConfigPath", "configStorePath", "rocketmqHome", "path"),
    *("brokerName", "brokerIP", "brokerId", "haMasterAddress"),
)


def differing_keys(tables: dict[str, dict[str, str]]) -> list[str]:
    """Settings that are not alike in all tables, without those that belong to one machine."""
    keys = {key for table in tables.values() for key in table}
    return sorted(
        key
        for key in keys
        if len({table.get(key) for table in tables.values()}) > 1
        and not any(own.lower() in key.lower() for own in _OWN)
    )


RULES: Final[tuple[Callable[[Looked], Iterator[Finding]], ...]] = (
    _cluster_unknown,
    _brokers_gone,
    _broker_state,
    _slaves_behind,
    _controllers,
    _groups_behind,
    _members_differ,
    _queues_without_member,
    _dead_letters_rise,
    _half_and_delayed,
    _topics_on_one_broker,
    _namesrvs_differ,
)
