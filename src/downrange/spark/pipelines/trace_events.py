"""Entries of the trace topic as rows. The decoder is client/trace_reader.py, which reads traces of all clients.

kind          `send`, `begin` and `end` of a delivery, `transaction`, `recall`
request_id    joins begin and end of one call of a callback
time          when it began; of an `end`: when the callback was called
millis        how long it took; null where nothing says so
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from downrange.client.trace_reader import TracedDelivery, TracedSend, TracedTransaction, TraceEvent, events_of
from downrange.model.topics import TRACE_TOPIC
from downrange.spark.pipelines.frames import topic_frame

SEND: Final = "send"
BEGIN: Final = "begin"
END: Final = "end"
COLUMNS: Final[dict[str, DataType]] = {
    "kind": StringType(),
    "message_id": StringType(),
    "request_id": StringType(),
    "time": TimestampType(),
    "group": StringType(),
    "host": StringType(),
    "topic": StringType(),
    "tags": StringType(),
    "keys": StringType(),
    "broker": StringType(),
    "bytes": LongType(),
    "millis": LongType(),
    "success": BooleanType(),
    "code": IntegerType(),
    "retries": IntegerType(),
    "state": StringType(),
}
SCHEMA: Final = StructType([StructField(name, kind) for name, kind in COLUMNS.items()])


def events(traces: DataFrame) -> DataFrame:
    """The entries of trace messages, which have the columns `body` and `born_host`. Also of a stream."""
    # Not mapInArrow, which needs pandas.
    decode = arrow_udf(_decode, ArrayType(SCHEMA))  # type: ignore[call-overload]  # by the hints of _decode
    return traces.select(F.inline(decode("body", "born_host")))


def trace_frame(spark: SparkSession, options: Mapping[str, str], *, streaming: bool = False) -> DataFrame:
    """The trace topic of a cluster; options are those of the source `rocketmq`."""
    return topic_frame(spark, trace_options(options), ("topic", "body", "born_host"), streaming=streaming)


def trace_options(options: Mapping[str, str]) -> dict[str, str]:
    """Options of the source that name a topic: the usual trace topic unless they do already."""
    is_named = {name.lower() for name in options} & {"subscribe", "subscribepattern", "assign"}
    return dict(options) if is_named else {**options, "subscribe": TRACE_TOPIC}


def _decode(bodies: pa.Array, hosts: pa.Array) -> pa.Array:
    """Runs on a worker: the entries of each trace message."""
    found = []
    for body, host in zip(bodies.to_pylist(), hosts.to_pylist(), strict=True):
        report = ((body or b"").decode("utf-8", "replace"), (host or "").rpartition(":")[0])
        found.append([_row(event) for event in events_of([report])])
    schema = to_arrow_schema(SCHEMA, timezone="UTC")
    return pa.array(found, pa.list_(pa.struct(list(schema))))


def _row(event: TraceEvent) -> dict[str, Any]:
    what = event.what
    row: dict[str, Any] = {
        "kind": "recall",
        "message_id": event.message_id,
        "request_id": event.request_id,
        "time": what.timestamp * 1000 or None,
        "group": what.group or None,
        "host": what.client_host,
    }
    match what:
        case TracedSend():
            row |= {"kind": SEND, "topic": what.topic, "tags": what.tags, "keys": what.keys}
            row |= {"broker": what.store_host, "bytes": what.body_length, "millis": what.cost_millis}
            row["success"] = what.success
        case TracedDelivery():
            row |= {"kind": BEGIN if what.success is None else END, "millis": what.cost_millis}
            row |= {"success": what.success, "code": what.code, "retries": what.retry_times}
        case TracedTransaction():
            row |= {"kind": "transaction", "state": what.state}
        case _:
            row["success"] = what.success
    return row
