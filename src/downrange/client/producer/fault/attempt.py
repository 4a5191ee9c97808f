"""The end of one attempt to send, as fault strategies see it."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Outcome(StrEnum):
    """How an attempt ended. `client/producer/retry.py` says what follows from it and which error means which."""

    OK = "ok"
    NOT_STORE_OK = "not_store_ok"  # stored, but flush or replication was not confirmed in time
    TIMEOUT = "timeout"
    GIVEN_UP = "given_up"  # no answer within the time-out that the strategy learned, with time left for another broker
    CONNECT_FAILED = "connect_failed"  # also: the route knows no address of the broker
    CONNECTION_LOST = "connection_lost"
    BROKER_ERROR = "broker_error"  # a reply code that another broker may not give
    REFUSED = "refused"  # a reply code that every broker would give: the message or the sender is at fault
    FLOW_CONTROL = "flow_control"
    INTERRUPTED = "interrupted"  # the caller gave up; says nothing about the broker


class Attempt(NamedTuple):
    """One finished attempt, or several (`times`) that ended well. `latency_millis` is the longest time one took."""

    broker: str
    latency_millis: float
    outcome: Outcome
    times: int = 1
