"""The overview of a cluster, the list of clusters, and the addresses that belong to no page."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response

from downrange.console.formats import number, rate
from downrange.console.pages import Page, json_text
from downrange.console.requests import Answer, PageRefused, Visit, see_other
from downrange.console.snapshot import sum_known
from downrange.console.tables import Column, listing
from downrange.console.views.shared import (
    LIVE_SECONDS,
    broker_columns,
    chart_data,
    chart_rows,
    command,
    group_columns,
    range_of,
)
from downrange.model.text import Text

SHOWN_FINDINGS = 12
SHOWN_GROUPS = 20


async def home(visit: Visit) -> Answer:
    """One cluster: its overview. Several: a table of them."""
    clusters = visit.clusters
    if len(clusters) == 1 and not visit.wants_json:
        return see_other(f"/c/{next(iter(clusters))}")

    def trouble(name: str) -> int:
        return len([one for one in visit.console.findings(visit, clusters[name]) if one.word != "note"])

    columns: list[Column[str]] = [
        Column("cluster", Text("cluster"), lambda name: name, link=lambda name: f"/c/{name}"),
        Column("findings", Text("findings"), trouble, "number"),
        Column("brokers", Text("brokers"), lambda name: len(clusters[name].snapshot.brokers), "number"),
        Column("topics", Text("topics"), lambda name: sum(1 for _ in clusters[name].snapshot.user_topics()), "number"),
        Column("groups", Text("groups"), lambda name: len(clusters[name].snapshot.groups), "number"),
        Column("behind", Text("groups behind"), lambda name: len(clusters[name].snapshot.groups_behind), "number"),
        Column("namesrv", Text("name servers"), lambda name: clusters[name].namesrv, "code"),
        Column("error", Text("error"), lambda name: clusters[name].snapshot.error or ""),
    ]
    table = listing(clusters, columns, visit.query, search=str, caption=Text("Clusters"))
    return Page("listing.html", Text("Clusters"), table.data(), chrome={"tables": [table], "live": LIVE_SECONDS})


async def overview(visit: Visit) -> Answer:
    cluster, snapshot = visit.cluster, visit.cluster.snapshot
    found = visit.console.findings(visit, cluster)
    shown = found if visit.query.get("all") else found[:SHOWN_FINDINGS]
    span = range_of(visit)
    behind = listing(
        snapshot.groups_behind[:SHOWN_GROUPS], group_columns(visit), visit.query, sort="behind", name="behind",
        caption=Text("Groups behind"),
    )  # fmt: skip
    brokers = listing(
        snapshot.brokers.values(), broker_columns(visit), visit.query, name="brokers", caption=Text("Brokers")
    )
    if visit.query.get("format") == "csv":
        return behind
    data = {
        "known_at": snapshot.at,
        "error": snapshot.error,
        "findings": shown,
        "tiles": tiles(visit),
        "topics": sum(1 for _ in snapshot.user_topics()),
        "groups": len(snapshot.groups),
        "groups_behind": behind.rows,
        "brokers": brokers.rows,
    }
    chrome = {
        "behind": behind,
        "broker_table": brokers,
        "more_findings": len(found) if len(found) > len(shown) else 0,
        "namesrv": cluster.namesrv,
        "range": span,
        "ranges": ("1h", "6h", "24h", "7d", "30d"),
        "chart": chart_rows(visit, cluster, "cluster", span),
        "chart_source": visit.url("chart") + f".json?range={span}",
        "live": LIVE_SECONDS,
        "is_old": not snapshot.at,
    }
    return Page("overview.html", Text("Overview"), data, command(visit, "cluster", "list"), chrome=chrome)


def tiles(visit: Visit) -> list[dict[str, Any]]:
    snapshot = visit.cluster.snapshot
    runtimes = [one.runtime for one in snapshot.masters if one.runtime is not None]
    dead = snapshot.all_dead_letters
    behind = len(snapshot.groups_behind)
    return [
        {"label": Text("in/s"), "text": rate(sum_known(one.in_tps for one in runtimes)), "link": None},
        {"label": Text("out/s"), "text": rate(sum_known(one.out_tps for one in runtimes)), "link": None},
        {"label": Text("groups behind"), "text": number(behind), "link": visit.url("groups") + "?sort=behind"},
        {"label": Text("dead letters"), "text": number(dead), "link": visit.url("dead-letters")},
        {"label": Text("delayed messages"), "text": number(snapshot.delayed), "link": visit.url("delayed")},
        {"label": Text("half messages"), "text": number(snapshot.half), "link": visit.url("transactions")},
    ]


async def cluster_chart(visit: Visit) -> Answer:
    rows = chart_rows(visit, visit.cluster, "cluster", range_of(visit))
    return Response(json_text({"data": chart_data(rows, 2), "marks": []}), media_type="application/json")


async def healthz(visit: Visit) -> Answer:
    """For whoever watches the console: 200 as long as it answers, and which clusters it knows."""
    clusters = {
        name: {"known": bool(one.snapshot.at), "error": one.snapshot.error is not None}
        for name, one in visit.console.clusters.items()
    }
    return JSONResponse({"status": "ok", "clusters": clusters}, headers={"cache-control": "no-store"})


async def static_file(visit: Visit) -> Answer:
    found = visit.console.static.response(visit.path("name"), visit.request.headers.get("accept-encoding", ""))
    if found is None:
        raise PageRefused(404, Text("there is no such file; load the page again"))
    return found
