from __future__ import annotations

from downrange.client.consumer.statistics import ConsumeStatistics


def test_rates_are_of_the_last_minute_and_failures_of_the_last_hour() -> None:
    statistics = ConsumeStatistics()
    topic = statistics.topic("orders")
    topic.consumed(0.0, seconds=9.0, done=100, failed=7, calls=10)
    topic.pulled(3000.0, seconds=0.5, messages=300)
    topic.pulled(3005.0, seconds=1.5, messages=300)
    topic.consumed(3005.0, seconds=2.0, done=60, failed=3, calls=20)
    status = statistics.table(3030.0)["orders"]
    assert (status.pull_rt, status.pull_tps) == (1000.0, 20.0)
    assert (status.consume_rt, status.consume_ok_tps, status.consume_failed_tps) == (100.0, 2.0, 0.1)
    assert status.consume_failed_msgs == 10
    assert statistics.table(3601.0)["orders"].consume_failed_msgs == 3


def test_a_quiet_topic_has_zeros() -> None:
    topic = ConsumeStatistics().topic("orders")
    status = topic.status(5.0)
    assert (status.pull_rt, status.consume_ok_tps, status.consume_failed_msgs) == (0.0, 0.0, 0)
