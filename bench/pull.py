"""A backlog drained by the load generator: 4 connections with 8 pulls of 32 messages outstanding on each.

Where a part of the messages is wanted, those are counted that are received.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from bench.report import QUICK, Figure, table
from bench.served import Load, by_turns, pull_apart, served, target
from downrange.load import PullPlan, SendPlan, send_load
from downrange.protocol.codes import SerializeType

ROUNDS: Final = 1 if QUICK else 3
TAGS: Final = tuple(f"Tag{number}" for number in range(32))
FILL_SECONDS: Final = 0.5 if QUICK else 3.0


def run() -> list[Figure]:
    loads: dict[str, Load] = {}
    with served() as running:
        for size in (128, 1024):
            topic = f"backlog-{size}"
            # In batches: a backlog is made faster, and batch or not makes no difference to its records.
            send_load(
                target(running, topic),
                SendPlan(FILL_SECONDS, 0, size, batch=16, connections=4, outstanding=4),
            )
            backlog = target(running, topic)
            loads[f"pull {size} B, 4x8"] = partial(pull_apart, backlog, PullPlan())
            loads[f"pull {size} B, 1x1"] = partial(pull_apart, backlog, PullPlan(connections=1, outstanding=1))
        # A batch goes to one queue, so every 32nd message of each queue has the same tag.
        send_load(
            target(running, "tagged"),
            SendPlan(FILL_SECONDS, 0, 128, batch=32, connections=4, outstanding=4, tags=TAGS),
        )
        tagged = target(running, "tagged")
        for name, tags in (("half match", " || ".join(TAGS[::2])), ("one in 32 matches", TAGS[5])):
            loads[f"pull 128 B by tag, {name}, 4x8"] = partial(pull_apart, tagged, PullPlan(tags=tags))
        loads["pull 128 B, 4x8, binary headers"] = partial(
            pull_apart, target(running, "backlog-128"), PullPlan(header=SerializeType.ROCKETMQ)
        )
        best = by_turns(loads, ROUNDS)
    figures = []
    for name, one in best.items():
        figures.append(Figure(name, one.rate, "messages/s", one.rate / best["pull 128 B, 4x8"].rate, "pull 128 B, 4x8"))
        figures.append(Figure(f"{name}: server CPU", one.server_cpu_micros, "µs a message"))
        figures.append(Figure(f"{name}: generator CPU", one.own_cpu_micros, "µs a message"))
    return figures


if __name__ == "__main__":
    print(table(run()))
