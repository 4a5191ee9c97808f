"""Producers go on while brokers are killed, stopped and slowed down. The whole drill is `python -m bench failover`.

The drill runs three producers at once, one for each strategy, against real processes. What holds on any machine is
asserted in every run: counts, shares, failures, duplicates, and that nothing is lost. Times depend on what else the
machine does. The tests that compare them are marked slow, and want a machine without other work.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from bench.failover import OPEN_LOOP, Load, drill, simulated
from bench.failover_figures import Drilled
from downrange.simulation import Report
from downrange.transport.loop import run as run_loop

LEARNING = ("latency", "adaptive")
ALL = ("round_robin", *LEARNING)
CALLERS = Load()
SECONDS = {"kill": 15.0, "stop": 12.0, "slow": 12.0, "namesrvs": 12.0, "all": 15.0}
"""The fault takes a third of it."""

Drills = Callable[[str], dict[str, Drilled]]


@pytest.fixture(scope="module")
def drills(tmp_path_factory: pytest.TempPathFactory) -> Drills:
    """Fault -> strategy -> figures. Each fault is drilled once, when the first test asks for it."""

    @cache
    def by_strategy(fault: str) -> dict[str, Drilled]:
        # Callers that wait for the answer, as in a service, for what is promised to each of them; load that does not
        # wait where the simulator, whose load does not either, is to be compared.
        load = OPEN_LOOP if fault in ("stop", "slow") else CALLERS
        return drilled(tmp_path_factory.mktemp(fault), fault, load, 2, SECONDS[fault])

    return by_strategy


def drilled(directory: Path, fault: str, load: Load, brokers: int, seconds: float) -> dict[str, Drilled]:
    rows = run_loop(drill(directory, fault, brokers=brokers, load=load, seconds=seconds))
    return {row.report.strategy: row for row in rows}


# --- what is promised -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["kill", "stop", "slow"])
def test_no_send_fails_and_nothing_acknowledged_is_lost(drills: Drills, fault: str) -> None:
    for name, row in drills(fault).items():
        assert (name, row.lost) == (name, 0)
        assert row.report.sends > 1500, "the load went on"
        assert (name, row.errors) == (name, {})


@pytest.mark.parametrize("fault", ["kill", "stop"])
@pytest.mark.parametrize("strategy", LEARNING)
def test_a_dead_broker_is_left_alone_after_a_second(drills: Drills, fault: str, strategy: str) -> None:
    assert drills(fault)[strategy].share_after_first_second < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("strategy", LEARNING)
def test_a_killed_broker_costs_each_caller_one_slow_send_at_most(drills: Drills, strategy: str) -> None:
    row = drills("kill")[strategy]
    assert row.slow_of_one_caller <= 1 + (row.hiccup_millis > CALLERS.slow_millis)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", LEARNING)
def test_a_stopped_broker_costs_each_caller_one_slow_send_at_most(drills: Drills, strategy: str) -> None:
    row = drills("stop")[strategy]
    assert row.report.fault_p99_millis < 2 * OPEN_LOOP.attempt_timeout_seconds * 1000
    assert row.slow_of_one_caller <= 2, "one that met the stopped broker, and a hiccup of the machine"


def test_without_a_memory_every_other_message_runs_into_the_stopped_broker(drills: Drills) -> None:
    """The faults are real: it is the strategies that make the difference."""
    assert drills("stop")["round_robin"].share_after_first_second > 0.25
    assert drills("slow")["round_robin"].share_after_first_second > 0.4
    for fault in ("stop", "slow"):
        rows = drills(fault)
        assert rows["round_robin"].slow > 2 * max(rows[name].slow for name in LEARNING)


@pytest.mark.parametrize("fault", ["kill", "stop", "slow"])
def test_adaptive_comes_back_to_the_broker(drills: Drills, fault: str) -> None:
    assert drills(fault)["adaptive"].report.seconds_to_return is not None


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "stop", "slow"])
def test_adaptive_is_back_seconds_after_the_broker(drills: Drills, fault: str) -> None:
    seconds = drills(fault)["adaptive"].report.seconds_to_return
    assert seconds is not None
    assert seconds <= 6


# --- the simulator tells the truth ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["stop", "slow"])
@pytest.mark.parametrize("strategy", ALL)
def test_the_simulator_counts_as_the_drill_does(drills: Drills, fault: str, strategy: str) -> None:
    real = drills(fault)[strategy]
    agree_in_counts(real.report, simulated(real, OPEN_LOOP, SECONDS[fault]))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["stop", "slow"])
@pytest.mark.parametrize("strategy", ALL)
def test_the_simulator_takes_the_times_of_the_drill(drills: Drills, fault: str, strategy: str) -> None:
    real = drills(fault)[strategy]
    agree_in_times(real, simulated(real, OPEN_LOOP, SECONDS[fault]))


def agree_in_counts(report: Report, model: Report) -> None:
    """Within margins for luck: the model's arrivals are random."""
    assert report.sends == pytest.approx(model.sends, rel=0.1)
    assert report.fault_share == pytest.approx(model.fault_share, abs=0.04)
    if model.scenario != "stopped":
        assert report.failed == model.failed == 0
        assert report.duplicates == pytest.approx(model.duplicates, rel=0.25, abs=20)
    elif model.strategy != "round_robin":
        # What lay in the sockets of a stopped broker is stored when it wakes, unless that is the very turn of its loop
        # in which it notices how late it is: then it refuses. Either way it was sent again elsewhere long ago. The
        # model's broker takes fewer messages a second, and with round_robin refuses what has piled up.
        assert report.failed == model.failed == 0
        assert report.duplicates <= 1.25 * model.duplicates + 20
    assert (report.seconds_to_avoid is None) == (model.seconds_to_avoid is None)
    assert (report.seconds_to_return is None) == (model.seconds_to_return is None)


def agree_in_times(real: Drilled, model: Report, return_margin: float = 3.0) -> None:
    """Within margins for luck: a probe may come right after the fault or, just before it ended, two seconds later."""
    report = real.report
    for millis, model_millis, least in (
        (report.fault_p99_millis, model.fault_p99_millis, 50),
        (report.max_millis, model.max_millis, 100),
    ):
        either_way = max(least, 0.25 * model_millis)
        assert model_millis - either_way <= millis <= model_millis + either_way + real.hiccup_millis
    for seconds, expected, margin in (
        (report.seconds_to_avoid, model.seconds_to_avoid, 0.5),
        (report.seconds_to_return, model.seconds_to_return, return_margin),
    ):
        if expected is None or seconds is None:
            assert seconds == expected
        else:
            assert seconds == pytest.approx(expected, abs=margin + real.hiccup_millis / 1000)


# --- the fuller drill -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sends_go_on_without_any_name_server(drills: Drills) -> None:
    for row in drills("namesrvs").values():
        assert (row.report.failed, row.lost) == (0, 0)
        assert row.slow_of_one_caller <= 1


@pytest.mark.slow
def test_when_all_brokers_were_down_sends_succeed_seconds_after_they_are_back(drills: Drills) -> None:
    for row in drills("all").values():
        assert row.lost == 0
        assert row.report.failed > 0
        assert set(row.errors) <= {"ConnectFailed", "ConnectionLost"}
        # The longest pause between two attempts to connect is a second.
        assert row.failing_seconds_after < 4


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", ["kill", "stop", "slow"])
def test_three_brokers(tmp_path: Path, fault: str) -> None:
    rows = drilled(tmp_path, fault, CALLERS, brokers=3, seconds=24)
    assert [row.lost for row in rows.values()] == [0, 0, 0]
    for name in LEARNING:
        assert rows[name].report.failed == 0
        assert rows[name].share_after_first_second < 0.01
        assert rows[name].report.fault_p99_millis < 2 * CALLERS.attempt_timeout_seconds * 1000
        assert rows[name].slow_of_one_caller <= 2
    assert rows["adaptive"].report.seconds_to_return is not None


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_simulator_agrees_about_a_crash(tmp_path: Path) -> None:
    """Apart from the time until `round_robin` finds the broker again: that is luck, the next look at the route. For
    `adaptive` it takes two probes, one that finds the route and one that finds the broker, each up to 2 s away."""
    rows = drilled(tmp_path, "kill", OPEN_LOOP, brokers=2, seconds=24)
    for name in LEARNING:
        model = simulated(rows[name], OPEN_LOOP, 24)
        agree_in_counts(rows[name].report, model)
        agree_in_times(rows[name], model, return_margin=4.0)
