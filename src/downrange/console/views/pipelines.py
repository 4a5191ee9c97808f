"""Pipelines, Spark queries above all, as they report themselves to a topic: the list, and one with its history."""

from __future__ import annotations

from starlette.responses import Response

from downrange.client.pipeline_status import PIPELINES_TOPIC, PipelineStatus
from downrange.console.history import RANGES, Row, thinned
from downrange.console.pages import Page, json_text
from downrange.console.requests import Answer, PageRefused, Visit
from downrange.console.tables import Column, listing
from downrange.console.views.shared import LIVE_SECONDS, MOST_POINTS, chart_data, command, range_of
from downrange.model.errors import MQError
from downrange.model.text import Text, as_is, said_by

UNKNOWN = float("nan")


async def pipelines(visit: Visit) -> Answer:
    """The newest report of each pipeline."""
    error = Text("")
    found: tuple[PipelineStatus, ...] = ()
    if PIPELINES_TOPIC in visit.cluster.snapshot.topics:
        try:
            found = await visit.admin.pipelines.list()
        except MQError as failure:
            error = said_by(failure)
    columns: list[Column[PipelineStatus]] = [
        Column("query", Text("query"), lambda one: one.name, link=lambda one: visit.url("pipelines", one.name)),
        Column("kind", Text("kind"), lambda one: one.kind),
        Column("source", Text("from"), lambda one: one.source),
        Column("target", Text("to"), lambda one: one.target),
        Column("behind", Text("behind"), lambda one: one.behind, "number"),
        Column("rows", Text("rows/s"), lambda one: one.rows_per_second, "rate"),
        Column("batch", Text("time of a batch"), lambda one: _millis(one.batch_seconds), "span"),
        Column("heard", Text("last heard"), lambda one: one.timestamp, "time"),
        Column("error", Text("last error"), lambda one: one.last_error or ""),
    ]
    table = listing(
        found, columns, visit.query, search=lambda one: one.name, name="pipelines", caption=Text("Pipelines"),
    )  # fmt: skip
    if visit.query.get("format") == "csv":
        return table
    chrome = {
        "tables": [table],
        "failed": {PIPELINES_TOPIC: error} if error else {},
        "live": LIVE_SECONDS,
        "empty": Text(
            "No pipeline has reported. Spark queries report to the topic {topic} while they run.",
            topic=PIPELINES_TOPIC,
        ),
    }
    return Page("listing.html", Text("Pipelines"), table.data(), command(visit, "pipeline", "list"), chrome=chrome)


async def pipeline(visit: Visit) -> Answer:
    """One pipeline: its newest report, and how far behind it was."""
    reports = await _reports(visit)
    if not reports:
        raise PageRefused(
            404, Text("no pipeline {pipeline} has reported in this time", pipeline=visit.path("pipeline"))
        )
    last, span = reports[-1], range_of(visit, "24h")
    data = {
        "query": last.name,
        "kind": last.kind,
        "source": last.source,
        "target": last.target,
        "lag": [{"topic": topic, "behind": behind} for topic, behind in sorted(last.lag.items())],
        "behind": last.behind,
        "rows": last.rows_per_second,
        "batch": _millis(last.batch_seconds),
        "heard": last.timestamp,
        "error": last.last_error,
    }
    chrome = {
        "range": span,
        "ranges": ("1h", "6h", "24h"),
        "chart": _rows(reports),
        "chart_source": visit.url("pipelines", last.name, "chart") + f".json?range={span}",
        "live": LIVE_SECONDS,
    }
    return Page("pipeline.html", as_is(last.name), data, command(visit, "pipeline", "status", last.name), chrome=chrome)


async def pipeline_chart(visit: Visit) -> Answer:
    rows = _rows(await _reports(visit))
    return Response(json_text({"data": chart_data(rows, 2), "marks": []}), media_type="application/json")


async def _reports(visit: Visit) -> tuple[PipelineStatus, ...]:
    within = min(RANGES[range_of(visit, "24h")], RANGES["24h"]) * 1000
    return await visit.admin.pipelines.history(visit.path("pipeline"), within_millis=round(within))


def _rows(reports: tuple[PipelineStatus, ...]) -> list[Row]:
    rows: list[Row] = [
        (one.timestamp / 1000, float(one.behind), UNKNOWN if one.rows_per_second is None else one.rows_per_second)
        for one in reports
    ]
    return thinned(rows, MOST_POINTS)


def _millis(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
