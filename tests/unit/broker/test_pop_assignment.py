"""Queues shared out by the broker, and what is asked for them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from downrange.auth.needs import BROKER_NEEDS
from downrange.broker.json_file import JsonFile
from downrange.broker.pop.assignment import RequestModes, popped_by, shared_out
from downrange.model.errors import MessageError
from downrange.model.topics import pop_retry_topic, popped_topic
from downrange.protocol.bodies.pop import MessageRequestMode
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request

CLIENTS = ["c", "a", "b"]


@given(
    st.integers(0, 20),
    st.sets(st.text("abc", min_size=1), min_size=1, max_size=6),
    st.sampled_from(["AVG", "AVG_BY_CIRCLE"]),
)
def test_every_queue_goes_to_one_client(queues: int, clients: set[str], strategy: str) -> None:
    shares = [shared_out(queues, list(clients), client, strategy) for client in clients]
    assert sorted(queue for share in shares for queue in share) == list(range(queues))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_shares_follow_the_order_of_names() -> None:
    assert [shared_out(8, CLIENTS, client, "AVG") for client in "abc"] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert shared_out(8, CLIENTS, "stranger", "AVG") == []
    with pytest.raises(MessageError, match="NOSUCH"):
        shared_out(8, CLIENTS, "a", "NOSUCH")


def test_poppers_share_queues() -> None:
    assert popped_by(8, CLIENTS, "a", "AVG", 0) == [-1]
    assert popped_by(8, CLIENTS, "a", "AVG", 2) == [-1]
    assert popped_by(8, CLIENTS, "c", "AVG", 1) == [0, 1, 2, 6, 7]
    many = [f"c{number}" for number in range(6)]
    assert Counter(popped_by(4, many, client, "AVG", 1)[0] for client in many) == {0: 2, 1: 2, 2: 1, 3: 1}


def test_modes_are_kept(tmp_path: Path) -> None:
    file = JsonFile(tmp_path / "messageRequestMode.json")
    modes = RequestModes(file)
    mode = MessageRequestMode(topic="T", consumer_group="G", mode="POP", pop_share_queue_num=2)
    modes.put(mode)
    modes.save()
    assert RequestModes(file).get("T", "G") == mode
    assert RequestModes(file).get("T", "other") is None


@pytest.mark.parametrize("version", [1, 2])
def test_names_of_retry_topics(version: int) -> None:
    retry = pop_retry_topic("GA", "TopicX", version=version)
    assert retry == {1: "%RETRY%GA_TopicX", 2: "%RETRY%GA+TopicX"}[version]
    assert popped_topic(retry, "GA") == "TopicX"
    assert popped_topic("%RETRY%GA", "GA") == "%RETRY%GA"


def test_a_retry_topic_of_another_group_is_not_taken_for_the_topic() -> None:
    """Whoever may read TopicX with the group GA may not name the retry topic of another group."""
    ack = request(RequestCode.ACK_MESSAGE, ext_fields={"topic": "%RETRY%GB_TopicX", "consumerGroup": "GA"})
    needs = {(need.resource_type.name, need.name) for need in BROKER_NEEDS[RequestCode.ACK_MESSAGE](ack, None)}  # type: ignore[arg-type]
    assert needs == {("GROUP", "GB_TopicX"), ("GROUP", "GA")}
    own = request(RequestCode.ACK_MESSAGE, ext_fields={"topic": "%RETRY%GA_TopicX", "consumerGroup": "GA"})
    needs = {(need.resource_type.name, need.name) for need in BROKER_NEEDS[RequestCode.ACK_MESSAGE](own, None)}  # type: ignore[arg-type]
    assert needs == {("TOPIC", "TopicX"), ("GROUP", "GA")}


def test_a_batch_ack_needs_rights_for_every_entry() -> None:
    entry = b'{"b":"AQ==","c":"%s","it":1,"pt":1,"q":0,"r":"0","rq":0,"so":0,"t":"%s"}'
    body = b'{"acks":[' + entry % (b"GA", b"T1") + b"," + entry % (b"GB", b"T2") + b"]}"
    command = request(RequestCode.BATCH_ACK_MESSAGE, body=body)
    needs = {need.name for need in BROKER_NEEDS[RequestCode.BATCH_ACK_MESSAGE](command, None)}  # type: ignore[arg-type]
    assert needs == {"T1", "GA", "T2", "GB"}
