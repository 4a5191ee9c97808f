"""Which outcome of an attempt is tried again, and where."""

from __future__ import annotations

import asyncio

import pytest

from downrange.client.errors import BrokerNotFound
from downrange.client.producer.fault import Outcome
from downrange.client.producer.retry import (
    Decision,
    SendKind,
    after_async_attempt,
    after_attempt,
    attempt_timeout,
    attempts_allowed,
    outcome_of_code,
    outcome_of_error,
)
from downrange.protocol.codes import ResponseCode
from downrange.protocol.errors import broker_error
from downrange.transport.errors import ConnectFailed, ConnectionLost, RequestTimedOut

TRANSPORT = (Outcome.TIMEOUT, Outcome.GIVEN_UP, Outcome.CONNECT_FAILED, Outcome.CONNECTION_LOST)


def after(outcome: Outcome, code: int | None = None, *, number: int = 1, now: float = 0, **more: bool) -> Decision:
    return after_attempt(number, 3, outcome, code, now, 3, **more)


@pytest.mark.parametrize("code", [int(code) for code in ResponseCode])
def test_exactly_six_reply_codes_are_tried_on_another_broker(code: int) -> None:
    decision = after(outcome_of_code(code), code)
    if code in (0, 10, 11, 12):
        assert decision is Decision.RETURN
    else:
        assert decision is (Decision.RETRY if code in (17, 14, 1, 16, 204, 205) else Decision.RAISE)


@pytest.mark.parametrize("code", [2, 215])
def test_flow_control_is_not_answered_with_more_load(code: int) -> None:
    assert outcome_of_code(code) is Outcome.FLOW_CONTROL
    assert after(Outcome.FLOW_CONTROL, code) is Decision.RAISE


@pytest.mark.parametrize("outcome", TRANSPORT)
def test_transport_failures_are_retried_until_attempts_or_time_run_out(outcome: Outcome) -> None:
    assert after(outcome, number=1) is Decision.RETRY
    assert after(outcome, number=2, now=2.9) is Decision.RETRY
    assert after(outcome, number=3) is Decision.RAISE
    assert after(outcome, number=1, now=3) is Decision.RAISE
    # A timer may fire a little early; an attempt with what is left would blame a broker that is well.
    assert after(outcome, number=1, now=2.9996) is Decision.RAISE


@pytest.mark.parametrize("outcome", [*TRANSPORT, Outcome.BROKER_ERROR, Outcome.REFUSED, Outcome.FLOW_CONTROL])
def test_a_result_that_exists_beats_a_later_error(outcome: Outcome) -> None:
    assert after(outcome, 1, number=3, has_result=True) is Decision.RETURN


def test_stored_but_not_safe_is_returned_unless_the_caller_wants_another_broker() -> None:
    assert after(Outcome.NOT_STORE_OK, 10) is Decision.RETURN
    another = {"retry_another_broker_when_not_store_ok": True}
    assert after(Outcome.NOT_STORE_OK, 10, **another) is Decision.RETRY
    assert after(Outcome.NOT_STORE_OK, 10, number=3, **another) is Decision.RETURN
    assert after(Outcome.NOT_STORE_OK, 10, now=3, **another) is Decision.RETURN


def test_an_interrupted_caller_gets_the_interruption() -> None:
    assert after(Outcome.INTERRUPTED, has_result=True) is Decision.RAISE


@pytest.mark.parametrize("outcome", list(Outcome))
def test_async_retries_transport_failures_only_and_on_the_same_broker(outcome: Outcome) -> None:
    decision = after_async_attempt(1, 3, outcome, 0, 3)
    if outcome in TRANSPORT:
        assert decision is Decision.RETRY_SAME_BROKER
    elif outcome in (Outcome.OK, Outcome.NOT_STORE_OK):
        assert decision is Decision.RETURN
    else:
        assert decision is Decision.RAISE
    if outcome in TRANSPORT:
        assert after_async_attempt(3, 3, outcome, 0, 3) is Decision.RAISE
        assert after_async_attempt(1, 3, outcome, 2.9996, 3) is Decision.RAISE


@pytest.mark.parametrize(
    ("kind", "attempts"),
    [(SendKind.SYNC, 3), (SendKind.ASYNC, 5), (SendKind.SYNC_GIVEN_QUEUE, 1), (SendKind.ONEWAY, 1)],
)
def test_attempts_by_kind_of_send(kind: SendKind, attempts: int) -> None:
    assert attempts_allowed(kind, 2, 4) == attempts
    assert attempts_allowed(kind, 0, -1) == 1


def test_what_each_error_means() -> None:
    assert outcome_of_error(RequestTimedOut("no answer")) is Outcome.TIMEOUT
    assert outcome_of_error(TimeoutError()) is Outcome.TIMEOUT
    assert outcome_of_error(ConnectFailed("refused")) is Outcome.CONNECT_FAILED
    assert outcome_of_error(ConnectionLost("reset")) is Outcome.CONNECTION_LOST
    assert outcome_of_error(BrokerNotFound("no address")) is Outcome.CONNECT_FAILED
    assert outcome_of_error(asyncio.CancelledError()) is Outcome.INTERRUPTED
    assert outcome_of_error(KeyboardInterrupt()) is Outcome.INTERRUPTED
    assert outcome_of_error(broker_error(14, "shutting down")) is Outcome.BROKER_ERROR
    assert outcome_of_error(broker_error(13, "too long")) is Outcome.REFUSED
    assert outcome_of_error(broker_error(2, "busy")) is Outcome.FLOW_CONTROL


def test_an_attempt_gets_what_is_left_or_its_own_limit() -> None:
    assert attempt_timeout(1, 3) == 2
    assert attempt_timeout(1, 3, 0.5) == 0.5
    assert attempt_timeout(2.75, 3, 0.5) == 0.25
    assert attempt_timeout(4, 3) == 0
