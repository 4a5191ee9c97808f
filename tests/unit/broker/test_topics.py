from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from downrange.broker.config import BrokerConfig
from downrange.broker.json_file import JsonFile
from downrange.broker.topics import Topics
from downrange.clock import ManualClock
from downrange.model.topics import AUTO_CREATE_TOPIC, SCHEDULE_TOPIC, SEND_FORBIDDEN_TOPICS, TopicConfig
from downrange.protocol.bodies.data_version import DataVersion
from downrange.protocol.bodies.topics import TopicConfigTable
from tests.support.golden_store import unpack

CONFIG = BrokerConfig(broker_name="broker-a", broker_cluster_name="DefaultCluster")
NOW = 1_700_000_000_000
Open = Callable[..., Topics]


@pytest.fixture
def open_topics(tmp_path: Path) -> Open:
    clock = ManualClock(NOW)
    return lambda config=CONFIG: Topics(JsonFile(tmp_path / "topics.json"), config, clock)


def test_a_new_broker_has_the_system_topics_and_no_file(open_topics: Open, tmp_path: Path) -> None:
    topics = open_topics()
    found = {topic.topic_name: (topic.read_queue_nums, topic.write_queue_nums, topic.perm) for topic in topics}
    assert found == {
        "SELF_TEST_TOPIC": (1, 1, 6),
        "TBW102": (8, 8, 7),
        "BenchmarkTest": (1024, 1024, 6),
        "DefaultCluster": (16, 16, 7),
        "broker-a": (1, 1, 7),
        "OFFSET_MOVED_EVENT": (1, 1, 6),
        "SCHEDULE_TOPIC_XXXX": (18, 18, 6),
        "DefaultCluster_REPLY_TOPIC": (1, 1, 6),
        "RMQ_SYS_TRANS_HALF_TOPIC": (1, 1, 6),
    }
    assert not (tmp_path / "topics.json").exists()


def test_switches_decide_about_system_topics(open_topics: Open) -> None:
    topics = open_topics(
        replace(
            CONFIG,
            auto_create_topic_enable=False,
            cluster_topic_enable=False,
            broker_topic_enable=False,
            trace_topic_enable=True,
        )
    )
    assert AUTO_CREATE_TOPIC not in topics
    assert topics.get("DefaultCluster") == TopicConfig("DefaultCluster", 16, 16, 1)
    assert topics.get("broker-a") == TopicConfig("broker-a", 1, 1, 1)
    assert topics.get("RMQ_SYS_TRACE_TOPIC") == TopicConfig("RMQ_SYS_TRACE_TOPIC", 1, 1, 6)


def test_the_genuine_broker_s_file_is_read(tmp_path: Path) -> None:
    golden = unpack("clean", tmp_path)
    topics = Topics(JsonFile(golden.root / "config" / "topics.json"), CONFIG, ManualClock(NOW))
    assert topics.data_version == DataVersion(counter=9, timestamp=1794732093211)
    assert topics.get("%DLQ%gscg_retry") == TopicConfig("%DLQ%gscg_retry", 1, 1, 6)


def test_a_topic_is_created_like_its_template(open_topics: Open) -> None:
    topics = open_topics()
    changed: list[TopicConfig | None] = []
    topics.on_change = changed.append
    created = topics.create_like("orders", AUTO_CREATE_TOPIC, 4, enabled=True)
    assert created == TopicConfig("orders", 4, 4, 6)
    assert changed == [created]
    assert topics.data_version == DataVersion(counter=1, timestamp=NOW)
    assert topics.create_like("many", AUTO_CREATE_TOPIC, 99, enabled=True) == TopicConfig("many", 8, 8, 6)
    assert topics.create_like("none", AUTO_CREATE_TOPIC, -1, enabled=True) == TopicConfig("none", 0, 0, 6)
    topics.save()
    again = open_topics()
    assert again.get("orders") == created
    assert again.data_version == DataVersion(counter=3, timestamp=NOW)


@pytest.mark.parametrize(
    ("template", "enabled"), [("no such", True), ("BenchmarkTest", True), (AUTO_CREATE_TOPIC, False)]
)
def test_a_template_must_exist_and_let_itself_be_inherited(template: str, enabled: bool, open_topics: Open) -> None:
    topics = open_topics()
    assert topics.create_like("orders", template, 4, enabled=enabled) is None
    assert "orders" not in topics
    assert topics.data_version.counter == 0


def test_a_refused_creation_leaves_the_template_as_it_was(open_topics: Open) -> None:
    topics = open_topics()
    topics.create_like("orders", AUTO_CREATE_TOPIC, 4, enabled=False)
    assert topics.create_like("orders", AUTO_CREATE_TOPIC, 4, enabled=True) is not None


def test_ensure_creates_once(open_topics: Open) -> None:
    topics = open_topics()
    created = topics.ensure("%RETRY%g", 2, topic_sys_flag=2)
    assert created == TopicConfig("%RETRY%g", 2, 2, 6, topic_sys_flag=2)
    assert topics.ensure("%RETRY%g", 9) is created
    assert topics.data_version.counter == 1


def test_what_may_be_sent_to_follows_the_table(open_topics: Open) -> None:
    topics = open_topics()
    assert not topics.sendable.keys() & SEND_FORBIDDEN_TOPICS
    topics.put(TopicConfig("orders"))
    assert topics.sendable["orders"] == TopicConfig("orders")
    changed: list[TopicConfig | None] = []
    topics.on_change = changed.append
    assert topics.delete("orders")
    assert not topics.delete("orders")
    assert changed == [None]
    assert "orders" not in topics.sendable
    assert topics.get(SCHEDULE_TOPIC) is not None


def test_usual_sends_may_go_to_topics_without_anything_special(open_topics: Open) -> None:
    topics = open_topics()
    topics.put(TopicConfig("orders", write_queue_nums=3))
    topics.put(TopicConfig("many", topic_filter_type="MULTI_TAG"))
    topics.put(TopicConfig("%RETRY%group"))
    assert topics.usual["orders"] == 3
    assert not topics.usual.keys() & {"many", "%RETRY%group", *SEND_FORBIDDEN_TOPICS}
    topics.put(TopicConfig("orders", topic_filter_type="MULTI_TAG"))
    assert "orders" not in topics.usual
    topics.put(TopicConfig("orders", write_queue_nums=5))
    assert topics.usual["orders"] == 5
    topics.delete("orders")
    assert "orders" not in topics.usual
    topics.replace_all(TopicConfigTable(topic_config_table={"new": TopicConfig("new")}))
    assert topics.usual == {"new": TopicConfig("new").write_queue_nums}


def test_system_topics_are_known(open_topics: Open) -> None:
    topics = open_topics()
    own = ("DefaultCluster", "broker-a", "DefaultCluster_REPLY_TOPIC", "TBW102", "rmq_sys_x")
    assert all(topics.is_system(name) for name in own)
    assert not topics.is_system("orders")


def test_order_topics_are_exactly_those_the_name_server_names(open_topics: Open) -> None:
    topics = open_topics()
    topics.put(TopicConfig("a"))
    topics.put(TopicConfig("b", order=True))
    topics.set_order_topics({"a", "unknown"})
    assert [topics.get(name) for name in ("a", "b")] == [TopicConfig("a", order=True), TopicConfig("b")]
    assert topics.sendable["a"].order
    counter = topics.data_version.counter
    topics.set_order_topics({"a"})
    assert topics.data_version.counter == counter


def test_a_slave_takes_over_the_table_of_its_master(open_topics: Open) -> None:
    topics = open_topics()
    topics.put(TopicConfig("gone"))
    version = DataVersion(counter=7, timestamp=5)
    topics.replace_all(TopicConfigTable(topic_config_table={"orders": TopicConfig("orders")}, data_version=version))
    assert [topic.topic_name for topic in topics] == ["orders"]
    assert list(topics.sendable) == ["orders"]
    topics.save()
    assert open_topics().data_version == version


def test_a_bump_is_a_change(open_topics: Open) -> None:
    topics = open_topics()
    topics.bump()
    assert topics.data_version.counter == 1
    topics.save()
    assert open_topics().data_version.counter == 1
