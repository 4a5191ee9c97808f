"""Turns rows of a DataFrame into messages. The columns are checked once, at the start of a write."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from downrange.model.errors import MessageError
from downrange.model.message import Message
from downrange.spark.delivery import Level
from downrange.spark.errors import SchemaMismatch
from downrange.spark.sink_options import SinkOptions

if TYPE_CHECKING:
    import pyarrow as pa

ROW_PROPERTY: Final = "SPARK_ROW"
"""The row key `query/batch/partition/row`: equal if a batch or task runs again, so that consumers see a repetition."""
ATTEMPT_PROPERTY: Final = "SPARK_ATTEMPT"
"""The token of the task attempt that sent a half message."""

_STRING: Final = StringType()
_WHOLE_NUMBERS: Final[tuple[DataType, ...]] = (ByteType(), ShortType(), IntegerType(), LongType())
COLUMNS: Final[dict[str, tuple[str, tuple[DataType, ...]]]] = {
    "topic": ("string", (_STRING,)),
    "body": ("binary or string", (BinaryType(), _STRING)),
    "tags": ("string", (_STRING,)),
    "keys": ("string or array<string>", (_STRING, ArrayType(_STRING))),
    "sharding_key": ("string", (_STRING,)),
    "delay": ("int", _WHOLE_NUMBERS),
    "deliver_at": ("timestamp, or bigint for milliseconds since 1970", (TimestampType(), LongType())),
    "properties": ("map<string,string>", (MapType(_STRING, _STRING),)),
}


def check_columns(schema: StructType, options: SinkOptions) -> None:
    """Refuse a DataFrame that cannot be written; the error names the column."""
    for field in schema.fields:
        if field.name not in COLUMNS:
            nearest = difflib.get_close_matches(field.name, COLUMNS, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"a message has {', '.join(COLUMNS)}"
            raise SchemaMismatch(f"the sink knows no column {field.name}: {hint}")
        words, kinds = COLUMNS[field.name]
        if not any(_is_same(field.dataType, kind) for kind in kinds):
            raise SchemaMismatch(f"the column {field.name} is {field.dataType.simpleString()}; expected {words}")
    names = schema.fieldNames()
    if len(set(names)) != len(names):
        raise SchemaMismatch(f"a column stands twice: {', '.join(names)}")
    if "body" not in names:
        raise SchemaMismatch("the column body is missing: it is what a message carries, binary or string")
    if "topic" not in names and options.topic is None:
        raise SchemaMismatch("the column topic is missing; without it the option topic must name one for all rows")
    if options.delivery_level is Level.TRANSACTIONAL:
        for name in ("delay", "deliver_at"):
            if name in names:
                level = "deliveryLevel=transactional"
                raise SchemaMismatch(f"the column {name} does not go with {level}: RocketMQ cannot delay transactions")


def _is_same(given: DataType, wanted: DataType) -> bool:
    """Whether two types are equal, apart from nullability and the collation of texts."""
    match given, wanted:
        case ArrayType(), ArrayType():
            return _is_same(given.elementType, wanted.elementType)
        case MapType(), MapType():
            return _is_same(given.keyType, wanted.keyType) and _is_same(given.valueType, wanted.valueType)
        case _:
            return type(given) is type(wanted)


@dataclass(frozen=True, slots=True)
class RowKey:
    """The parts of the property `SPARK_ROW`."""

    query: str
    batch: int
    partition: int
    row: int

    def __str__(self) -> str:
        return f"{self.query}/{self.batch}/{self.partition}/{self.row}"

    @classmethod
    def parse(cls, text: str) -> RowKey:
        try:
            query, batch, partition, row = text.split("/")
            return cls(query, int(batch), int(partition), int(row))
        except ValueError:
            raise MessageError(f"{text!r} is not a row key of the Spark sink") from None


class RowReader:
    """Turns the rows of one task attempt into messages. Rows are numbered from 0 in the order of arrival."""

    def __init__(self, topic: str | None, first: RowKey, token: str | None = None) -> None:
        self._topic = topic
        self._prefix = f"{first.query}/{first.batch}/{first.partition}/"
        self.count = first.row
        self._token = token

    def messages(self, batch: pa.RecordBatch) -> list[Message]:
        """One message for each row; raises a MessageError that names row and column."""
        start = self.count
        size = batch.num_rows
        self.count += size
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        topics = [self._topic] * size if self._topic is not None else columns["topic"].to_pylist()
        bodies = columns["body"].to_pylist()
        none = [None] * size
        tags = _values(columns, "tags", none)
        keys = _values(columns, "keys", none)
        sharding_keys = _values(columns, "sharding_key", none)
        delays = _values(columns, "delay", none)
        times = _millis(columns.get("deliver_at"), none)
        maps = _values(columns, "properties", none)
        found = []
        for number, (topic, body, tag, key, sharding_key, delay, deliver_at, pairs) in enumerate(
            zip(topics, bodies, tags, keys, sharding_keys, delays, times, maps, strict=True), start
        ):
            if topic is None or body is None:
                raise MessageError(f"row {self._prefix}{number}: {'topic' if topic is None else 'body'} is null")
            if deliver_at is not None and (delay or deliver_at < 0):
                problem = "it has delay and deliver_at" if delay else f"deliver_at is {deliver_at} ms, before 1970"
                raise MessageError(f"row {self._prefix}{number}: {problem}")
            properties = dict(pairs) if pairs else {}
            properties[ROW_PROPERTY] = f"{self._prefix}{number}"
            if self._token is not None:
                properties[ATTEMPT_PROPERTY] = self._token
            found.append(
                Message(
                    topic,
                    body.encode() if type(body) is str else body,
                    tag,
                    _joined(key, number) if type(key) is list else key,
                    0,
                    properties,
                    delay or 0,
                    sharding_key,
                    deliver_at=deliver_at,
                )
            )
        return found


def _values(columns: dict[str, Any], name: str, none: Sequence[None]) -> Sequence[Any]:
    column = columns.get(name)
    return none if column is None else column.to_pylist()


def _millis(column: Any, none: Sequence[None]) -> Sequence[int | None]:
    """Times as milliseconds since 1970; Spark's timestamps are microseconds."""
    if column is None:
        return none
    values: list[int | None] = column.cast("int64").to_pylist()
    if str(column.type) == "int64":
        return values
    return [None if value is None else value // 1000 for value in values]


def _joined(keys: Sequence[str | None], number: int) -> str | None:
    """Keys as one text, separated by blanks, as in RocketMQ."""
    for key in keys:
        if key is not None and " " in key:
            raise MessageError(f"row {number}: the key {key!r} holds a blank, which separates keys")
    return " ".join(key for key in keys if key) or None
