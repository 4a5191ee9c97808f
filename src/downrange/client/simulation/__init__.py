"""Fault strategies judged beyond one machine: thousands of producers, hundreds of brokers, virtual time.

report = simulate(Plan(producers=1000, brokers=50), "crash", strategy("adaptive"))
"""

from __future__ import annotations

from downrange.client.simulation.plan import Plan
from downrange.client.simulation.report import Report
from downrange.client.simulation.run import simulate
from downrange.client.simulation.scenarios import SCENARIOS

__all__ = ["SCENARIOS", "Plan", "Report", "simulate"]
