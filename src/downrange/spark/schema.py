"""The columns of a message in Spark, in order, with their Spark types."""

from __future__ import annotations

from typing import Final

from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

COLUMNS: Final[dict[str, DataType]] = {
    "topic": StringType(),
    "broker": StringType(),
    "queue_id": IntegerType(),
    "queue_offset": LongType(),
    "physical_offset": LongType(),
    "msg_id": StringType(),  # the offset message id: store host and physical offset
    "unique_key": StringType(),
    "keys": StringType(),  # separated by blanks, as in RocketMQ
    "tags": StringType(),
    "body": BinaryType(),
    "born_time": TimestampType(),
    "store_time": TimestampType(),
    "born_host": StringType(),
    "store_host": StringType(),
    "reconsume_times": IntegerType(),
    "sys_flag": IntegerType(),
}
PROPERTIES: Final = MapType(StringType(), StringType())  # only on request: the most expensive column


def message_schema(*, include_properties: bool = False) -> StructType:
    """The schema of all columns. It is built by hand because `StructType.fromDDL` fails inside workers."""
    fields = [StructField(name, kind) for name, kind in COLUMNS.items()]
    if include_properties:
        fields.append(StructField("properties", PROPERTIES))
    return StructType(fields)
