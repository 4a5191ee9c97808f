"""Options: what each means, and what is said of one that cannot be."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from downrange.settings import format_value
from downrange.spark.errors import OptionError
from downrange.spark.options import ReadPosition, SourceOptions, parse_options, source_settings
from downrange.spark.schema import message_schema


def options(**given: str) -> SourceOptions:
    return parse_options({"subscribe": "orders", **given} if not given.keys() & CHOICES else given)


CHOICES = {"subscribe", "subscribePattern", "assign"}


def test_names_are_the_same_in_any_case() -> None:
    assert parse_options({"SUBSCRIBE": "orders", "maxoffsetspertrigger": "5"}).max_offsets_per_trigger == 5


def test_topics_are_separated_by_commas() -> None:
    assert options(subscribe=" a, b ,c,").topics == ("a", "b", "c")


def test_what_spark_adds_is_let_through() -> None:
    assert options(path="x", checkpointLocation="y").topics == ("orders",)


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({}, ReadPosition()),
        ({"startingOffsets": "Latest"}, ReadPosition(word="latest")),
        ({"startingTimestamp": "1763200000000"}, ReadPosition(millis=1_763_200_000_000)),
        ({"startingTimestamp": "2026-11-15T12:00:00Z"}, ReadPosition(millis=1_794_744_000_000)),
        ({"startingTimestamp": "2026-11-15 12:00:00"}, ReadPosition(millis=1_794_744_000_000)),
        ({"startingTimestamp": "2026-11-15T13:00:00+01:00"}, ReadPosition(millis=1_794_744_000_000)),
    ],
)
def test_places(given: dict[str, str], place: ReadPosition) -> None:
    assert options(**given).starting == place


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("30s", 30), ("15m", 900), ("1.5h", 5400), ("1d", 86400)]
)
def test_durations(text: str, seconds: float) -> None:
    assert options(maxTriggerDelay=text).trigger_delay_seconds == seconds


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"subscrib": "a"}, r"unknown option subscrib; did you mean subscribe\?"),
        ({"zzzzzz": "a"}, r"unknown option zzzzzz$"),
        ({"subscribe": "a", "assign": "{}"}, "subscribe and assign exclude each other"),
        ({"subscribe": " , "}, "subscribe names no topic"),
        ({"subscribe": "a b"}, "subscribe: The specified topic contains illegal characters"),
        ({"subscribePattern": "("}, r"subscribePattern=\( is not a regular expression"),
        ({"tags": "a", "sqlFilter": "b > 1"}, "tags and sqlFilter exclude each other"),
        ({"startingOffsets": "latest", "startingTimestamp": "1"}, "startingOffsets and startingTimestamp exclude"),
        ({"startingOffsets": "lates"}, "startingOffsets=lates: expected earliest, latest, group or JSON"),
        ({"startingTimestamp": "yesterday"}, "startingTimestamp=yesterday: expected milliseconds"),
        ({"endingOffsets": "earliest"}, "endingOffsets=earliest: nothing would be read"),
        ({"startingOffsets": "group"}, "no group is named: give the option group"),
        ({"commitGroupOffsets": "true"}, "no group is named"),
        ({"group": "a b"}, "group: The specified group contains illegal characters"),
        ({"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger=0: expected a whole number of at least 1"),
        ({"maxOffsetsPerTrigger": "many"}, "maxOffsetsPerTrigger=many: expected a whole number"),
        ({"minPartitions": "0"}, "minPartitions=0"),
        ({"failOnDataLoss": "maybe"}, "failOnDataLoss=maybe: expected true or false"),
        ({"maxTriggerDelay": "15"}, "maxTriggerDelay=15: expected a number with ms, s, m, h or d"),
        ({"accessKey": "a"}, "accessKey and secretKey go together"),
        ({"namesrv": "nowhere"}, "namesrv: "),
        ({"brokerName": "b"}, "brokerName goes with storePath"),
        ({"storePath": "x", "namesrv": "h:1"}, "namesrv needs a broker: it does not go with storePath"),
        ({"storePath": "x", "sqlFilter": "a > 1"}, "sqlFilter needs a broker"),
        ({"storePath": "x", "group": "g", "startingOffsets": "group"}, "startingOffsets=group needs a broker"),
    ],
)
def test_what_cannot_be_is_said(given: dict[str, str], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        options(**given)


def test_nothing_chosen() -> None:
    with pytest.raises(OptionError, match="give one of subscribe, subscribePattern and assign"):
        parse_options({})


def test_options_travel_and_keep_their_secret() -> None:
    found = options(accessKey="me", secretKey="hush")
    assert pickle.loads(pickle.dumps(found)) == found  # noqa: S301
    assert "hush" not in repr(found)
    assert "hush" not in repr(found.client_config())


def test_every_option_has_a_sentence() -> None:
    for one in source_settings():
        assert one.help.endswith((".", "`.")), one.key


def test_the_reference_lists_every_option_as_it_is() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "spark-options.md").read_text("utf-8")
    for one in source_settings():
        default = "" if one.default is None else format_value(one.default)
        unit = f" ({one.unit})" if one.unit else ""
        row = f"| `{one.key}` | {default} | {one.help.replace('||', chr(92) + '|' + chr(92) + '|')}{unit} |"
        assert row in page, f"docs/reference/spark-options.md lacks: {row}"
    assert len(re.findall(r"^\| `[\w.]+` \| .* \|$", page.partition("## Columns")[0], re.MULTILINE)) == len(
        source_settings()
    )


def test_the_reference_lists_every_column() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "spark-options.md").read_text("utf-8")
    for name in message_schema(include_properties=True).names:
        assert f"`{name}`" in page.partition("## Columns")[2]
