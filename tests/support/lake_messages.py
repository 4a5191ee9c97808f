"""Messages as the Spark source hands them out, made by hand, and what readers find in a lake."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

import pyarrow as pa
from deltalake import DeltaTable

from downrange.spark.lake.lake import Lake
from downrange.spark.lake.layout import LakeFile
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


def write(lake: Lake, *batches: pa.RecordBatch) -> list[LakeFile]:
    """What one task writes; nothing counts yet."""
    writer = LakeWriter(lake.location)
    for batch in batches:
        writer.add(batch)
    return writer.finish()


def commit(lake: Lake, batch: int, *batches: pa.RecordBatch, name: str = "archive") -> bool:
    """What one batch of an archive does."""
    return lake.commit_batch(name, batch, write(lake, *batches), {})


Place = tuple[str, str, int, int]
_PLACE = ["topic", "broker", "queue_id", "queue_offset"]


def places(table: pa.Table) -> Counter[Place]:
    """How often each message is there."""
    return Counter(zip(*(table.column(name).to_pylist() for name in _PLACE), strict=True))


def expected(*batches: pa.RecordBatch) -> Counter[Place]:
    return places(pa.Table.from_batches(batches))


def found(lake: Lake) -> Counter[Place]:
    """What a reader of Delta tables sees that knows nothing of us."""
    location = lake.location
    table = DeltaTable(location.url, storage_options=dict(location.storage_options))
    return places(pa.table(table.scan(columns=_PLACE).read_all()))


def column(lake: Lake, name: str) -> Counter[object]:
    """How often each value of a column is in the lake."""
    return Counter(lake.dataset().to_table([name])[name].to_pylist())


def stored(lake: Lake) -> int:
    """The number of Parquet files that are there, whether they count or not."""
    import pyarrow.fs

    selector = pyarrow.fs.FileSelector("", recursive=True)
    infos = lake.location.filesystem().get_file_info(selector)
    return sum(info.path.endswith(".parquet") and "_delta_log" not in info.path for info in infos)
