"""The simulator repeats itself, its brokers behave as faults demand, and it ranks the strategies as it should."""

from __future__ import annotations

import json
import random
from typing import Literal

import pytest
from typer.testing import CliRunner

from downrange.cli.main import app
from downrange.client.producer.fault import Outcome, strategy
from downrange.client.producer.fault.adaptive import AdaptiveSettings
from downrange.settings import ConfigError
from downrange.simulation import SCENARIOS, Plan, Report, simulate
from downrange.simulation.broker_model import Ailment, Fault, SimulatedBroker
from downrange.simulation.report import Tally, percentile
from downrange.simulation.scenarios import window_of

Name = Literal["round_robin", "latency", "adaptive"]
NAMES: tuple[Name, ...] = ("round_robin", "latency", "adaptive")

PAIR = Plan(producers=4, brokers=2, faulty=1, rate_per_producer=25, seconds=60)
CLUSTER = Plan(producers=60, brokers=12, brokers_per_topic=6, rate_per_producer=5, seconds=60)


def run(plan: Plan, scenario: str, name: Name) -> Report:
    return simulate(plan, scenario, strategy(name))


# --- one broker ---


def broker(*faults: Fault, plan: Plan = PAIR) -> SimulatedBroker:
    return SimulatedBroker(plan, faults, random.Random(1))


def fault(ailment: Ailment, added_millis: float = 0.0, capacity: float = 0.0) -> Fault:
    return Fault(0, 1000, 2000, ailment, added_millis, capacity)


def test_a_well_broker_answers_in_its_service_time() -> None:
    one = broker()
    latencies = sorted(one.send(now, 3000).ends_at - now for now in map(float, range(0, 100_000, 100)))
    assert percentile(latencies, 0.5) == pytest.approx(PAIR.network_millis + PAIR.service_millis + 1, abs=0.2)
    assert percentile(latencies, 0.99) < 10


def test_a_crash_refuses_and_takes_with_it_what_was_under_way() -> None:
    one = broker(fault(Ailment.CRASHED))
    assert one.send(999.9, 3000) == (1000.2, Outcome.CONNECTION_LOST, False)
    assert one.send(1500, 3000) == (1500.4, Outcome.CONNECT_FAILED, False)
    assert one.probe(1500, 1000) == (1500.4, False)
    after = one.send(2000, 3000)
    assert (after.outcome, after.stored) == (Outcome.OK, True)


def test_a_stopped_broker_carries_out_afterwards_what_nobody_waits_for() -> None:
    one = broker(fault(Ailment.STOPPED))
    assert one.send(999.9, 500) == (1499.9, Outcome.TIMEOUT, True)
    assert one.send(1100, 500) == (1600, Outcome.TIMEOUT, True)
    late = one.send(1900, 3000)
    assert late.outcome is Outcome.OK
    assert late.ends_at > 2000
    assert broker(fault(Ailment.STOPPED)).probe(1500, 200) == (1700, False)


def test_a_silent_broker_stores_nothing_but_may_have_stored_what_it_could_not_answer() -> None:
    one = broker(fault(Ailment.SILENT))
    assert one.send(999.9, 300) == (1299.9, Outcome.TIMEOUT, True)
    assert one.send(1500, 300) == (1800, Outcome.TIMEOUT, False)
    assert one.probe(1500, 1000) == (2500, False)


@pytest.mark.parametrize(("ailment", "slow_probes"), [(Ailment.SLOW, True), (Ailment.SLOW_DISK, False)])
def test_slowness_of_everything_and_of_messages_only(ailment: Ailment, slow_probes: bool) -> None:
    one = broker(fault(ailment, added_millis=800))
    assert one.send(1500, 3000).ends_at > 2300
    ends_at, ok = one.probe(1500, 1000)
    assert ok
    assert (ends_at > 2300) is slow_probes


def test_a_weak_broker_answers_with_flow_control_when_its_queue_is_too_long() -> None:
    one = broker(fault(Ailment.WEAK, capacity=10))  # one message in 100 ms
    outcomes = [one.send(1500, 3000).outcome for _ in range(5)]
    assert outcomes == [Outcome.OK, Outcome.OK, Outcome.OK, Outcome.FLOW_CONTROL, Outcome.FLOW_CONTROL]


# --- whole runs ---


@pytest.mark.parametrize("name", NAMES)
def test_one_seed_gives_one_run_and_another_seed_another(name: Name) -> None:
    plan = Plan(producers=20, brokers=5, seconds=12, seed=7)
    first = run(plan, "flapping", name)
    assert first == run(plan, "flapping", name)
    assert first != run(Plan(producers=20, brokers=5, seconds=12, seed=8), "flapping", name)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_figures_of_every_scenario_add_up(scenario: str) -> None:
    plan = Plan(producers=20, brokers=5, rate_per_producer=5, seconds=12)
    load = set()
    for name in NAMES:
        report = run(plan, scenario, name)
        assert report.acknowledged + report.failed == report.sends
        assert report.sends <= report.attempts <= 3 * report.sends
        assert report.sends == pytest.approx(20 * 5 * 12, rel=0.15)
        assert 0 < report.p50_millis <= report.p99_millis <= report.max_millis <= plan.send_timeout_millis
        assert 0 <= report.fault_share <= 1
        load.add(report.sends)
    assert len(load) == 1, "all strategies get the same load"


@pytest.mark.parametrize("name", NAMES)
def test_with_retries_no_send_fails_when_one_of_two_brokers_crashes(name: Name) -> None:
    report = run(PAIR, "crash", name)
    assert (report.failed, report.sends > 5000) == (0, True)
    if name != "round_robin":
        assert report.attempts - report.sends < 20, "each producer runs into it once, and those on their way with it"


@pytest.mark.parametrize("name", ["latency", "adaptive"])
def test_without_retries_the_crash_is_felt(name: Name) -> None:
    plan = Plan(producers=4, brokers=2, faulty=1, rate_per_producer=25, seconds=60, retry_times=0)
    assert run(plan, "crash", name).failed > 0


@pytest.mark.parametrize("scenario", ["crash", "stopped", "silent", "brownout", "slow-disk"])
def test_adaptive_returns_long_before_latency(scenario: str) -> None:
    latency = run(PAIR, scenario, "latency")
    adaptive = run(PAIR, scenario, "adaptive")
    assert adaptive.seconds_to_return is not None
    assert latency.seconds_to_return is None or latency.seconds_to_return > adaptive.seconds_to_return
    # After a crash a probe has to find the route first; behind fast probes trials had to fail first.
    limit = {"crash": 5.0, "slow-disk": AdaptiveSettings().longest_relapse_millis / 1000}.get(scenario, 4.0)
    assert adaptive.seconds_to_return <= limit + 2


def test_after_a_crash_the_return_waits_for_the_route_unless_probes_look_it_up() -> None:
    def seconds_to_return(probes_refresh_route: bool) -> float | None:
        plan = Plan(
            producers=4,
            brokers=2,
            faulty=1,
            rate_per_producer=25,
            seconds=60,
            probes_refresh_route=probes_refresh_route,
        )
        return run(plan, "crash", "adaptive").seconds_to_return

    prompt, patient = seconds_to_return(True), seconds_to_return(False)
    assert prompt is not None
    assert prompt <= 6
    assert patient is None or patient > 2 * prompt


@pytest.mark.parametrize("scenario", ["silent", "brownout"])
def test_the_strategies_that_learn_keep_away_and_round_robin_does_not(scenario: str) -> None:
    by_name = {name: run(CLUSTER, scenario, name) for name in NAMES}
    assert by_name["round_robin"].fault_share > 0.9 * by_name["round_robin"].fair_share
    assert by_name["round_robin"].seconds_to_avoid is None
    for name in ("latency", "adaptive"):
        assert by_name[name].fault_share < 0.35 * by_name[name].fair_share
        assert by_name[name].seconds_to_avoid is not None


def test_adaptive_leaves_a_weak_broker_what_it_can_take() -> None:
    latency = run(PAIR, "overload", "latency")
    adaptive = run(PAIR, "overload", "adaptive")
    assert adaptive.failed < latency.failed / 2
    assert adaptive.fault_share > 0.1, "it is used, not given up"


@pytest.mark.parametrize("scenario", ["silent", "brownout"])
def test_with_learned_time_outs_a_broker_that_hangs_costs_tens_of_milliseconds(scenario: str) -> None:
    assert run(CLUSTER, scenario, "latency").fault_p99_millis > 500
    assert run(CLUSTER, scenario, "adaptive").fault_p99_millis < 100


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_what_is_given_up_stays_within_its_budget(scenario: str) -> None:
    """...but for the few attempts that a producer has on their way when the budget is used up."""
    report = run(CLUSTER, scenario, "adaptive")
    assert report.given_up <= AdaptiveSettings().give_up_part * report.sends + 4 * CLUSTER.producers
    assert report.duplicates <= report.given_up + CLUSTER.producers


def test_when_all_brokers_are_overloaded_the_producers_do_not_make_it_worse() -> None:
    plan = Plan(producers=60, brokers=12, brokers_per_topic=6, rate_per_producer=5, seconds=60, faulty=12)
    overloaded, least = run(plan, "overload", "adaptive"), run(plan, "overload", "round_robin")
    assert overloaded.attempts <= 1.02 * least.attempts
    assert overloaded.failed <= 1.1 * least.failed


@pytest.mark.parametrize("name", NAMES)
def test_when_all_are_down_nothing_else_fails_and_all_is_well_afterwards(name: Name) -> None:
    report = run(CLUSTER, "all-down", name)
    down = report.sends * 10 / CLUSTER.seconds
    assert report.failed == pytest.approx(down, rel=0.1)
    assert (report.seconds_to_avoid, report.seconds_to_return) == (None, None)


def test_time_outs_of_stored_messages_show_as_duplicates() -> None:
    stopped, silent = run(PAIR, "stopped", "latency"), run(PAIR, "silent", "latency")
    assert stopped.duplicates > 20
    assert silent.duplicates <= PAIR.producers  # only what was being stored when the network went
    assert run(PAIR, "crash", "latency").duplicates <= PAIR.producers


def test_scenarios_stay_within_their_window() -> None:
    for scenario in SCENARIOS.values():
        faults = scenario.faults(CLUSTER)
        start, end = window_of(CLUSTER)
        assert faults
        assert all(start <= one.start < one.end <= end + 1e-6 for one in faults)


# --- figures and input ---


def test_times_to_avoid_and_to_return_are_read_off_the_shares() -> None:
    tally = Tally(10, fault_start=2000, fault_end=5000)
    for half_second in range(20):
        now = half_second * 500.0
        is_avoided = 3000 <= now < 6500
        for turn in range(10):
            tally.attempt(now, is_suspect=turn < 5 and not is_avoided, is_faulty=False)
    report = tally.report("crash", "latency", fair_share=0.5, suspects_share=0.5)
    assert (report.seconds_to_avoid, report.seconds_to_return) == (1.0, 1.5)


@pytest.mark.parametrize(("part", "value"), [(0.5, 2.0), (0.75, 3.0), (0.99, 4.0), (1.0, 4.0), (0.0, 1.0)])
def test_percentiles(part: float, value: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], part) == value
    assert percentile([], part) == 0


def test_plans_that_cannot_be_run_are_refused() -> None:
    with pytest.raises(ConfigError, match="producers must be positive: 0"):
        Plan(producers=0)
    with pytest.raises(ConfigError, match="3 faulty brokers of 2"):
        Plan(brokers=2, faulty=3)
    with pytest.raises(ConfigError, match="at least 12"):
        Plan(seconds=5)
    with pytest.raises(ConfigError, match="no scenario 'meteor'; there are crash, "):
        simulate(PAIR, "meteor", strategy("latency"))


SMALL = ["simulate", "--producers", "10", "--brokers", "4", "--seconds", "12"]


def test_the_command_prints_a_table_and_json() -> None:
    table = CliRunner().invoke(app, SMALL)
    assert table.exit_code == 0
    assert [line.split()[0] for line in table.stdout.splitlines()[-3:]] == list(NAMES)
    document = json.loads(CliRunner().invoke(app, [*SMALL, "--strategy", "latency", "--json"]).stdout)
    assert document["plan"]["producers"] == 10
    assert [result["strategy"] for result in document["results"]] == ["latency"]
    assert document["results"][0]["acknowledged"] > 0


def test_the_command_says_what_is_wrong() -> None:
    result = CliRunner().invoke(app, [*SMALL, "--scenario", "meteor"])
    assert result.exit_code != 0
    assert "no scenario 'meteor'" in str(result.exception)
