"""A consumer as a member of its group."""

from __future__ import annotations

from typing import NamedTuple

from downrange.client.consumer.config import ConsumerConfig
from downrange.client.session import Session


class Membership(NamedTuple):
    """The group of a consumer, with its namespace, and how the consumer reaches and consumes it."""

    session: Session
    group: str
    config: ConsumerConfig
