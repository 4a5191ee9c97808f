"""Figures from the `/metrics` addresses of brokers: rates of all topics, and which groups fell behind.

They are read every 15 seconds. Without them a group that nobody looks at is asked for once a minute, and of very many
topics each comes up once in some minutes. A lag in the metrics is a hint: the group is asked for at once, so that its
figures have one source.
"""

from __future__ import annotations

import asyncio
import logging
import re
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Mapping
from http.client import HTTPException
from typing import Final, NamedTuple

from downrange.console.clusters import ANSWER_SECONDS, Cluster

log = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 15.0
_MOST_BYTES: Final = 64 << 20
_LAG: Final = "rocketmq_consumer_lag_messages"
_STORED: Final = "rocketmq_messages_in_total"
_LINE: Final = re.compile(rf"^({_LAG}|{_STORED})\{{([^\n]*)\}} ([0-9.eE+]+)", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Metrics(NamedTuple):
    """The figures of one address: messages that wait by group, and messages ever stored by topic."""

    lag: Mapping[str, float]
    stored: Mapping[str, float]


def read_metrics(text: str) -> Metrics:
    """The figures in a text of the Prometheus format; lines that are not understood are left out."""
    lag: defaultdict[str, float] = defaultdict(float)
    stored: defaultdict[str, float] = defaultdict(float)
    for name, labels, value in _LINE.findall(text):
        known = dict(_LABEL.findall(labels))
        try:
            figure = float(value)
        except ValueError:
            continue
        if name == _LAG:
            lag[known.get("consumer_group", "")] += figure
        else:
            stored[known.get("topic", "")] += figure
    return Metrics(lag, stored)


class MetricsWatch:
    """Reads the metrics of one cluster. `ask_again` asks brokers for a group at once."""

    def __init__(self, cluster: Cluster, ask_again: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._ask_again = ask_again
        self._before: dict[str, tuple[float, Metrics]] = {}

    def __repr__(self) -> str:
        return f"<MetricsWatch {', '.join(self._cluster.metrics)}>"

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            texts = await asyncio.gather(*(self.fetch(address) for address in self._cluster.metrics))
            if all(text is not None for text in texts):  # the sum of some would be too small
                self.take({address: text or "" for address, text in zip(self._cluster.metrics, texts, strict=True)})
            await self._cluster.clock.sleep(PERIOD_SECONDS)

    async def fetch(self, address: str) -> str | None:
        """The text at an address; None when it cannot be read, which the snapshot tells."""
        errors = self._cluster.snapshot.metrics_errors
        try:
            text = await asyncio.to_thread(_get, address)
        except (OSError, HTTPException, ValueError) as error:
            if address not in errors:
                log.warning("metrics cannot be read address=%s reason=%s", address, error)
            errors[address] = str(error) or type(error).__name__
            return None
        errors.pop(address, None)
        return text

    def take(self, texts: Mapping[str, str]) -> None:
        """Put what was read at all addresses into the snapshot."""
        now = self._cluster.clock.monotonic()
        read = {address: read_metrics(text) for address, text in texts.items()}
        rates: defaultdict[str, float] = defaultdict(float)
        for address, metrics in read.items():
            if address in self._before and (seconds := now - self._before[address][0]) > 0:
                for topic, stored in metrics.stored.items():
                    more = max(0.0, stored - self._before[address][1].stored.get(topic, 0.0))
                    rates[topic] += more / seconds
            self._before[address] = now, metrics
        for topic, rate in rates.items():
            found = self._cluster.snapshot.topics.get(topic)
            if found is not None:
                found.rate, found.metered_at = rate, self._cluster.clock.now()
        lags: defaultdict[str, float] = defaultdict(float)
        for metrics in read.values():
            for group, lag in metrics.lag.items():
                lags[group] += lag
        for name, state in self._cluster.snapshot.groups.items():
            if name in lags and bool(lags[name]) != bool(state.behind):
                self._ask_again(name)


def _get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=ANSWER_SECONDS) as answer:  # noqa: S310  http or https, see config.py
        return str(answer.read(_MOST_BYTES).decode(errors="replace"))
