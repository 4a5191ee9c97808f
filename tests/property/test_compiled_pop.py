"""The compiled steps of POP do what their twins in Python do, or leave it to them.

`python -m tests.support.compiled_fuzz SECONDS` runs the same checks for as long as one likes.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from downrange.broker.pop.records import ReviveRecords
from downrange.compiled import steps
from downrange.protocol.bodies.pop_frames import DONE_PIECES, FOUND_PIECES
from tests.support.leaks import check_no_leaks

if steps is None:
    pytest.skip("built without a compiler, or DOWNRANGE_PURE is set", allow_module_level=True)
from tests.support import compiled_pop_checks as checks

SEEDS = st.integers(0, 2**64).map(Random)


@given(random=SEEDS)
@settings(max_examples=400, deadline=None)
def test_acknowledgements_are_read_alike(random: Random) -> None:
    checks.same_acks(random)


@given(random=SEEDS)
@settings(max_examples=400, deadline=None)
def test_pops_are_cut_alike_and_say_what_they_say(random: Random) -> None:
    checks.same_cuts_of_pops(random)


@given(random=SEEDS)
@settings(max_examples=200, deadline=None)
def test_offsets_and_backlogs_are_counted_alike(random: Random) -> None:
    checks.same_offset_list(random)
    checks.same_taking_of_unread(random)


@given(random=SEEDS)
@settings(max_examples=300, deadline=None)
def test_records_of_the_revive_topic_have_the_same_bytes(random: Random) -> None:
    checks.same_revive_records(random)


@given(random=SEEDS)
@settings(max_examples=300, deadline=None)
def test_a_table_of_leases_says_the_same_after_each_step(random: Random) -> None:
    checks.same_table_of_leases(random)


@given(random=SEEDS)
@settings(max_examples=300, deadline=None)
def test_a_reply_has_the_same_bytes(random: Random) -> None:
    checks.same_pop_replies(random)


@given(random=SEEDS)
@settings(max_examples=300, deadline=None)
def test_arguments_that_only_a_bug_can_pass_are_refused(random: Random) -> None:
    checks.refuses_nonsense_about_pops(random)


def test_no_reference_is_kept_or_lost() -> None:
    taken: Any = steps
    popped, spoilt = checks.found_pop(Random(5), spoilt=False), checks.found_pop(Random(5), spoilt=False)
    spoilt.queues[0].byte_count += 1
    queues = popped.queues
    frames = [checks.ack_frame(Random(seed)) for seed in range(40)]
    tails, states = checks.tails_of(Random(5), 5)
    rows, offsets = tails.rows, dict.fromkeys(range(5), 0)
    state = next(iter(states.values()))
    header = b'{"code":200050,"extFields":{"bornTime":"17","topic":"T"},"opaque":1234,"version":1}'
    leases, records = (
        checks.leases_of(Random(5), spoilt=False),
        ReviveRecords("DefaultCluster", "broker-a", checks.HOST),
    )
    held = leases[0].held
    ended = [(lease, lease.held) for lease in leases]
    places = checks.revive_places(records.topic)
    for lease in leases:
        records.checkpoint(lease, 5)  # which makes the texts
    texts = records.texts[leases[0].key[:2]]
    watched: list[Any] = [
        popped,
        spoilt,
        queues,
        queues[0],
        queues[0].records,
        frames,
        state,
        rows,
        offsets,
        header,
        None,
    ]
    watched += [leases, leases[0], leases[0].key, ended[0], texts, texts.checkpoint, places[0], checks.HOST]

    def once() -> None:
        assert taken.encode_pops(FOUND_PIECES, [popped] * 2, [10**6, 5]) is not None
        assert taken.encode_pops(FOUND_PIECES, [popped, spoilt], [10**6, 5]) is None
        table: Any = {}
        in_flight: Any = {}
        taken.hold_leases(table, in_flight, [], 10**6, leases)
        taken.end_leases(table, in_flight, [(leases[0], 10**9)])
        leases[0].held = held
        for at in range(len(frames)):
            taken.read_acks(frames, at, len(frames), DONE_PIECES)
        for most in (0, 5, 1000):
            for number in (5, 6):
                for end in (10**9, 10**3):
                    moved = offsets.copy()
                    taken.take_unread(states, rows, tails.memory, "T", number, moved, (3, 2), most, (0, end, 10**9))
        assert taken.cut_pops([(0, header, b"")] * 3 + [(1, header, b"")], 0, 4)[0] == 3
        for fits in (10**4, 10):
            batch = taken.NewMessages()
            taken.add_checkpoints(batch, leases, records.texts, places, fits, 5)
            taken.add_acknowledgements(batch, ended, records.texts, places, fits, 5)
        assert taken.offset_list(10**6, 2**40 + 1) is not None

    check_no_leaks(once, watched)
