"""What several views need: commands that do the same, charts, columns of groups and brokers."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Collection, Sequence
from typing import Any, Final

from downrange.console import formats
from downrange.console.clusters import Cluster
from downrange.console.findings import growth_of
from downrange.console.history import DAY, RANGES, Row, thinned
from downrange.console.requests import Visit
from downrange.console.snapshot import BrokerState, GroupState
from downrange.console.tables import Column
from downrange.model.text import Text, as_is

LIVE_SECONDS: Final = 5
MOST_POINTS: Final = 720
GROWTH: Final = 0.5


def command(visit: Visit, *words: str) -> str:
    """The command line that does the same for this cluster."""
    return " ".join(shlex.quote(word) for word in ("downrange", *words, "-n", visit.cluster.namesrv))


def range_of(visit: Visit, otherwise: str = "1h") -> str:
    asked = visit.query.get("range", "")
    return asked if asked in RANGES else otherwise


def chart_rows(visit: Visit, cluster: Cluster, name: str, span: str) -> list[Row]:
    """The figures of a chart: from memory, and further back than a day from the file."""
    now = visit.now / 1000
    seconds = RANGES[span]
    if seconds > DAY:
        return thinned(visit.console.file.figures(cluster.name, name, now - seconds), MOST_POINTS)
    return thinned(cluster.history.rows(name, now - seconds, now), MOST_POINTS)


def chart_data(rows: Sequence[Row], width: int) -> list[list[Any]]:
    """Columns as uPlot wants them; a gap in time becomes a gap in the line."""
    columns: list[list[Any]] = [[] for _ in range(width + 1)]
    step = _usual_step(rows)
    last: float | None = None
    for row in rows:
        if last is not None and row[0] - last > 4 * step:
            columns[0].append(last + step)
            for column in columns[1:]:
                column.append(None)
        last = row[0]
        columns[0].append(round(row[0], 1))
        for column, figure in zip(columns[1:], row[1 : width + 1], strict=True):
            column.append(None if math.isnan(figure) else figure)
    return columns


def _usual_step(rows: Sequence[Row]) -> float:
    steps = sorted(after[0] - before[0] for before, after in itertools.pairwise(rows))
    return max(10.0, steps[len(steps) // 2]) if steps else 10.0


def trend(visit: Visit, group: GroupState) -> Text:
    """A word: growing, shrinking, steady, stuck or no members; empty when nothing waits."""
    if not group.behind:
        return Text("")
    if not group.members and group.members_at:
        return Text("no members")
    if group.stuck_queues:
        return Text("stuck")
    growth = growth_of(visit.console.look(visit, visit.cluster), group.name)
    if growth is None:
        return Text("")
    return Text("growing") if growth > GROWTH else Text("shrinking") if growth < -GROWTH else Text("steady")


def group_columns(visit: Visit) -> list[Column[GroupState]]:
    snapshot = visit.cluster.snapshot
    return [
        Column("group", Text("group"), lambda one: one.name, link=lambda one: visit.url("groups", one.name)),
        Column("behind", Text("behind"), lambda one: one.behind, "number"),
        Column("oldest", Text("oldest waiting"), lambda one: one.oldest if one.behind else "", "span"),
        Column("since", Text("since"), lambda one: one.behind_since or "", "time"),
        Column("trend", Text("trend"), lambda one: trend(visit, one), "state"),
        Column("members", Text("members"), lambda one: len(one.members) if one.members_at else None, "number"),
        Column("topics", Text("topics"), lambda one: ", ".join(one.topics[:3]) + (" …" if len(one.topics) > 3 else "")),
        Column(
            "dead",
            Text("dead letters"),
            lambda one: snapshot.dead_letters(one.name),
            "number",
            link=lambda one: visit.url("dead-letters", one.name) if snapshot.dead_letters(one.name) else None,
        ),
    ]


def role_of(state: BrokerState) -> str:
    said = state.settings.get("brokerRole")
    return said or ("MASTER" if state.is_master else f"SLAVE {state.broker.broker_id}")


def broker_columns(visit: Visit) -> list[Column[BrokerState]]:
    snapshot = visit.cluster.snapshot
    ends = {one.name: one.runtime.max_offset for one in snapshot.masters if one.runtime is not None}

    def lag(one: BrokerState) -> int | str | None:
        end = ends.get(one.name)
        if one.is_master:
            return ""
        if end is None or one.runtime is None or one.runtime.max_offset is None:
            return None
        return max(0, end - one.runtime.max_offset)

    def oldest(one: BrokerState) -> int | None:
        first = one.runtime.earliest_message_timestamp if one.runtime is not None else None
        return None if first is None else max(0, visit.now - first)

    def state_of(one: BrokerState) -> str:
        return Text("silent") if one.error is not None else Text("online") if one.at else Text("")

    return [
        Column("broker", Text("broker"), lambda one: one.name, link=lambda one: visit.url("brokers", one.name)),
        Column("role", Text("role"), role_of),
        Column("address", Text("address"), lambda one: one.broker.address, "code"),
        Column("state", Text("state"), state_of, "state"),
        Column("in", Text("in/s"), lambda one: one.runtime.in_tps if one.runtime else None, "rate"),
        Column("out", Text("out/s"), lambda one: one.runtime.out_tps if one.runtime else None, "rate"),
        Column("disk", Text("disk"), lambda one: one.runtime.disk_ratio if one.runtime else None, "percent"),
        Column("oldest", Text("oldest message"), oldest, "span"),
        Column("lag", Text("slave behind"), lag, "size"),
        Column("at", Text("last answer"), lambda one: one.at, "time"),
    ]


def age_of(visit: Visit, at: int) -> Text:
    """How old figures are, where they are older than twice their interval on a screen; else empty."""
    if not at:
        return Text("no figures yet")
    pace = visit.console.config.pace
    is_old = visit.now - at > 2000 * pace.seen + 1000
    return Text("figures of {time}", time=formats.when(at, visit.zone, visit.now)) if is_old else Text("")


def unheard(visit: Visit, names: Collection[str] | None = None) -> dict[str, str]:
    """Brokers, of these names if some are given, whose figures are old: why, and how old they are."""
    return {
        name: Text("{why}; its figures are of {time}", why=one.why, time=formats.when(one.at, visit.zone, visit.now))
        if one.at
        else as_is(one.why)
        for name, one in visit.cluster.snapshot.unheard.items()
        if names is None or name in names
    }


def crumb(visit: Visit, label: Text, *parts: str) -> dict[str, str]:
    return {"label": label, "address": visit.url(*parts)}


def tab(visit: Visit, name: str, label: Text, badge: object = "") -> dict[str, Any]:
    path = visit.request.url.path
    return {"name": name, "label": label, "address": f"{path}?tab={name}", "badge": badge}
