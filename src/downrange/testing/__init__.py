"""A real broker inside a test.

    with downrange.testing.broker() as mq:
        mq.producer().send(Message("orders", b"one"))
        assert [message.body for message in mq.messages("orders")] == [b"one"]

In pytest the fixture `rocketmq` is such a broker, one for each test.
"""

from downrange.clock import ManualClock
from downrange.testing.embedded import EmbeddedBroker, broker

__all__ = ["EmbeddedBroker", "ManualClock", "broker"]
