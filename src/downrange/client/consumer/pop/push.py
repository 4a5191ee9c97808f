"""The POP side of a push consumer, put together."""

from __future__ import annotations

from collections.abc import Mapping

from downrange.client.consumer.listener import Listener
from downrange.client.consumer.pop.concurrent import PopConsumption
from downrange.client.consumer.pop.holding import Holding
from downrange.client.consumer.pop.leases import Leases
from downrange.client.consumer.pop.orderly import PopOrderlyConsumption
from downrange.client.consumer.pop.popping import Popping
from downrange.client.consumer.pulling import Membership
from downrange.client.consumer.statistics import ConsumeStatistics
from downrange.model.subscription import Subscription


class PopSide:
    """Pops the queues that brokers assign to be popped, and consumes their messages. Used on one event loop."""

    def __init__(
        self,
        membership: Membership,
        subscriptions: Mapping[str, Subscription],
        listener: Listener,
        statistics: ConsumeStatistics,
    ) -> None:
        session, group, config = membership
        self._leases = Leases(session, group, config.namespace)
        self.holding = Holding(self._leases, config.pop_invisible_seconds, session.clock)
        kind = PopOrderlyConsumption if config.orderly else PopConsumption
        self.consumption: PopConsumption = kind(config, listener, self.holding, statistics, session.clock)
        self.popping = Popping(membership, subscriptions, self._leases, self.consumption, statistics)

    async def close(self) -> None:
        await self.consumption.close()
        await self._leases.close()
