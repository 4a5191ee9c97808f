"""The verdict about one message and one group, from evidence alone, in its fixed order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from downrange.client.admin.verdicts import (
    GroupEvidence,
    Hidden,
    Member,
    NotVisible,
    Retry,
    VerdictKind,
    verdict,
)
from downrange.client.trace import ConsumeCode
from downrange.client.trace_reader import TracedDelivery
from downrange.model.message import MessageQueue
from downrange.model.subscription import SQL92, subscribe

NOW = 1_700_000_000_000
QUEUE = MessageQueue("orders", "broker-a", 1)
BY_SQL = subscribe("orders", "a > 1", SQL92)
RUNNING = GroupEvidence(
    group="billing",
    queue=QUEUE,
    queue_offset=40,
    now=NOW,
    members=2,
    subscription=subscribe("orders", "*"),
    committed=10,
    owner=Member("10.0.0.8@4712", NOW - 1000),
    owner_is_known=True,
    messages_per_second=3.1,
)


def test_a_message_that_is_not_visible_yet_is_that_before_all_else() -> None:
    found = verdict(RUNNING, NotVisible(Hidden.DELAYED, due=NOW + 5))
    assert (found.kind, found.at) == (VerdictKind.NOT_VISIBLE, NOW + 5)
    assert "asked 3 times" in verdict(RUNNING, NotVisible(Hidden.HALF, checks=3)).reason
    assert "rolled back" in verdict(RUNNING, NotVisible(Hidden.ROLLED_BACK)).reason


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        ({}, VerdictKind.WAITING, "30 before it, about 10 s"),
        ({"messages_per_second": 0.0}, VerdictKind.WAITING, "30 before it"),
        ({"committed": None}, VerdictKind.WAITING, "committed nothing"),
        ({"committed": 40}, VerdictKind.WAITING, "0 before it"),
        ({"committed": 41}, VerdictKind.CONSUMED, "committed up to 41"),
        ({"committed": 41, "members": 0}, VerdictKind.CONSUMED, "not known while nobody runs"),
        ({"members": 0}, VerdictKind.NOBODY, "no member"),
        ({"members": 0, "owner_is_known": True, "owner": None}, VerdictKind.NOBODY, "no member"),
        ({"owner": None}, VerdictKind.STUCK, "queue 1 of broker-a has no member"),
        ({"owner": None, "owner_is_known": False}, VerdictKind.WAITING, "30 before it"),
        ({"owner": Member("x", NOW - 61_000)}, VerdictKind.STUCK, "for 61 s"),
        ({"subscription": None}, VerdictKind.FILTERED, "do not subscribe to orders"),
        ({"subscription": None, "members": 0}, VerdictKind.NOBODY, "no member"),
        (
            {"subscription": subscribe("orders", "a > 1", SQL92), "matches": False},
            VerdictKind.FILTERED,
            "SQL92 'a > 1'",
        ),
        ({"subscription": subscribe("orders", "sent"), "matches": False}, VerdictKind.FILTERED, "tag 'sent'"),
        ({"unanswered": {"broker-a": "timed out"}}, VerdictKind.UNKNOWN, "broker-a did not answer: timed out"),
        ({"unanswered": {"broker-a": "timed out"}, "committed": 41}, VerdictKind.UNKNOWN, "broker-a"),
        ({"is_broadcasting": True, "committed": 99}, VerdictKind.UNKNOWN, "broadcast"),
        # A message that was given up or is retried is committed, too.
        ({"dead_since": NOW - 5, "committed": 41}, VerdictKind.GIVEN_UP, "dead letter"),
        ({"retry": Retry(2, NOW - 9, due=NOW + 7), "committed": 41}, VerdictKind.RETRIED, "retry 2 waits"),
        ({"retry": Retry(2, NOW - 9), "committed": 41}, VerdictKind.RETRIED, "not consumed yet"),
        ({"retry": Retry(2, NOW - 9, is_committed=True), "committed": 41}, VerdictKind.CONSUMED, "after 2 retries"),
        ({"retry": Retry(3, NOW - 9, is_committed=True), "dead_since": NOW - 5}, VerdictKind.GIVEN_UP, "dead letter"),
        ({"retry": Retry(0, NOW - 2), "dead_since": NOW - 5, "committed": 41}, VerdictKind.RETRIED, "retry 0"),
    ],
)
def test_the_first_verdict_that_fits_is_given(changes: dict[str, object], kind: VerdictKind, says: str) -> None:
    found = verdict(replace(RUNNING, **changes))  # type: ignore[arg-type]
    assert (found.kind, says in found.reason) == (kind, True), found
    assert found.group == "billing"


def test_a_trace_says_when_and_by_whom_it_was_consumed() -> None:
    failed = TracedDelivery(NOW - 90, "billing", "10.0.0.7", 0, 4, success=False, code=ConsumeCode.FAILED)
    done = TracedDelivery(NOW - 50, "billing", "10.0.0.8", 1, 9, success=True, code=ConsumeCode.SUCCESS)
    found = verdict(replace(RUNNING, committed=41, deliveries=(failed, done)))
    assert (found.kind, found.at) == (VerdictKind.CONSUMED, NOW - 41)
    assert "10.0.0.8 in 9 ms" in found.reason
    assert verdict(replace(RUNNING, deliveries=(failed,))).kind is VerdictKind.WAITING


def test_what_is_stuck_names_the_member_and_how_to_see_its_stack() -> None:
    found = verdict(replace(RUNNING, owner=Member("10.0.0.8@4712", NOW - 240_000)))
    assert (found.member, found.ahead) == ("10.0.0.8@4712", 30)
    assert found.action == "downrange group status billing --client 10.0.0.8@4712 --stack"
