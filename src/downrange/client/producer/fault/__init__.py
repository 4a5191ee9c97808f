"""How a producer picks a queue and stays away from brokers that fail: three strategies behind one interface.

    chooser = QueueChooser(strategy("adaptive"))
    queue = chooser.choose(queues, now_millis, last_broker)
    chooser.learn(now_millis, Attempt(queue.broker_name, latency_millis, Outcome.OK))

Pure: no sockets, no clock, no event loop. Times are milliseconds of a clock that does not go back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

from downrange.client.producer.fault.adaptive import Adaptive, AdaptiveSettings
from downrange.client.producer.fault.attempt import Attempt, Outcome
from downrange.client.producer.fault.chooser import NoQueue, QueueChooser
from downrange.client.producer.fault.latency import Latency
from downrange.client.producer.fault.round_robin import RoundRobin
from downrange.client.producer.fault.strategy import PROBE_TIMEOUT_MILLIS, Choice, FaultStrategy
from downrange.settings import ConfigError

__all__ = [
    "PROBE_TIMEOUT_MILLIS",
    "STRATEGIES",
    "Attempt",
    "Choice",
    "FaultStrategy",
    "NoQueue",
    "Outcome",
    "QueueChooser",
    "StrategyName",
    "strategy",
]

StrategyName = Literal["round_robin", "latency", "adaptive"]

STRATEGIES: Final[dict[str, Callable[..., FaultStrategy[Any]]]] = {
    "round_robin": RoundRobin,
    "latency": Latency,
    "adaptive": lambda **options: Adaptive(AdaptiveSettings(**options)),
}


def strategy(name: StrategyName, **options: Any) -> FaultStrategy[Any]:
    """The strategy of this name; `options` are the fields of `Latency` or of `AdaptiveSettings`."""
    try:
        make = STRATEGIES[name]
    except KeyError:
        raise ConfigError(f"no fault strategy {name!r}; there are {', '.join(STRATEGIES)}") from None
    try:
        return make(**options)
    except TypeError as error:
        raise ConfigError(f"fault strategy {name}: {error}") from None
