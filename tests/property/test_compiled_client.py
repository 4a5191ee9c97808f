"""The client's compiled functions make what is made in Python, or leave it to them.

`python -m tests.support.compiled_fuzz SECONDS` runs the same checks for as long as one likes.
"""

from __future__ import annotations

from itertools import count
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from downrange.client.config import ProducerConfig
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.producer.outgoing import OutgoingRules, Target
from downrange.client.unique_id import IdMonth
from downrange.compiled import steps
from downrange.model.message import Message, MessageQueue
from tests.support import compiled_client_checks as checks
from tests.support.leaks import check_no_leaks

pytestmark = pytest.mark.skipif(steps is None, reason="built without a compiler, or DOWNRANGE_PURE is set")
CAPTURED = checks.captured_replies()
QUEUE = MessageQueue(checks.TOPIC, "broker-a", 1)
SEEDS = st.integers(0, 2**64).map(Random)


@given(random=SEEDS)
@settings(max_examples=600, deadline=None)
def test_a_message_becomes_the_same_request(random: Random) -> None:
    checks.same_outgoing(random)
    checks.same_frame(random)
    checks.same_send(random)


@given(random=SEEDS)
@settings(max_examples=400, deadline=None)
def test_messages_become_the_same_batch(random: Random) -> None:
    checks.same_batch(random)


@given(random=SEEDS)
@settings(max_examples=600, deadline=None)
def test_replies_say_the_same(random: Random) -> None:
    checks.same_replies_taken(random, CAPTURED)


def test_genuine_replies_are_taken() -> None:
    """Not those to a batch, to a half message or of another kind: but there are enough."""
    asked = [checks.Asking([("ID", checks.TOPIC, QUEUE)] * 5, -1) for _ in CAPTURED]
    taken = [
        steps.take_stored_replies([frame], 0, each.requests, checks.TYPES)
        for frame, each in zip(CAPTURED, asked, strict=True)
    ]
    assert taken.count(1) > 20


@given(random=SEEDS)
@settings(max_examples=600, deadline=None)
def test_what_was_pulled_is_read_alike(random: Random) -> None:
    checks.same_messages(random)


@given(random=SEEDS)
@settings(max_examples=600, deadline=None)
def test_arguments_that_only_a_bug_can_pass_are_refused(random: Random) -> None:
    checks.refuses_nonsense_about_the_client(random)


def test_a_waiter_that_fails_ends_it_as_in_python() -> None:
    frames, asking = checks.usual_chunk(Random(1))

    def fail(_: object) -> None:
        raise LookupError("the waiter's own")

    asking.waiting[1].set_result = fail  # type: ignore[method-assign]
    with pytest.raises(LookupError):
        steps.take_stored_replies(frames, 0, asking.requests, checks.TYPES)
    assert list(asking.requests) == [2]


def test_no_reference_is_kept_or_lost() -> None:
    taken: Any = steps
    rules = OutgoingRules.of(ProducerConfig(namespace="tenant"))
    message = Message("orders", b"body", "tag", "key", properties={"a": "b"})
    odd = Message("orders", b"body", "tag", "é")
    lacking = Message("orders", b"body")
    del lacking.keys
    numbers, now = count(10**6).__next__, 10**9
    topic, stem, pieces = "orders", checks.STEM + "0", checks.TEMPLATE.pieces
    month, target = IdMonth(stem, 0, 2**50, numbers, str), Target(QUEUE, "host:1", pieces)
    sending = topic, month, 10**18, rules, target, 10**6
    short = topic, month, 10**18, rules._replace(longest_frame=10), target, 10**6
    frames, asking = checks.usual_chunk(Random(1))
    requests = dict(asking.requests)
    watched: list[Any] = [message, odd, rules, *rules, topic, stem, pieces, pieces[0], now, numbers, None, True, frames]
    watched += [
        message.body,
        message.tags,
        message.properties,
        frames[0],
        frames[0][1],
        *checks.TYPES,
        *requests.values(),
    ]
    watched += [*sending, *month, *target, short[3]]
    pulled = checks.record(Random(1)) * 3
    watched += [pulled, QUEUE, ReceivedMessage, odd.keys, lacking, lacking.body]

    def once() -> None:
        assert taken.make_outgoing(message, topic, stem, 10**6, now, rules) is not None
        assert taken.make_outgoing(odd, topic, stem, 10**6, now, rules) is None
        assert taken.make_outgoing(lacking, topic, stem, 10**6, now, rules) is None
        assert taken.make_batch((message, message), topic, topic, stem, numbers, now, rules) is not None
        assert taken.make_batch((message, odd), topic, topic, stem, numbers, now, rules) is None
        assert taken.make_batch((message, lacking), topic, topic, stem, numbers, now, rules) is None
        assert taken.encode_send(pieces, 10**6, 1, 2, now, 4, stem, message.body, 10**6) is not None
        assert taken.encode_send(pieces, 10**6, 1, 2, now, 4, stem, message.body, 10) is None
        assert taken.make_send(message, *sending) is not None
        assert taken.make_send(odd, *sending) is None
        assert taken.make_send(lacking, *sending) is None
        assert taken.make_send(message, *short) is None
        asked = dict(requests)
        assert taken.take_stored_replies(frames, 0, asked, checks.TYPES) == 3
        assert taken.take_stored_replies(frames, 0, asked, checks.TYPES) == 0
        assert len(taken.read_usual(pulled, QUEUE, topic, now, now, ReceivedMessage)) == 3
        assert taken.read_usual(pulled[:-1], QUEUE, topic, now, now, ReceivedMessage) is None
        for waiting in asking.waiting:
            waiting.told.clear()

    check_no_leaks(once, watched)
