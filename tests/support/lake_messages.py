"""Messages as the Spark source hands them out, made by hand, and what readers find in a lake."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from downrange.spark.lake.lake import Lake
from downrange.spark.lake.manifest import LakeFile
from downrange.spark.lake.writer import LakeWriter

DAY = datetime(2026, 11, 15, tzinfo=UTC)
MICROS = pa.timestamp("us", "UTC")


def messages(
    start: int,
    end: int,
    *,
    topic: str = "orders",
    broker: str = "broker-a",
    queue_id: int = 0,
    begin: datetime = DAY,
    millis: int = 1,
) -> pa.RecordBatch:
    """Messages `start` to before `end` of one queue, each `millis` after the one before."""
    offsets = range(start, end)
    count = len(offsets)
    times = [int(begin.timestamp() * 1_000_000) + offset * millis * 1000 for offset in offsets]
    return pa.RecordBatch.from_pydict(
        {
            "topic": pa.array([topic] * count, pa.string()),
            "broker": pa.array([broker] * count, pa.string()),
            "queue_id": pa.array([queue_id] * count, pa.int32()),
            "queue_offset": pa.array(offsets, pa.int64()),
            "physical_offset": pa.array([offset * 200 for offset in offsets], pa.int64()),
            "keys": pa.array([f"key-{offset}" for offset in offsets], pa.string()),
            "tags": pa.array([f"tag{offset % 3}" for offset in offsets], pa.string()),
            "body": pa.array([b"%s %d %d" % (topic.encode(), queue_id, offset) for offset in offsets], pa.binary()),
            "born_time": pa.array(times, MICROS),
            "store_time": pa.array(times, MICROS),
            "properties": pa.array(
                [[("KEYS", f"key-{offset}"), ("color", "green")] for offset in offsets],
                pa.map_(pa.string(), pa.string()),
            ),
        }
    )


def write(lake: Lake, *batches: pa.RecordBatch, name: str = "archive") -> list[LakeFile]:
    """What one task writes; nothing counts yet."""
    writer = LakeWriter(lake.root, name)
    for batch in batches:
        writer.add(batch)
    return writer.finish()


Place = tuple[str, str, int, int]


def places(table: pa.Table) -> Counter[Place]:
    """How often each message is there."""
    columns = [table.column(name) for name in ("topic", "broker", "queue_id", "queue_offset")]
    return Counter(zip(*(column.to_pylist() for column in columns), strict=True))


def by_manifest(lake: Lake) -> Counter[Place]:
    if not lake.contents().files:
        return Counter()
    return places(lake.dataset().to_table(["topic", "broker", "queue_id", "queue_offset"]))


def all_files(root: Path, *columns: str) -> pa.Table:
    """What is in all Parquet files, with no regard to the manifest."""
    tables = [pq.read_table(path, columns=list(columns), partitioning=None) for path in root.rglob("*.parquet")]
    return pa.concat_tables(tables) if tables else pa.table({name: [] for name in columns})


def by_glob(root: Path) -> Counter[Place]:
    """What DuckDB sees, which knows nothing of manifests."""
    import duckdb  # not beside Spark: Spark's threads outlive the interpreter, and DuckDB complains about that

    if not list(root.rglob("*.parquet")):
        return Counter()
    query = f"SELECT topic, broker, queue_id, queue_offset FROM read_parquet('{root}/**/*.parquet')"  # noqa: S608
    return Counter(duckdb.execute(query).fetchall())
