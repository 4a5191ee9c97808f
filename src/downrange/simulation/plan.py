"""The size of a simulated cluster, its load and the settings of its producers."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final

from downrange.client.producer.retry import SendKind, attempts_allowed
from downrange.settings import ConfigError

LEAST_CAPACITY: Final = 1000.0
HEADROOM: Final = 3.0
"""A broker without a fault can take this many times its fair load."""
MOST: Final = {"producers": 100_000, "brokers": 100_000, "seconds": 86_400, "retry_times": 1000}
MOST_SENDS: Final = 100_000_000
"""The number of sends whose simulation takes about an hour."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Load and sizes of one run. `brokers_per_topic` brokers serve each topic; every producer sends to one topic."""

    producers: int = 2000
    brokers: int = 200
    brokers_per_topic: int = 8
    queues_per_broker: int = 4
    faulty: int | None = None
    """The number of brokers that fail; None: one in ten."""
    rate_per_producer: float = 2.0
    """Messages a second, sent at random moments without waiting for earlier answers."""
    seconds: float = 120.0
    send_timeout_millis: float = 3000.0
    attempt_timeout_millis: float | None = 1000.0
    """Time limit of one attempt; None: an attempt may use up the whole send time-out, as in RocketMQ 4.x."""
    retry_times: int = 2
    route_refresh_seconds: float = 30.0
    probes_refresh_route: bool = True
    """Whether a producer looks the route up again when a probed broker is no longer in it."""
    network_millis: float = 0.4
    """Time on the network for a request and its reply together."""
    service_millis: float = 1.0
    """Median of the time a broker takes for a message, not counting its wait."""
    service_sigma: float = 0.6
    """Spread of that time: the standard deviation of its logarithm."""
    seed: int = 1

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            may_be_zero = one.name in ("probes_refresh_route", "retry_times", "seed", "network_millis", "service_sigma")
            if value is not None and not (0 < value < math.inf or (value == 0 and may_be_zero)):
                raise ConfigError(
                    f"simulation: {one.name} must be {'0 or more' if may_be_zero else 'positive'}: {value}"
                )
        if self.seconds < 12:
            raise ConfigError(f"simulation: seconds must be at least 12, so that a fault fits in: {self.seconds}")
        for name, most in MOST.items():
            if getattr(self, name) > most:
                raise ConfigError(f"simulation: {name} must be at most {most}: {getattr(self, name)}")
        if (sends := self.producers * self.rate_per_producer * self.seconds) > MOST_SENDS:
            raise ConfigError(f"simulation: {sends:,.0f} sends are more than {MOST_SENDS:,}")
        if self.faulty is not None and self.faulty > self.brokers:
            raise ConfigError(f"simulation: {self.faulty} faulty brokers of {self.brokers}")

    @property
    def faulty_brokers(self) -> tuple[int, ...]:
        """The brokers that fail, spread over the cluster so that few topics have more than one of them."""
        count = max(1, self.brokers // 10) if self.faulty is None else self.faulty
        return tuple(place * self.brokers // count for place in range(count))

    @property
    def fair_load(self) -> float:
        """Messages a second for each broker while none has a fault."""
        return self.producers * self.rate_per_producer / self.brokers

    @property
    def capacity(self) -> float:
        """Messages a second a broker can take."""
        return max(LEAST_CAPACITY, HEADROOM * self.fair_load)

    @property
    def attempts(self) -> int:
        return attempts_allowed(SendKind.SYNC, self.retry_times)

    def brokers_of(self, producer: int) -> tuple[int, ...]:
        """The brokers of a producer's topic: neighbours on a ring."""
        count = min(self.brokers, self.brokers_per_topic)
        return tuple(sorted((producer + step) % self.brokers for step in range(count)))


def broker_name(broker: int) -> str:
    return f"broker-{broker:03d}"
