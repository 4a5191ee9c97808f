"""The options of a writer of messages, such as `.option("deliveryLevel", "transactional")`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from downrange.client.config import ClientConfig, ProducerConfig
from downrange.client.producer.outgoing import check_producer_group, check_topic
from downrange.model.errors import MQError
from downrange.settings import Property, configure, setting, settings_of
from downrange.spark.delivery import Level
from downrange.spark.errors import OptionError
from downrange.spark.options import duration_seconds, with_tls
from downrange.transport.tls_config import TlsConfig

# Options of a query that Spark passes on to the sink.
_OF_SPARK: Final = frozenset({"checkpointlocation", "path", "outputmode", "queryname"})
ATTEMPT_SECONDS: Final = 10.0
"""Longest time of one attempt, so that there is time for another broker."""
# The write id is part of the row key of a message, whose parts are separated by slashes.
_WRITE_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options of one write. Hashable: a worker process keeps one client for each set of options."""

    namesrv: str | None = setting(None, "Name servers, `host:port`, several separated by `;`.")
    topic: str | None = setting(None, "Topic of all rows; overrides the column `topic`.")
    delivery_level: Level = setting(Level.AT_LEAST_ONCE, "Promise about messages when something fails.")
    producer_group: str = setting("spark_sink", "Producer group of all tasks.")
    send_timeout: str = setting("30s", "Time limit of one send with all its attempts: a number with ms, s, m, h or d.")
    retries: int = setting(2, "Further attempts when a send fails, on another broker.", minimum=0)
    batch_bytes: int = setting(
        512 * 1024, "Rows are sent in requests of about this size.", unit="bytes", minimum=1024, maximum=4 * 1024 * 1024
    )
    max_in_flight: int = setting(8, "Requests of one task that wait for an answer; more in transactions.", minimum=1)
    check_after: str = setting(
        "2m",
        "Transactional: age at which brokers ask about half messages. Must be longer than a batch takes.",
    )
    marker_topic: str = setting("SPARK_SINK_MARKERS", "Topic that remembers finished batches, at the upper two levels.")
    write_id: str | None = setting(None, "Names a batch write, so that repeating it sends nothing twice.")
    mirror: str | None = setting(
        None, "Of `downrange pipeline mirror`: JSON that says to which queues the messages of another cluster go."
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

    def __post_init__(self) -> None:
        checks: tuple[tuple[str, str | None, Callable[[str], None]], ...] = (
            ("producerGroup", self.producer_group, check_producer_group),
            ("markerTopic", self.marker_topic, check_topic),
            ("topic", self.topic, check_topic),
        )
        for key, value, check in checks:
            if value is not None:
                try:
                    check(value)
                except MQError as error:
                    raise OptionError(f"{key}={value}: {error}") from None
        if self.write_id is not None and not _WRITE_ID.fullmatch(self.write_id):
            raise OptionError(f"writeId={self.write_id}: expected up to 100 letters, digits and . - _")
        if (self.access_key is None) != (self.secret_key is None):
            raise OptionError("accessKey and secretKey go together: give both")
        self.client_config(), self.producer_config(), self.check_after_seconds  # each raises if a value is wrong

    def __repr__(self) -> str:
        return f"<SinkOptions {self.delivery_level} topic={self.topic} namesrv={self.namesrv}>"

    @property
    def send_timeout_seconds(self) -> float:
        return duration_seconds("sendTimeout", self.send_timeout)

    @property
    def check_after_seconds(self) -> int:
        return round(duration_seconds("checkAfter", self.check_after))

    def client_config(self) -> ClientConfig:
        addresses = ClientConfig.of(self.namesrv)
        return ClientConfig(
            addresses.namesrv_addresses,
            "option namesrv" if self.namesrv is not None else addresses.source,
            # All sends of a task begin at once: those that wait for the first look-up of the route need as much time.
            route_lock_seconds=self.send_timeout_seconds,
            access_key=self.access_key,
            secret_key=self.secret_key,
            use_tls=self.tls_enable,
            tls=TlsConfig(config_file=self.tls_config_file),
        )

    def producer_config(self) -> ProducerConfig:
        return ProducerConfig(
            send_timeout_seconds=self.send_timeout_seconds,
            attempt_timeout_seconds=min(ATTEMPT_SECONDS, self.send_timeout_seconds),
            retry_times_when_send_failed=self.retries,
        )


def sink_options(given: Mapping[str, str]) -> SinkOptions:
    """The options of a write. Spark does not keep upper and lower case of their names."""
    known = {one.key.lower(): one.key for one in settings_of(SinkOptions)}
    properties = {}
    for name, value in given.items():
        key = known.get(name.lower())
        if key is not None:
            properties[key] = Property(value, "option")
        elif name.lower() not in _OF_SPARK:
            nearest = difflib.get_close_matches(name.lower(), known, n=1)
            hint = f"; did you mean {known[nearest[0]]}?" if nearest else f"; there are {', '.join(known.values())}"
            raise OptionError(f"unknown option {name} of the RocketMQ sink{hint}")
    try:
        return configure(SinkOptions, with_tls(properties))
    except OptionError:
        raise
    except MQError as error:
        raise OptionError(str(error)) from None
