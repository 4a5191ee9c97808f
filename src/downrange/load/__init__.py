"""The load generator: one thread sends pre-encoded frames over plain sockets, so that it is not the bottleneck.

    target = run(find_target(topic="bench", queues=4, broker="127.0.0.1:10911"))    target.py
    report = send_load(target, SendPlan(size=128))    sending.py: as fast as possible, or at a rate
    report = pull_load(target, PullPlan())            pulling.py: drain a backlog
    report = end_to_end(target, SendPlan(rate=500))   end_to_end.py: from when a message is due until a puller has it

It speaks only the remoting protocol, so that any RocketMQ-compatible broker can be measured.
"""

from __future__ import annotations

from downrange.load.end_to_end import end_to_end
from downrange.load.histogram import Histogram
from downrange.load.plans import HEADERS, PullPlan, SendPlan
from downrange.load.pulling import pull_load
from downrange.load.report import LoadReport
from downrange.load.sending import send_load
from downrange.load.target import Target, find_target

__all__ = [
    "HEADERS",
    "Histogram",
    "LoadReport",
    "PullPlan",
    "SendPlan",
    "Target",
    "end_to_end",
    "find_target",
    "pull_load",
    "send_load",
]
