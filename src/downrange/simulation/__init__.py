"""Compares fault strategies in clusters larger than one machine: thousands of producers, hundreds of brokers.

report = simulate(Plan(producers=1000, brokers=50), "crash", strategy("adaptive"))
"""

from __future__ import annotations

from downrange.simulation.plan import Plan
from downrange.simulation.report import Report
from downrange.simulation.run import simulate
from downrange.simulation.scenarios import SCENARIOS

__all__ = ["SCENARIOS", "Plan", "Report", "simulate"]
