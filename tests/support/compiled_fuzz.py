"""`python -m tests.support.compiled_fuzz SECONDS [SEED]`: the checks of the compiled twins, again and again.

Round n has the seed SEED + n, so what a run found comes again with the SEED that it printed.
"""

from __future__ import annotations

import logging
import sys
import time
from random import Random
from tempfile import TemporaryDirectory

from downrange.compiled import VARIANT
from tests.support import compiled_checks as checks
from tests.support import compiled_client_checks as client_checks
from tests.support import compiled_pick_checks as pick_checks
from tests.support import compiled_pop_checks as pop_checks
from tests.support import compiled_property_checks as property_checks
from tests.support import compiled_pull_checks as pull_checks
from tests.support import compiled_replay_checks as replay_checks
from tests.support import compiled_send_checks as send_checks
from tests.support import compiled_signature_checks as signature_checks
from tests.support import compiled_timer_checks as timer_checks


def run(seconds: float, seed: int) -> int:
    """How many rounds there was time for."""
    captured = client_checks.captured_replies()
    end = time.monotonic() + seconds
    rounds = 0
    while time.monotonic() < end:
        random = Random(seed + rounds)
        with TemporaryDirectory() as root:
            send_checks.same_sends(random, root)
        for _ in range(5):
            send_checks.same_cuts_into_runs(random)
            send_checks.same_frames(random)
            send_checks.same_replies(random)
            send_checks.refuses_nonsense_about_sends(random)
            signature_checks.same_signatures(random)
            signature_checks.same_states(random)
            signature_checks.refuses_nonsense_about_signatures(random)
            checks.refuses_nonsense(random)
            pull_checks.same_pull_reply(random)
            pull_checks.refuses_nonsense_about_a_pull(random)
            pop_checks.same_acks(random)
            pop_checks.same_cuts_of_pops(random)
            pop_checks.same_offset_list(random)
            pop_checks.same_taking_of_unread(random)
            pop_checks.same_revive_records(random)
            pop_checks.same_pop_replies(random)
            pop_checks.same_table_of_leases(random)
            pop_checks.refuses_nonsense_about_pops(random)
            pick_checks.same_pick_of_all(random)
            pick_checks.same_pick_by_tags(random)
            pick_checks.same_pick_by_properties(random)
            pick_checks.refuses_nonsense_about_a_pick(random)
            client_checks.same_outgoing(random)
            client_checks.same_send(random)
            client_checks.same_batch(random)
            client_checks.same_frame(random)
            client_checks.same_replies_taken(random, captured)
            client_checks.same_messages(random)
            client_checks.refuses_nonsense_about_the_client(random)
            property_checks.same_properties(random)
            property_checks.same_walk(random)
            property_checks.same_heads(random)
            property_checks.refuses_nonsense_about_properties(random)
            replay_checks.refuses_nonsense_about_a_replay(random)
            timer_checks.same_chains(random)
            timer_checks.refuses_nonsense_about_timers(random)
        if rounds % 10 == 0:
            with TemporaryDirectory() as root:
                checks.same_files(random, root)
            with TemporaryDirectory() as root:
                replay_checks.same_recovery(random, root)
            with TemporaryDirectory() as root:
                replay_checks.same_slaves(random, root)
            with TemporaryDirectory() as root:
                timer_checks.same_deliveries(random, root)
            with TemporaryDirectory() as root:
                timer_checks.same_intake(random, root)
        rounds += 1
    return rounds


if __name__ == "__main__":
    assert VARIANT == "compiled", "there is nothing to compare: build it first"
    logging.disable()  # recovery has a lot to say about damaged logs
    first = int(sys.argv[2]) if len(sys.argv) > 2 else time.time_ns()
    print("seed", first, flush=True)
    print(run(float(sys.argv[1]), first), "rounds")
