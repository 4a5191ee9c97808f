"""The scenarios: each is a list of faults within one window of the run.

The window is from a sixth to a half of the run, so that there is a time before, during and after the faults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from downrange.simulation.broker_model import Ailment, Fault
from downrange.simulation.plan import Plan

SHORT_MILLIS: Final = 10_000.0
FLAP_MILLIS: Final = 5_000.0
ADDED_MILLIS: Final = 800.0


class Window(NamedTuple):
    start: float
    end: float


def window_of(plan: Plan) -> Window:
    return Window(plan.seconds * 1000 / 6, plan.seconds * 1000 / 2)


def _brief_window_of(plan: Plan) -> Window:
    start, end = window_of(plan)
    return Window(start, min(end, start + SHORT_MILLIS))


def _throughout(
    ailment: Ailment, window_of: Callable[[Plan], Window] = window_of, added_millis: float = 0.0
) -> Callable[[Plan], list[Fault]]:
    """All faulty brokers have this ailment for the whole window."""
    return lambda plan: [Fault(broker, *window_of(plan), ailment, added_millis) for broker in plan.faulty_brokers]


def _overload(plan: Plan) -> list[Fault]:
    half_load = plan.fair_load / 2
    return [Fault(broker, *window_of(plan), Ailment.WEAK, capacity=half_load) for broker in plan.faulty_brokers]


def _flapping(plan: Plan) -> list[Fault]:
    window = window_of(plan)
    times = int((window.end - window.start) / (2 * FLAP_MILLIS))
    starts = [window.start + turn * 2 * FLAP_MILLIS for turn in range(max(1, times))]
    return [
        Fault(broker, start, start + FLAP_MILLIS, Ailment.CRASHED) for broker in plan.faulty_brokers for start in starts
    ]


def _rolling(plan: Plan) -> list[Fault]:
    """Every broker restarts once; `plan.faulty` brokers restart at a time."""
    window = window_of(plan)
    groups = len(plan.faulty_brokers)
    turns = -(-plan.brokers // groups)
    down = (window.end - window.start) / turns
    return [
        Fault(
            broker,
            window.start + broker % turns * down,
            window.start + (broker % turns + 1) * down,
            Ailment.CRASHED,
        )
        for broker in range(plan.brokers)
    ]


def _all_down(plan: Plan) -> list[Fault]:
    return [Fault(broker, *_brief_window_of(plan), Ailment.CRASHED) for broker in range(plan.brokers)]


class Scenario(NamedTuple):
    summary: str
    faults: Callable[[Plan], Sequence[Fault]]


SCENARIOS: Final = {
    "crash": Scenario("faulty brokers are down: connections refused", _throughout(Ailment.CRASHED)),
    "stopped": Scenario(
        "faulty brokers are stopped for 10 s, then serve the requests that have piled up",
        _throughout(Ailment.STOPPED, _brief_window_of),
    ),
    "silent": Scenario("faulty brokers cannot be reached: everything times out", _throughout(Ailment.SILENT)),
    "brownout": Scenario(
        "faulty brokers take 800 ms more for everything", _throughout(Ailment.SLOW, added_millis=ADDED_MILLIS)
    ),
    "slow-disk": Scenario(
        "faulty brokers take 800 ms more for messages, probes stay fast",
        _throughout(Ailment.SLOW_DISK, added_millis=ADDED_MILLIS),
    ),
    "overload": Scenario("faulty brokers can take half of their fair load only", _overload),
    "flapping": Scenario("faulty brokers are down 5 s, up 5 s, down 5 s, …", _flapping),
    "rolling": Scenario("all brokers restart in turn", _rolling),
    "all-down": Scenario("all brokers are down for 10 s", _all_down),
}
