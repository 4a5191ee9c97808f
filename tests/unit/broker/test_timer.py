"""Timer messages in a broker on a clock that stands still: what is refused, when it is delivered, what is recalled."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from downrange.broker.config import BrokerConfig
from downrange.broker.services.timer import TimerService
from downrange.broker.timed import delivered
from downrange.model import properties as names
from downrange.model.message import PhysicalOffset, QueueOffset, StoredMessage
from downrange.model.recall_handle import RecallHandle
from downrange.model.topics import HALF_TOPIC, TIMER_TOPIC
from downrange.protocol.bodies.send import SendMessageRequest, SendMessageResponse, encode_entry
from downrange.protocol.bodies.timer import RecallMessageRequest
from downrange.protocol.bodies.transactions import EndTransactionRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from downrange.store.config import BrokerRole
from downrange.store.kept_message import KeptMessage
from downrange.store.new_message import NewMessage
from tests.unit.broker.wired import BROKER, WiredBroker, wire
from tests.unit.store.small_store import new_message, read_all

ILLEGAL = (
    "timer message illegal, the delay time should not be bigger than the max delay 259200000ms; or if set del msg, the "
    "delay time should be bigger than the current time"
)
CONFIG: BrokerConfig = replace(BROKER, recall_message_enable=True, broker_name="broker-a")


class Timed:
    """A broker with its timer service, which works when it is told."""

    def __init__(self, root: Path, **changes: Any) -> None:
        changes.setdefault("mapped_file_size_commit_log", 1 << 20)
        self.broker: WiredBroker = wire(root, broker=CONFIG, **changes)
        self.clock = self.broker.clock
        self.clock.set(self.clock.now() // 1000 * 1000)  # the beginning of a second
        self.broker.topics.ensure("orders", 4)
        self.service: TimerService = self.broker.timer_service()
        self.opaque = 0

    @property
    def now(self) -> int:
        return self.clock.now()

    def send(
        self,
        body: bytes = b"hello",
        code: int = RequestCode.SEND_MESSAGE_V2,
        topic: str = "orders",
        **properties: str,
    ) -> Command:
        self.opaque += 1
        texts = {"UNIQ_KEY": f"ID{self.opaque}", **properties}
        header = SendMessageRequest(
            producer_group="g",
            topic=topic,
            queue_id=2 if topic == "orders" else 0,
            born_timestamp=self.now,
            properties="".join(f"{name}\x01{value}\x02" for name, value in texts.items() if value),
            sys_flag=4 if "TRAN_MSG" in properties else 0,
            batch=code == RequestCode.SEND_BATCH_MESSAGE,
        )
        return self.broker.ask(request(RequestCode(code), header, body=body))

    def handle_of(self, reply: Command) -> str:
        assert reply.code == 0, reply
        handle = reply.header(SendMessageResponse).recall_handle
        assert handle is not None
        return handle

    def recall(self, handle: str, topic: str = "orders") -> Command:
        header = RecallMessageRequest(topic=topic, recall_handle=handle, producer_group="g")
        return self.broker.ask(request(RequestCode.RECALL_MESSAGE, header))

    def at(self, seconds: float) -> None:
        """Let so many seconds go by, a tenth at a time, and work."""
        for _ in range(round(seconds * 10)):
            self.clock.set(self.clock.now() + 100)
            while self.service.turn() == 0:
                pass

    def delivered(self) -> list[StoredMessage]:
        return read_all(self.broker.store, "orders", 2)

    def bodies(self) -> list[bytes]:
        return [message.body for message in self.delivered()]


@pytest.fixture
async def timed(tmp_path: Path) -> Any:
    made = Timed(tmp_path)
    yield made
    made.broker.close()


@pytest.mark.parametrize(
    ("properties", "millis"),
    [
        ({"TIMER_DELAY_SEC": "3"}, 3000),
        ({"TIMER_DELAY_MS": "2500"}, 2500),
        ({"TIMER_DELAY_MS": "2001"}, 2001),
        ({"TIMER_DELIVER_MS": "+5000"}, 5000),
        ({"TIMER_DELAY_SEC": "2", "TIMER_DELAY_MS": "60000", "TIMER_DELIVER_MS": "+9000"}, 2000),
        ({"TIMER_DELAY_MS": "60", "TIMER_DELIVER_MS": "+9000"}, 60),
    ],
)
async def test_a_message_comes_at_the_first_tick_that_is_not_before_its_time(
    timed: Timed, properties: dict[str, Any], millis: int
) -> None:
    timed.clock.set(timed.now + 300)
    sent = timed.now
    if "TIMER_DELIVER_MS" in properties:
        properties["TIMER_DELIVER_MS"] = str(sent + int(properties["TIMER_DELIVER_MS"]))
    reply = timed.send(**properties)
    response = reply.header(SendMessageResponse)
    assert (response.queue_id, response.queue_offset) == (2, 0)
    out_time = (sent + millis - 1) // 1000 * 1000
    assert RecallHandle.decode(timed.handle_of(reply)) == ("orders", "broker-a", out_time + 1, "ID1")
    (waiting,) = read_all(timed.broker.store, TIMER_TOPIC, 0)
    assert waiting.properties["TIMER_OUT_MS"] == str(out_time)
    timed.at(12)
    (message,) = timed.delivered()
    came = int(message.properties["TIMER_DEQUEUE_MS"])
    assert came - 1000 < sent + millis <= came
    assert came == message.store_timestamp
    assert message.properties == waiting.properties | {
        "TIMER_ENQUEUE_MS": str(sent // 1000 * 1000), "TIMER_DEQUEUE_MS": str(came)
    }  # fmt: skip
    assert message.properties["REAL_TOPIC"] == "orders"
    assert message.born_timestamp == sent


@pytest.mark.parametrize(
    "properties",
    [{"TIMER_DELAY_SEC": "0"}, {"TIMER_DELAY_SEC": "-3"}, {"TIMER_DELIVER_MS": "1"}, {"TIMER_DELAY_MS": "0"}],
)
async def test_a_message_whose_time_is_over_is_stored_at_once(timed: Timed, properties: dict[str, Any]) -> None:
    reply = timed.send(**properties)
    assert reply.header(SendMessageResponse).recall_handle is None
    (message,) = timed.delivered()
    assert names.TIMER_OUT_MS not in message.properties


@pytest.mark.parametrize(
    "properties",
    [
        {"TIMER_DELIVER_MS": "soon"},
        {"TIMER_DELAY_SEC": "259201"},
        {"TIMER_DELAY_SEC": "1_0"},
        {"TIMER_DELAY_MS": "9" * 30},
        {"TIMER_DELIVER_MS": "5", "TIMER_DEL_UNIQKEY": "orders+ID1"},
    ],
)
async def test_a_time_that_cannot_be_is_refused_in_rocketmqs_words(timed: Timed, properties: dict[str, Any]) -> None:
    reply = timed.send(**properties)
    assert (reply.code, reply.remark) == (13, ILLEGAL)
    assert timed.send(TIMER_DELAY_SEC="259200").code == 0


async def test_without_a_wheel_timer_messages_are_refused(tmp_path: Path) -> None:
    timed = Timed(tmp_path, timer_wheel_enable=False)
    reply = timed.send(TIMER_DELAY_SEC="3")
    assert (reply.code, reply.remark) == (1, "accurate timer message is not enabled, timerWheelEnable is false")
    timed.broker.close()


async def test_a_tick_that_is_full_takes_no_more(tmp_path: Path) -> None:
    timed = Timed(tmp_path, timer_congest_num_each_slot=3)
    timed.broker.timing._count_at = timed.service.count_at
    for _ in range(40):
        timed.send(TIMER_DELAY_SEC="5")
        timed.at(0)
        timed.service.turn()
    waiting = timed.service.count_at(timed.now + 4000)
    assert 3 < waiting <= 6
    reply = timed.send(TIMER_DELAY_SEC="5")
    while reply.code == 0:
        timed.service.turn()
        reply = timed.send(TIMER_DELAY_SEC="5")
    assert reply.remark is not None
    assert reply.remark.startswith("timer message is under flow control, max num limit is 6 or the current value is")
    timed.broker.close()


async def test_a_delay_level_counts_more_than_a_time(timed: Timed) -> None:
    timed.send(TIMER_DELAY_SEC="3", DELAY="1")
    (message,) = read_all(timed.broker.store, "SCHEDULE_TOPIC_XXXX", 0)
    assert "TIMER_DELAY_SEC" not in message.properties


async def test_a_message_that_was_timed_before_is_not_timed_again(timed: Timed) -> None:
    timed.send(TIMER_DELAY_SEC="3", TIMER_OUT_MS="5")
    assert len(timed.delivered()) == 1


async def test_messages_of_a_batch_are_timed_each(timed: Timed) -> None:
    texts = [
        "UNIQ_KEY\x01A\x02TIMER_DELAY_SEC\x013\x02",
        "UNIQ_KEY\x01B\x02",
        "UNIQ_KEY\x01C\x02TIMER_DELAY_SEC\x012\x02",
    ]
    body = b"".join(encode_entry(0, text[9:10].encode(), text.encode()) for text in texts)
    reply = timed.send(body, RequestCode.SEND_BATCH_MESSAGE, UNIQ_KEY="")
    assert reply.code == 0
    assert reply.header(SendMessageResponse).recall_handle is None
    assert timed.bodies() == [b"B"]
    timed.at(4)
    assert timed.bodies() == [b"B", b"C", b"A"]


async def test_a_whole_batch_is_timed(timed: Timed) -> None:
    body = b"".join(encode_entry(0, text, b"UNIQ_KEY\x01%b\x02" % text) for text in (b"A", b"B"))
    assert timed.send(body, RequestCode.SEND_BATCH_MESSAGE, UNIQ_KEY="", TIMER_DELAY_SEC="2").code == 0
    assert timed.bodies() == []
    timed.at(3)
    assert timed.bodies() == [b"A", b"B"]


async def test_a_rolled_message_comes_in_time(tmp_path: Path) -> None:
    timed = Timed(tmp_path, timer_roll_window_slot=12)
    sent = timed.now
    timed.send(b"far", TIMER_DELAY_SEC="40")
    timed.at(39.9)
    assert timed.bodies() == []
    timed.at(1.2)
    (message,) = timed.delivered()
    assert int(message.properties["TIMER_DEQUEUE_MS"]) - sent == 40_000
    assert message.properties["TIMER_ROLL_TIMES"] == "3"
    timed.broker.close()


async def test_a_recalled_message_does_not_come(timed: Timed) -> None:
    handle = timed.handle_of(timed.send(b"recalled", TIMER_DELAY_SEC="5"))
    timed.send(b"kept", TIMER_DELAY_SEC="5")
    reply = timed.recall(handle)
    assert (reply.code, reply.ext_fields) == (0, {"msgId": "ID1", "MSG_REGION": "DefaultRegion"})
    assert timed.recall(handle).code == 0  # twice does no harm
    timed.at(7)
    assert timed.bodies() == [b"kept"]
    assert timed.service.metrics.waiting == 0
    reply = timed.recall(handle)
    assert (reply.code, reply.remark) == (604, "recall failed, timestamp invalid")


async def test_a_message_far_ahead_can_be_recalled(tmp_path: Path) -> None:
    timed = Timed(tmp_path, timer_roll_window_slot=12)
    handle = timed.handle_of(timed.send(b"recalled", TIMER_DELAY_SEC="40"))
    timed.send(b"kept", TIMER_DELAY_SEC="40")
    timed.at(3)
    assert timed.recall(handle).code == 0
    timed.at(40)
    assert timed.bodies() == [b"kept"]
    timed.broker.close()


async def test_a_deletion_with_another_key_deletes_nothing(timed: Timed) -> None:
    timed.send(b"kept", TIMER_DELAY_SEC="6")
    timed.send(b"0", TIMER_DELAY_SEC="6", TIMER_DEL_UNIQKEY="orders_ID1")
    timed.send(b"0", TIMER_DELAY_SEC="7", TIMER_DEL_UNIQKEY="orders+ID1")  # of another tick
    timed.broker.topics.ensure("other", 1)
    timed.send(b"0", topic="other", TIMER_DELAY_SEC="6", TIMER_DEL_UNIQKEY="orders+ID1")  # sent to another topic
    timed.at(9)
    assert timed.bodies() == [b"kept"]


def text_of(handle: str, **changes: Any) -> str:
    parts = RecallHandle.decode(handle)
    assert parts is not None
    return parts._replace(**changes).encode()


async def test_recalls_that_are_refused(timed: Timed) -> None:
    handle = timed.handle_of(timed.send(TIMER_DELAY_SEC="5"))
    timed.broker.topics.ensure("other", 1)
    refused = [
        (timed.recall(handle, "none"), 17, "recall failed, the topic[none] not exist"),
        (timed.recall("nonsense"), 604, "recall handle is invalid"),
        (timed.recall(base64.urlsafe_b64encode(b"v1 a b c d").decode()), 604, "recall handle is invalid"),
        (timed.recall(handle, "other"), 604, "recall failed, topic not match"),
        (timed.recall(text_of(handle, broker_name="x")), 604, "recall failed, broker service not available"),
        (timed.recall(text_of(handle, time=timed.now)), 604, "recall failed, timestamp invalid"),
        (timed.recall(text_of(handle, time=timed.now + 259_200_000)), 604, "recall failed, timestamp invalid"),
    ]
    for reply, code, remark in refused:
        assert (reply.code, reply.remark) == (code, remark)
        assert reply.ext_fields == {"MSG_REGION": "DefaultRegion"}
    config = timed.broker.config
    config.store = replace(config.store, broker_role=BrokerRole.SLAVE)
    reply = timed.recall(handle)
    assert (reply.code, reply.remark) == (11, "recall failed, broker service not available")
    config.broker = replace(config.broker, recall_message_enable=False)
    reply = timed.recall(handle)
    assert (reply.code, reply.remark) == (16, "recall failed, operation is forbidden")


async def test_a_handle_is_written_as_rocketmq_writes_it() -> None:
    handle = RecallHandle("TopicD", "broker-a", 1_700_000_005_001, "01B8CA3A5F2D3C12340585D2CA00000001")
    text = "djEgVG9waWNEIGJyb2tlci1hIDE3MDAwMDAwMDUwMDEgMDFCOENBM0E1RjJEM0MxMjM0MDU4NUQyQ0EwMDAwMDAwMQ=="
    assert handle.encode() == text
    assert RecallHandle.decode(text) == handle
    assert RecallHandle.decode("djEgVG9w\x00") is None
    assert RecallHandle.decode("") is None


async def test_a_transaction_waits_for_its_end_and_for_its_time(timed: Timed) -> None:
    reply = timed.send(b"tx", TRAN_MSG="true", PGROUP="g", TIMER_DELAY_SEC="3")
    response = reply.header(SendMessageResponse)
    assert response.recall_handle is None
    (half,) = read_all(timed.broker.store, HALF_TOPIC, 0)
    timed.at(5)
    assert timed.bodies() == []
    end = EndTransactionRequest(
        producer_group="g",
        tran_state_table_offset=half.queue_offset,
        commit_log_offset=half.physical_offset,
        commit_or_rollback=8,
        msg_id="ID1",
    )
    assert timed.broker.ask(request(RequestCode.END_TRANSACTION, end)).code == 0
    timed.at(2.9)
    assert timed.bodies() == []
    timed.at(2)
    (message,) = timed.delivered()
    assert message.sys_flag & 12 == 8


async def test_a_slave_delivers_nothing_and_goes_on_as_a_master(tmp_path: Path) -> None:
    timed = Timed(tmp_path)
    timed.send(b"one", TIMER_DELAY_SEC="2")
    config = timed.broker.config
    master = config.store
    config.store = replace(master, broker_role=BrokerRole.SLAVE)
    timed.at(5)
    assert timed.service.enqueue_behind == 0
    assert timed.bodies() == []
    config.store = master
    timed.at(0.1)
    assert timed.bodies() == [b"one"]
    timed.broker.close()


async def test_stopping_and_starting_again_by_settings(timed: Timed) -> None:
    config = timed.broker.config
    usual = config.store
    config.store = replace(usual, timer_stop_enqueue=True)
    timed.send(b"one", TIMER_DELAY_SEC="2")
    timed.at(3)
    assert timed.service.enqueue_behind == 1
    config.store = replace(usual, timer_stop_dequeue=True)
    timed.at(3)
    assert timed.service.enqueue_behind == 0
    assert timed.bodies() == []
    assert timed.service.read_behind_millis > 0
    config.store = usual
    timed.at(1)
    assert timed.bodies() == [b"one"]
    (message,) = timed.delivered()
    assert message.properties["TIMER_ENQUEUE_MS"] == str(2**63 - 1)  # it was taken in too late


async def test_messages_that_cannot_be_stored_now_are_delivered_later(timed: Timed) -> None:
    for number in range(5):
        timed.send(b"%d" % number, TIMER_DELAY_SEC="2")
    timed.service.turn()
    timed.broker.store.set_disk_full(True)
    timed.at(5)
    assert timed.bodies() == []
    timed.broker.store.set_disk_full(False)
    timed.at(1)
    assert timed.bodies() == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_message_without_room_for_more_properties_is_delivered(timed: Timed) -> None:
    long = "x" * (32_767 - 250)
    assert timed.send(b"long", TIMER_DELAY_SEC="2", own=long).code == 0
    (waiting,) = read_all(timed.broker.store, TIMER_TOPIC, 0)
    room = 32_767 - len(waiting.properties_text)
    assert timed.send(b"longer", TIMER_DELAY_SEC="2", own=long + "x" * room).code == 0
    timed.at(4)
    assert timed.bodies() == [b"long", b"longer"]


async def test_a_message_that_can_never_be_stored_stops_no_others(timed: Timed) -> None:
    timed.send(b"before", TIMER_DELAY_SEC="2")
    texts = {"TIMER_OUT_MS": str(timed.now + 1000), "REAL_TOPIC": "../x", "REAL_QID": "0"}
    timed.broker.writer.append_one(new_message(b"wrong", TIMER_TOPIC, properties=texts))
    timed.send(b"after", TIMER_DELAY_SEC="2")
    timed.at(4)
    assert timed.bodies() == [b"before", b"after"]
    assert timed.service.metrics.waiting == 0


async def test_thousands_of_one_tick_take_several_turns(timed: Timed) -> None:
    bodies = [b"%d" % number + bytes(4500) for number in range(1100)]
    for body in bodies:
        timed.send(body, TIMER_DELAY_SEC="2")
    while timed.service.turn() == 0:
        pass
    timed.clock.set(timed.now + 2000)
    turns = 1
    while timed.service.turn() == 0:
        timed.send(b"late", TIMER_DELAY_MS="1")  # into the tick that is open, not the one being delivered
        turns += 1
    assert turns > 5
    assert timed.bodies() == bodies
    timed.at(2)
    assert timed.bodies().count(b"late") == turns - 1


async def test_figures(timed: Timed) -> None:
    for _ in range(3):
        timed.send(TIMER_DELAY_SEC="50")
    assert timed.service.runtime_info()["timerOffsetBehind"] == "3"
    timed.clock.set(timed.now + 70)
    assert timed.service.enqueue_behind_millis == 70
    timed.service.turn()
    info = timed.service.runtime_info()
    assert (info["timerOffsetBehind"], info["timerCongestNum"], info["timerReadBehind"]) == ("0", "3", "0")
    assert timed.service.count_within(5) == 0
    assert timed.service.count_within(60) == 3
    assert timed.service.metrics.waiting_by_topic() == {"orders": 3}
    timed.clock.set(timed.now + 60_000)
    assert timed.service.count_overdue() == 3
    assert timed.service.read_behind_millis == 11_000
    timed.at(1)
    assert timed.service.metrics.dequeue_total == {"orders": 3}
    assert timed.service.metrics.table().timing_count["orders"].count == 0


async def test_the_progress_survives_a_clean_stop(tmp_path: Path) -> None:
    timed = Timed(tmp_path)
    timed.send(b"one", TIMER_DELAY_SEC="2")
    timed.send(b"two", TIMER_DELAY_SEC="20")
    timed.at(4)
    timed.service.close()
    timed.broker.close()
    clock = timed.clock
    timed = Timed(tmp_path, clock=clock)
    assert timed.service.index.queue_offset == 2
    assert timed.service.metrics.waiting == 1
    timed.at(25)
    assert timed.bodies() == [b"one", b"two"]
    timed.broker.close()


async def test_a_message_that_comes_late_for_the_tick_being_delivered_comes_with_the_next(timed: Timed) -> None:
    bodies = [b"%d" % number + bytes(4500) for number in range(500)]
    for body in bodies:
        timed.send(body, TIMER_DELAY_SEC="2")
    while timed.service.turn() == 0:
        pass
    timed.clock.set(timed.now + 2000)
    assert timed.service.turn() == 0  # some of them
    assert 0 < len(timed.bodies()) < 500
    text = {"UNIQ_KEY": "late", "TIMER_OUT_MS": "1700000000000", "REAL_TOPIC": "orders", "REAL_QID": "2"}
    timed.broker.writer.append_one(new_message(b"late", TIMER_TOPIC, 0, text))
    timed.at(2)
    assert timed.bodies() == [*bodies, b"late"]


async def test_messages_that_were_cut_off_the_log_are_not_delivered_and_others_are(timed: Timed) -> None:
    timed.send(b"kept", TIMER_DELAY_SEC="5")
    end = timed.broker.store.max_offset
    timed.send(b"cut", TIMER_DELAY_SEC="5")
    timed.send(b"cut, too", TIMER_DELAY_SEC="6")
    timed.at(1)
    assert timed.service.index.queue_offset == 3
    timed.broker.store.truncate(end)
    timed.service.truncated(end)
    timed.send(b"in its place", TIMER_DELAY_SEC="4")
    timed.at(10)
    assert sorted(timed.bodies()) == [b"in its place", b"kept"]


@pytest.mark.parametrize(
    "pairs",
    [
        ("TAGS T", "TIMER_OUT_MS 5000", "REAL_TOPIC orders", "REAL_QID 3"),  # as a message is set aside here
        ("TIMER_OUT_MS 5000", "REAL_TOPIC orders", "REAL_QID 3"),
        ("REAL_QID 3", "TAGS T", "TIMER_OUT_MS 5000", "REAL_TOPIC orders"),  # as a map of Java may have them
        ("REAL_TOPIC other", "TIMER_OUT_MS 1", "REAL_QID 9", "TIMER_OUT_MS 5000", "REAL_TOPIC orders", "REAL_QID 3"),
        ("A TIMER_OUT_MS", "REAL_TOPIC orders", "REAL_QID 3", "TIMER_OUT_MS 5000", ""),
    ],
)
def test_where_a_message_belongs_is_found_in_any_order(pairs: tuple[str, ...]) -> None:
    text = "\x02".join(pair.replace(" ", "\x01") for pair in pairs)
    message = NewMessage(TIMER_TOPIC, 0, b"x", text.encode(), 1, bytes(8), bytes(8))
    found = delivered(KeptMessage(message, text, QueueOffset(0), PhysicalOffset(0), 1), 4000, 5000, 6000)
    assert found is not None
    assert (found.topic, found.queue_id) == ("orders", 3)
    assert b"TIMER_ENQUEUE_MS\x014000" in found.properties, "in time"
