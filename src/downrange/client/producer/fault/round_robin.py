"""`round_robin`: every queue in turn; a retry skips the broker that just failed. Nothing is remembered.

RocketMQ with `sendLatencyFaultEnable=false`, its default.
"""

from __future__ import annotations

from collections.abc import Sequence

from downrange.client.producer.fault.attempt import Attempt
from downrange.client.producer.fault.strategy import Choice, RocketMQStrategy
from downrange.model.message import MessageQueue


class RoundRobin(RocketMQStrategy[None]):
    """The state is None: there is nothing to learn."""

    name = "round_robin"

    def initial(self) -> None:
        return None

    def choose(
        self, state: None, queues: Sequence[MessageQueue], now_millis: float, last_broker: str | None, index: int
    ) -> Choice[None]:
        if last_broker is None:
            return Choice(queues[index % len(queues)], index, None)
        # The walk moves the index along: the sends after a retry go on behind it instead of meeting the
        # remaining queues of the failed broker one by one.
        for step in range(index, index + len(queues)):
            queue = queues[step % len(queues)]
            if queue.broker_name != last_broker:
                return Choice(queue, step, None)
        return Choice(queues[index % len(queues)], index + len(queues), None)

    def learn(self, state: None, now_millis: float, attempt: Attempt) -> None:
        return None
