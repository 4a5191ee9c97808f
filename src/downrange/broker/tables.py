"""The tables of a broker: what it knows of topics, groups and clients, beside the messages in its store."""

from __future__ import annotations

from dataclasses import dataclass

from downrange.broker.clients import Consumers, Producers
from downrange.broker.filter_data import ConsumerFilters
from downrange.broker.groups import CommittedOffsets, Groups
from downrange.broker.topics import Topics


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables that handlers of requests and services share. Connected clients are in memory only."""

    topics: Topics
    groups: Groups
    offsets: CommittedOffsets
    consumers: Consumers
    producers: Producers
    filters: ConsumerFilters
