from __future__ import annotations

import pytest

from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.retry import (
    Acknowledged,
    BadAnswer,
    Later,
    Verdict,
    orderly_failure,
    retry_send_request,
    send_back_request,
    verdict,
)
from downrange.model.message import MessageQueue, SysFlag
from downrange.model.properties import decode_properties
from downrange.protocol.bodies.send import SendMessageRequest
from downrange.protocol.framing import FrameDecoder
from downrange.settings import ConfigError
from tests.support.golden import scenarios
from tests.unit.client.consumer.received import message

RETRY_QUEUE = MessageQueue("%RETRY%billing", "broker-b", 0)


# --- what an answer means


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (None, Verdict(3, Later())),
        (Later(5), Verdict(0, Later(5))),
        (Acknowledged(2), Verdict(2, Later())),
        (Acknowledged(0, Later(-1)), Verdict(0, Later(-1))),
        (Acknowledged(3), Verdict(3, Later())),
    ],
)
def test_answers(answer: object, expected: Verdict) -> None:
    assert verdict(answer, 3) == expected


@pytest.mark.parametrize("answer", [False, True, "ok", 0, Acknowledged(4), Acknowledged(-1)])
def test_answers_that_mean_nothing(answer: object) -> None:
    with pytest.raises(BadAnswer):
        verdict(answer, 3)


def test_a_delay_level_below_dead_letter_does_not_exist() -> None:
    with pytest.raises(BadAnswer, match="delay_level is -2"):
        Later(-2)
    assert Later(25).delay_level == 25, "a broker may have more than 18"


# --- on the wire


def test_sending_back_says_what_java_says() -> None:
    genuine = next(
        command
        for row in scenarios()["498-json/retry_dlq"]
        if row.code == 36 and not row.is_response
        for command in FrameDecoder().feed(row.frame)
    )
    fields = dict(genuine.ext_fields)
    failed = message(
        0,
        queue=MessageQueue(fields["originTopic"], "broker-a", 0),
        properties=f"UNIQ_KEY\x01{fields['originMsgId']}\x02",
    )
    ours = send_back_request(failed, fields["group"], 1, 1)
    assert dict(ours.ext_fields) == {**fields, "offset": "0"}


def test_a_retried_message_names_its_first_topic_when_sent_back() -> None:
    failed = message(0, queue=RETRY_QUEUE, properties="RETRY_TOPIC\x01orders\x02")
    assert send_back_request(failed, "billing", 0, 16).ext_fields["originTopic"] == "orders"


def test_a_new_send_to_the_retry_topic_counts_and_keeps_what_the_message_was() -> None:
    compressed = int(SysFlag.COMPRESSED | SysFlag.ZLIB | SysFlag.TRANSACTION_COMMIT)
    properties = "TAGS\x01A\x02UNIQ_KEY\x01id\x02TRAN_MSG\x01true\x02"
    failed = message(7, b"zipped", properties=properties, reconsume_times=4, sys_flag=compressed)
    command = retry_send_request(failed, "billing", RETRY_QUEUE, times=5, limit=16, now_millis=99)
    header = command.header(SendMessageRequest)
    assert (header.producer_group, header.topic, header.bname) == (
        "CLIENT_INNER_PRODUCER",
        "%RETRY%billing",
        "broker-b",
    )
    assert (header.reconsume_times, header.max_reconsume_times) == (5, 16)
    assert header.sys_flag == 0x301  # the body stays as it is; the transaction is over
    assert command.body_bytes == b"zipped"
    assert decode_properties(header.properties) == {
        "TAGS": "A",
        "UNIQ_KEY": "id",
        "RETRY_TOPIC": "orders",
        "ORIGIN_MESSAGE_ID": "id",
        "RECONSUME_TIME": "5",
        "MAX_RECONSUME_TIMES": "16",
        "DELAY": "7",
    }


# --- in order


def test_messages_at_their_limit_die_and_the_others_come_again_one_older() -> None:
    failure = orderly_failure([message(1, reconsume_times=2), message(2, reconsume_times=0)], limit=2)
    assert [dead.queue_offset for dead in failure.dead] == [1]
    assert [(again.queue_offset, again.reconsume_times) for again in failure.again] == [(2, 1)]


# --- limits


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (ConsumerConfig(), 16),
        (ConsumerConfig(orderly=True), 0x7FFFFFFF),
        (ConsumerConfig(max_reconsume_times=3), 3),
        (ConsumerConfig(orderly=True, max_reconsume_times=0), 0),
    ],
)
def test_how_often_a_message_comes_again(config: ConsumerConfig, limit: int) -> None:
    assert config.reconsume_limit == limit


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("consume_threads", 0),
        ("pull_batch_size", -1),
        ("pull_threshold_for_topic", -2),
        ("max_reconsume_times", -2),
        ("suspend_current_queue_seconds", 31),
        ("pull_timeout_seconds", 15),
        ("lock_renewal_seconds", 30),
        ("pull_interval_seconds", -1),
    ],
)
def test_settings_that_cannot_be(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        ConsumerConfig(**{name: value})  # type: ignore[arg-type]
