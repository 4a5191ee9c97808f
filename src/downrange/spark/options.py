"""The options of `spark.read.format("rocketmq")` and `spark.readStream.format("rocketmq")`.

Names follow Spark's Kafka source where it has the same option. A wrong value, an unknown name and two options that
exclude each other are refused when the DataFrame is made, before anything is read.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from downrange.client.config import ClientConfig
from downrange.model.errors import MQError
from downrange.model.topics import TOOLS_GROUP, check_group_name, check_topic_name, is_system_topic
from downrange.settings import (
    ConfigError,
    Property,
    Setting,
    client_tls_file,
    configure,
    setting,
    settings_of,
    wants_client_tls,
)
from downrange.spark.errors import OptionError
from downrange.spark.offsets import Offsets, QueueChoice, parse_assign, parse_offsets
from downrange.transport.tls_config import TlsConfig

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
GROUP: Final = "group"

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
# Options that Spark itself passes to every source.
_OF_SPARK: Final = frozenset({"path", "header", "inferschema", "checkpointlocation", "queryname", "outputmode"})


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Every option of the source as it was given; properties give the parsed values. Frozen and picklable."""

    namesrv: str | None = setting(
        None, "Name servers, `host:port;host:port`. Default: NAMESRV_ADDR of the driver, else 127.0.0.1:9876."
    )
    subscribe: str | None = setting(None, "Topics, separated by commas.")
    subscribe_pattern: str | None = setting(
        None, "A regular expression. Every topic whose whole name matches is read, also topics that appear later."
    )
    assign: str | None = setting(None, 'Single queues as JSON: `{"orders": {"broker-a": [0, 1]}}`.')
    store_path: str | None = setting(
        None,
        "Read this store directory (live, stopped or a copy), and ask no broker. Every worker must be able to read it.",
    )
    broker_name: str | None = setting(
        None,
        "With storePath: value of the column broker. Default: the store's configured name, or the directory's name.",
    )
    starting_offsets: str | None = setting(
        None,
        "earliest, latest, group (the committed offsets of `group`) or JSON: "
        '`{"orders": {"broker-a": {"0": 42}}}`, -2 is earliest, -1 latest. Reads begin at earliest, streams at latest.',
    )
    ending_offsets: str | None = setting(None, "Reads only: latest, group or JSON as above, exclusive.")
    starting_timestamp: str | None = setting(
        None, "Begin with the first message stored at this time: milliseconds since 1970, or `2026-11-15T12:00:00Z`."
    )
    ending_timestamp: str | None = setting(None, "Reads only: end before the first message stored at this time.")
    starting_offsets_by_timestamp: str | None = setting(
        None, 'startingTimestamp for single queues, as JSON: `{"orders": {"broker-a": {"0": 1763200000000}}}`.'
    )
    ending_offsets_by_timestamp: str | None = setting(None, "Reads only: endingTimestamp for single queues.")
    max_offsets_per_trigger: int | None = setting(
        None, "Streams: the most messages of one batch; queues share them in proportion to their backlogs.", minimum=1
    )
    min_offsets_per_trigger: int | None = setting(
        None, "Streams: wait for this many messages, but no longer than maxTriggerDelay.", minimum=1
    )
    max_trigger_delay: str = setting(
        "15m", "Streams: the longest wait for minOffsetsPerTrigger. A number with ms, s, m, h or d."
    )
    min_partitions: int | None = setting(
        None, "The least number of tasks of a read or batch, if it has as many messages."
    )
    max_records_per_partition: int | None = setting(
        None,
        "The most messages of one task. By default a 32nd of all, but at least 100000 and at most 1000000.",
        minimum=1,
    )
    whole_queues: bool = setting(
        False,
        "One task reads all messages of a queue, in order. There are at most minPartitions tasks, one by default.",
    )
    fail_on_data_loss: bool = setting(
        True, "If messages were deleted before they were read: true ends the query, false logs a warning and goes on."
    )
    group: str = setting(TOOLS_GROUP, "The consumer group in whose name the source reads.")
    commit_group_offsets: bool = setting(
        False, "Streams: commit the offsets of `group` after each batch, so that `consumerProgress` shows the stream."
    )
    tags: str | None = setting(None, "Only messages with one of these tags: `paid || shipped`. Filtered by the broker.")
    sql_filter: str | None = setting(
        None, "Only messages for which this SQL92 expression is true: `amount > 100`. Filtered by the broker."
    )
    include_properties: bool = setting(False, "Add the column `properties`, a map. No other column costs as much time.")
    push_down_filters: bool = setting(
        False,
        "Reads only: narrow the read by filters on topic, broker, queue_id, queue_offset, store_time and tags. "
        "Needs spark.sql.python.filterPushdown.enabled=true, and a new `load()` for every query: Spark 4 keeps the "
        "narrowed read for later queries of the same DataFrame, and a query without the filter would miss rows.",
    )
    max_body_bytes: int = setting(
        16 << 20, "The longest decompressed body. A longer one is an error.", unit="bytes", minimum=1
    )
    check_crc: bool = setting(False, "Compare the checksum of every body.")
    pulls_in_flight: int = setting(
        16, "The most pulls of one task that wait for an answer at one time.", minimum=1, maximum=256
    )
    retry_timeout: str = setting(
        "60s", "How long a task repeats a request when neither a broker nor its slaves answer."
    )
    access_key: str | None = setting(None, "User of a cluster with access control.")
    secret_key: str | None = setting(None, "Secret of this user.")
    tls_enable: bool = setting(
        False,
        "Connect with TLS. Default: true if tls.config.file is given, or if ROCKETMQ_TLS_ENABLE of the driver says so.",
        key="tls.enable",
    )
    tls_config_file: Path | None = setting(
        None,
        "Properties file with the servers to trust and a certificate (`tls.client` keys). Every worker must have it. "
        "Default: ROCKETMQ_TLS_CONFIG_FILE of the driver.",
        key="tls.config.file",
    )

    # `secret_key` must not appear in a plan or a log.
    def __repr__(self) -> str:
        shown = (
            f"{known.key}={value!r}"
            for known in settings_of(type(self))
            if (value := getattr(self, known.field)) != known.default and known.field != "secret_key"
        )
        return f"SourceOptions({', '.join(shown)})"

    def __post_init__(self) -> None:
        chosen = [key for key, value in self._choices() if value is not None]
        if not chosen:
            raise OptionError("nothing to read is named: give one of subscribe, subscribePattern and assign")
        if len(chosen) > 1:
            raise OptionError(f"{' and '.join(chosen)} exclude each other: give one of them")
        for topic in self.topics:
            _told("subscribe", lambda topic=topic: check_topic_name(topic))
        if self.subscribe is not None and not self.topics:
            raise OptionError("subscribe names no topic")
        if self.subscribe_pattern is not None:
            try:
                re.compile(self.subscribe_pattern)
            except re.error as error:
                raise OptionError(
                    f"subscribePattern={self.subscribe_pattern} is not a regular expression: {error}"
                ) from None
        _ = self.assigned
        _told("group", lambda: check_group_name(self.group))
        if self.tags is not None and self.sql_filter is not None:
            raise OptionError("tags and sqlFilter exclude each other: a tag is `TAGS = 'paid'` in SQL")
        self._check_store()
        for which in ("starting", "ending"):
            given = [key for key, value in self._places(which) if value is not None]
            if len(given) > 1:
                raise OptionError(f"{' and '.join(given)} exclude each other: give one of them")
        _ = self.starting, self.ending, self.trigger_delay_seconds, self.retry_seconds
        if self.ending_offsets == EARLIEST:
            raise OptionError("endingOffsets=earliest: nothing would be read; expected latest, group or JSON")
        if (GROUP in (self.starting_offsets, self.ending_offsets) or self.commit_group_offsets) and (
            self.group == TOOLS_GROUP
        ):
            raise OptionError("offsets of a group are asked for, but no group is named: give the option group")
        if (self.access_key is None) != (self.secret_key is None):
            raise OptionError("accessKey and secretKey go together: give both")
        if self.min_partitions is not None and self.min_partitions < 1:
            raise OptionError(f"minPartitions={self.min_partitions}: expected a whole number of at least 1")
        if self.store_path is None:
            _told("namesrv", self.client_config)

    def matches(self, topic: str) -> bool:
        """Whether `subscribePattern` chooses a topic. `.*` means the topics of users.

        Retry and dead-letter topics are chosen by a pattern with `%`, a system topic by its exact name.
        """
        pattern = self.subscribe_pattern
        if pattern is None or is_system_topic(topic):
            return pattern == topic
        return (topic[:1] != "%" or "%" in pattern) and re.fullmatch(pattern, topic) is not None

    def _choices(self) -> list[tuple[str, str | None]]:
        return [
            ("subscribe", self.subscribe),
            ("subscribePattern", self.subscribe_pattern),
            ("assign", self.assign),
        ]

    def _places(self, which: str) -> list[tuple[str, str | None]]:
        return [
            (f"{which}Offsets", getattr(self, f"{which}_offsets")),
            (f"{which}Timestamp", getattr(self, f"{which}_timestamp")),
            (f"{which}OffsetsByTimestamp", getattr(self, f"{which}_offsets_by_timestamp")),
        ]

    def _check_store(self) -> None:
        if self.store_path is None:
            if self.broker_name is not None:
                raise OptionError("brokerName goes with storePath; a broker on the network has a name already")
            return
        for key, value in (
            ("namesrv", self.namesrv),
            ("sqlFilter", self.sql_filter),
            ("accessKey", self.access_key),
            ("commitGroupOffsets", self.commit_group_offsets or None),
            ("startingOffsets=group", self.starting_offsets == GROUP or None),
            ("endingOffsets=group", self.ending_offsets == GROUP or None),
        ):
            if value is not None:
                raise OptionError(f"{key} needs a broker: it does not go with storePath")

    @property
    def choice(self) -> str:
        """The topics as they were chosen: names, a pattern, or queues."""
        return next(value for _, value in self._choices() if value is not None)

    @property
    def topics(self) -> tuple[str, ...]:
        return tuple(part for piece in (self.subscribe or "").split(",") if (part := piece.strip()))

    @property
    def assigned(self) -> QueueChoice:
        return parse_assign("assign", self.assign) if self.assign is not None else {}

    @property
    def starting(self) -> ReadPosition:
        return _place("starting", self.starting_offsets, self.starting_timestamp, self.starting_offsets_by_timestamp)

    @property
    def ending(self) -> ReadPosition:
        return _place("ending", self.ending_offsets, self.ending_timestamp, self.ending_offsets_by_timestamp)

    @property
    def trigger_delay_seconds(self) -> float:
        return duration_seconds("maxTriggerDelay", self.max_trigger_delay)

    @property
    def retry_seconds(self) -> float:
        return duration_seconds("retryTimeout", self.retry_timeout)

    def client_config(self) -> ClientConfig:
        found = ClientConfig.of(self.namesrv)
        return ClientConfig(
            found.namesrv_addresses,
            found.source,
            access_key=self.access_key,
            secret_key=self.secret_key,
            use_tls=self.tls_enable,
            tls=TlsConfig(config_file=self.tls_config_file),
        )


@dataclass(frozen=True, slots=True)
class ReadPosition:
    """Where to begin or end: a word, a time for every queue, or a number or time for single queues."""

    word: str | None = None
    millis: int | None = None
    offsets: Offsets | None = None
    times: Offsets | None = None

    @property
    def is_given(self) -> bool:
        return self != ReadPosition()


def _place(which: str, offsets: str | None, timestamp: str | None, by_timestamp: str | None) -> ReadPosition:
    if timestamp is not None:
        return ReadPosition(millis=_millis(f"{which}Timestamp", timestamp))
    if by_timestamp is not None:
        return ReadPosition(times=parse_offsets(f"{which}OffsetsByTimestamp", by_timestamp))
    if offsets is None:
        return ReadPosition()
    if offsets.lower() in (EARLIEST, LATEST, GROUP):
        return ReadPosition(word=offsets.lower())
    if not offsets.lstrip().startswith("{"):
        raise OptionError(f"{which}Offsets={offsets}: expected earliest, latest, group or JSON")
    return ReadPosition(offsets=parse_offsets(f"{which}Offsets", offsets))


def _millis(key: str, text: str) -> int:
    if text.strip().lstrip("-").isdecimal():
        return int(text)
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise OptionError(
            f"{key}={text}: expected milliseconds since 1970 or a time such as 2026-11-15T12:00:00Z"
        ) from None
    # A time without a zone is UTC: the zone of the driver must not decide what is read.
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def duration_seconds(key: str, text: str) -> float:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*", text)
    if found is None:
        raise OptionError(f"{key}={text}: expected a number with ms, s, m, h or d, such as 30s")
    return float(found[1]) * _UNITS[found[2]]


def _told(key: str, check: object) -> None:
    """Run `check`; put the name of the option in front of the text of its error."""
    try:
        check()  # type: ignore[operator]
    except OptionError:
        raise
    except MQError as error:
        raise OptionError(f"{key}: {error}") from None


def with_tls(given: Mapping[str, Property]) -> dict[str, Property]:
    """The options with those of TLS settled here, on the driver: a worker may have another environment."""
    options = dict(given)
    file = client_tls_file()
    if "tls.enable" not in options and ("tls.config.file" in options or wants_client_tls()):
        options["tls.enable"] = Property("true")
    if "tls.config.file" not in options and file is not None:
        options["tls.config.file"] = Property(str(file.absolute()))
    return options


def parse_options(given: Mapping[str, str]) -> SourceOptions:
    """The options of one read or stream. As in Spark, upper and lower case in their names are equal."""
    known = {one.key.lower(): one for one in source_settings()}
    properties = {}
    for name, value in given.items():
        one = known.get(name.lower())
        if one is not None:
            properties[one.key] = Property(value)
        elif name.lower() not in _OF_SPARK:
            nearest = difflib.get_close_matches(name.lower(), known, n=1)
            hint = f"; did you mean {known[nearest[0]].key}?" if nearest else ""
            raise OptionError(f"unknown option {name}{hint}")
    try:
        return configure(SourceOptions, with_tls(properties))
    except ConfigError as error:
        raise OptionError(str(error)) from None


def source_settings() -> tuple[Setting, ...]:
    """Every option with its default and its meaning, for docs/reference/spark-options.md."""
    return settings_of(SourceOptions)
