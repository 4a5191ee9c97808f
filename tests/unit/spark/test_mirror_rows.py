from __future__ import annotations

import pytest

from downrange.client.config import ProducerConfig
from downrange.client.producer.forwarding import ForwardedMessage, make_forwarded, make_forwarded_batch
from downrange.client.producer.outgoing import InvalidBatch, OutgoingRules
from downrange.model.message import Message, MessageQueue
from downrange.spark.errors import OptionError
from downrange.spark.mirror_rows import QueueMap, origin_offset, path_of
from downrange.spark.planner import QueueRange, whole_queue_tasks

RULES = OutgoingRules.of(ProducerConfig())


@pytest.mark.parametrize("targets", [["x"], ["x", "y"], ["b"], ["a", "b", "c"], ["z", "b"]])
def test_no_two_queues_go_to_one(targets: list[str]) -> None:
    queues = QueueMap.of("east", ["a", "b", "c"], targets)
    found = [queues.target(MessageQueue("t", broker, number)) for broker in "abc" for number in range(5)]
    assert len(set(found)) == 15
    assert {queue.broker_name for queue in found} <= set(targets)


def test_a_broker_goes_to_the_one_of_its_name_and_keeps_its_queues() -> None:
    queues = QueueMap.parse(QueueMap.of("east", ["a", "b"], ["b", "c"]).text())
    assert queues.target(MessageQueue("t", "b", 3)) == MessageQueue("t", "b", 3)
    assert queues.target(MessageQueue("t", "a", 3)) == MessageQueue("t", "c", 3)
    with pytest.raises(OptionError, match="new broker d: start the mirror again"):
        queues.target(MessageQueue("t", "d", 0))


def test_the_place_at_the_origin_and_the_path() -> None:
    origin = QueueMap("east", {}).origin(MessageQueue("t", "a", 1))
    assert origin_offset({"MIRROR_OFFSET": "east/a/1/42"}, origin) == 42
    assert origin_offset({"MIRROR_OFFSET": "east/a/12/42"}, origin) is None
    assert origin_offset({}, origin) is None
    assert path_of({}, "east") == "east"
    assert path_of({"MIRROR_PATH": "north,east"}, "west") == "north,east,west"


def test_a_forwarded_message_keeps_its_birth_and_its_id() -> None:
    one = ForwardedMessage("t", b"body", keys="k", born_timestamp=17, message_id="ID1")
    ready = make_forwarded(one, "t", RULES)
    assert (ready.born_timestamp, ready.message_ids) == (17, ("ID1",))
    assert "UNIQ_KEY\x01ID1\x02" in ready.properties
    other = ForwardedMessage("t", b"body", born_timestamp=17, message_id="ID2")
    (batch,) = make_forwarded_batch([one, other], "t", RULES)
    assert (batch.born_timestamp, batch.message_ids) == (17, ("ID1", "ID2"))
    for wrong in (ForwardedMessage("t", b"body", born_timestamp=18, message_id="ID3"), Message("t", b"body")):
        with pytest.raises(InvalidBatch, match="of one time of birth"):
            make_forwarded_batch([one, wrong], "t", RULES)


def test_a_queue_is_never_divided_between_tasks() -> None:
    wanted = [QueueRange(MessageQueue("t", "a", number), 0, size) for number, size in enumerate((90, 10, 50, 40))]
    tasks = whole_queue_tasks(wanted, 2)
    assert sorted(one for task in tasks for one in task) == sorted(wanted)
    assert sorted(sum(one.size for one in task) for task in tasks) == [90, 100]
    assert whole_queue_tasks(wanted[:1], 8) == [(wanted[0],)]
    assert whole_queue_tasks([], 8) == []
