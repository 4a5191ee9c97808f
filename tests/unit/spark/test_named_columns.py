from __future__ import annotations

import pytest

from downrange.spark.pipelines.errors import PipelineError
from downrange.spark.pipelines.frames import columns_named_in
from downrange.spark.pipelines.sql import ViewKind, json_row, parse_view, plain


@pytest.mark.parametrize(
    ("query", "columns"),
    [
        ("SELECT topic, count(*) FROM orders GROUP BY topic", ("topic",)),
        ("SELECT count( * ) FROM orders", ("queue_offset",)),
        ("SELECT Tags, octet_length(BODY) FROM orders", ("tags", "body")),
        ("SELECT properties['color'] FROM orders", ("properties",)),
        ("SELECT * FROM orders", None),
        ("SELECT o.* FROM orders o", None),
        ("SELECT topic FROM a NATURAL JOIN b", None),
    ],
)
def test_a_query_reads_the_columns_it_names(query: str, columns: tuple[str, ...] | None) -> None:
    assert columns_named_in(query) == columns


def test_views_have_names() -> None:
    assert parse_view("order-events", ViewKind.TOPIC, {}).name == "order_events"
    assert parse_view("o=order-events", ViewKind.TOPIC, {}).value == "order-events"
    assert parse_view("somewhere", ViewKind.LAKE, {}).name == "lake"
    with pytest.raises(PipelineError, match="cannot be a view"):
        parse_view("1=orders", ViewKind.TOPIC, {})
    with pytest.raises(PipelineError, match="is not a store directory"):
        parse_view("nowhere", ViewKind.STORE, {})


def test_bytes_are_shown_as_text_or_hexadecimal() -> None:
    from pyspark.sql import Row

    assert plain(bytearray(b"text")) == "text"
    assert plain(b"\xff\x00") == "ff00"
    assert json_row(Row(body=b"{}", n=1)) == '{"body": "{}", "n": 1}'
