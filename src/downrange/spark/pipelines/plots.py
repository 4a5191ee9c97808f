"""Pictures of the figures that `stats` and `dlq` count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, NamedTuple

from pyspark.sql import DataFrame, GroupedData, Row
from pyspark.sql import functions as F  # noqa: N812

MOST_LINES: Final = 8
"""More lines than this cannot be distinguished; only the largest are drawn."""
MOST_BARS: Final = 16
Moments = Mapping[str, datetime]
"""Events and their times, which pictures mark."""
NO_MOMENTS: Final[Moments] = {}


class Line(NamedTuple):
    """One line of a picture; each point is in the middle of its window."""

    times: list[datetime]
    values: list[float]


def draw_traffic(traffic: DataFrame, out: Path, moments: Moments = NO_MOMENTS) -> list[Path]:
    """Draw messages, bytes and latency over time, a file for each; no file when there are no messages."""
    by_topic = _windows(traffic, "topic").agg(
        (F.sum("messages") / F.first("seconds")).alias("messages"),
        (F.sum("bytes") / F.first("seconds") / 1e6).alias("megabytes"),
        F.max("latency_p99_millis").alias("latency"),
    )
    rows = by_topic.orderBy("begin").collect()
    if not rows:
        return []
    pictures = (
        ("messages", "messages.png", "Messages stored", "messages/s"),
        ("megabytes", "bytes.png", "Bytes stored", "MB/s"),
        ("latency", "latency.png", "From born to stored, p99 of the slowest queue", "ms"),
    )
    return [
        _picture(out / name, title, unit, _lines(rows, "topic", column), moments)
        for column, name, title, unit in pictures
    ]


def draw_sends(sends: DataFrame, out: Path, moments: Moments = NO_MOMENTS) -> list[Path]:
    """Draw send latency and failures of each broker over time."""
    by_broker = _windows(sends, "store_host").agg(
        F.max("send_p99_millis").alias("latency"),
        (100 * F.sum("failed") / F.sum("sends")).alias("failed"),
    )
    rows = by_broker.orderBy("begin").collect()
    if not rows:
        return []
    return [
        _picture(out / "send-latency.png", "Send latency, p99", "ms", _lines(rows, "store_host", "latency"), moments),
        _picture(out / "send-failures.png", "Failed sends", "%", _lines(rows, "store_host", "failed"), moments),
    ]


def draw_trace(latency: DataFrame, out: Path) -> list[Path]:
    """Draw the latency of each stage and the failures of each group over time."""
    by_stage = _windows(latency, "stage").agg(F.max("latency_p99_millis").alias("latency"))
    by_group = _windows(latency.where(F.col("stage") == "consumed"), "group").agg(
        (100 * F.sum("failed") / F.sum("count")).alias("failed")
    )
    pictures = []
    if stages := by_stage.orderBy("begin").collect():
        title = "From born to stored to consumed, p99 of the slowest"
        pictures.append(_picture(out / "trace-latency.png", title, "ms", _lines(stages, "stage", "latency")))
    if groups := by_group.orderBy("begin").collect():
        title = "Failed deliveries"
        pictures.append(_picture(out / "trace-failures.png", title, "%", _lines(groups, "group", "failed")))
    return pictures


def draw_letters(by_window: DataFrame, causes: Sequence[tuple[str, int]], out: Path) -> list[Path]:
    """Draw the dead letters of each group over time, and the most frequent causes; no file when there are none."""
    by_group = _windows(by_window, "consumer_group").agg(F.sum("letters").alias("letters"))
    rows = by_group.orderBy("begin").collect()
    if not rows:
        return []
    return [
        _picture(out / "letters.png", "Messages given up", "messages", _lines(rows, "consumer_group", "letters")),
        _bars(out / "causes.png", "Messages given up, by group, topic and error", "messages", causes[:MOST_BARS]),
    ]


def _windows(frame: DataFrame, by: str) -> GroupedData:
    """Group by window and `by`. Windows are numbers: times would be converted to the zone of this machine."""
    begin = F.unix_timestamp("start")
    return (
        frame.withColumn("begin", begin)
        .withColumn("seconds", F.unix_timestamp("end") - begin)
        .groupBy("begin", "seconds", by)
    )


def _lines(rows: Sequence[Row], by: str, column: str) -> dict[str, Line]:
    """One line for each of the largest values of `by`."""
    lines: dict[str, Line] = {}
    for row in rows:
        line = lines.setdefault(str(row[by]), Line([], []))
        line.times.append(datetime.fromtimestamp(row["begin"] + row["seconds"] / 2, UTC))
        line.values.append(float(row[column]))
    largest = sorted(lines, key=lambda name: -sum(lines[name].values))[:MOST_LINES]
    return {name: lines[name] for name in sorted(largest)}


def _picture(path: Path, title: str, unit: str, lines: Mapping[str, Line], moments: Moments = NO_MOMENTS) -> Path:
    # Not pyplot: it keeps every figure, and needs a screen.
    from matplotlib import dates
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, line in lines.items():
        # matplotlib accepts dates; only its type annotations do not.
        axes.plot(line.times, line.values, marker="o", markersize=3, label=name)  # type: ignore[arg-type]
    if len({time for line in lines.values() for time in line.times}) == 1:
        only = next(iter(lines.values())).times[0]
        axes.set_xlim(only - timedelta(minutes=1), only + timedelta(minutes=1))  # type: ignore[arg-type]
    for name, moment in moments.items():
        axes.axvline(moment, color="grey", linestyle="--")  # type: ignore[arg-type]
        axes.annotate(name, (moment, 0.02), xycoords=("data", "axes fraction"), rotation=90, fontsize="small")
    locator = dates.AutoDateLocator(tz=UTC)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator, tz=UTC))  # type: ignore[no-untyped-call]
    axes.set_xlabel("UTC")
    axes.set_title(title)
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    figure.savefig(path, dpi=110)
    return path


def _bars(path: Path, title: str, unit: str, bars: Sequence[tuple[str, int]]) -> Path:
    """Draw one bar for each name, the first on top."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.5 + 0.35 * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    drawn = axes.barh([name for name, _ in bars], [count for _, count in bars])
    axes.bar_label(drawn, padding=3, fontsize="small")
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_title(title)
    axes.set_xlabel(unit)
    axes.grid(alpha=0.3, axis="x")
    figure.savefig(path, dpi=110)
    return path
