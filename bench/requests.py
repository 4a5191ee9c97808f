"""What requests other than plain sends and pulls cost: CPU of a broker and name server process for one of each kind.

One blocking connection, `WINDOW` requests sent at a time, all answers awaited before the next window. Messages have 128
bytes, a unique id, a tag and a JSON header.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable
from typing import Final

from bench.report import QUICK, Figure, cpu_seconds, table
from bench.served import served
from downrange.model.message import MessageQueue
from downrange.model.message_id import parse_offset_message_id
from downrange.model.subscription import subscribe
from downrange.model.topics import retry_topic
from downrange.protocol.bodies.body import encode_body
from downrange.protocol.bodies.groups import (
    ConsumerData,
    ConsumerGroupRequest,
    HeartbeatData,
    LockBatchBody,
    ProducerData,
)
from downrange.protocol.bodies.offsets import (
    GetMaxOffsetRequest,
    QueryConsumerOffsetRequest,
    UpdateConsumerOffsetRequest,
)
from downrange.protocol.bodies.query import ViewMessageRequest
from downrange.protocol.bodies.send import ConsumerSendMessageBackRequest, SendMessageRequest, SendMessageResponse
from downrange.protocol.bodies.transactions import EndTransactionRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from downrange.protocol.framing import FrameDecoder, encode
from tests.support.standalone_process import Standalone

WINDOW: Final = 64
WINDOWS: Final = 20 if QUICK else 200
WINDOWS_OF_NEW_TOPICS: Final = 1 if QUICK else 5  # each topic has files
ROUNDS: Final = 1 if QUICK else 3
TOPIC: Final = "bench"
GROUP: Final = "workers"
BODY: Final = b"x" * 128
_numbers = itertools.count(1)

Make = Callable[[], Command]


class Asking:
    """One connection; whatever is asked must succeed."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._decoder = FrameDecoder()

    def ask(self, *commands: Command) -> Command:
        """The last reply, once all are there."""
        self._socket.sendall(b"".join(map(encode, commands)))
        missing = sum(not command.is_oneway for command in commands)
        while missing:
            for reply in self._decoder.feed(self._socket.recv(1 << 20)):
                if reply.is_response:  # a broker also tells members of a group that it has changed
                    assert reply.code == 0, reply.remark
                    missing -= 1
        return reply


def message(properties: str = "", topic: str = TOPIC, sys_flag: int = 0, waits: str = "true") -> Command:
    number = next(_numbers)
    header = SendMessageRequest(
        producer_group="senders",
        topic=topic,
        queue_id=0,
        sys_flag=sys_flag,
        born_timestamp=int(time.time() * 1000),
        properties=f"UNIQ_KEY\x017F0000011A2B18B4AAC20000{number:08X}\x02WAIT\x01{waits}\x02TAGS\x01TagA\x02{properties}",
    )
    return request(RequestCode.SEND_MESSAGE_V2, header, body=BODY)


def half_message() -> Command:
    return message("TRAN_MSG\x01true\x02PGROUP\x01senders\x02", sys_flag=4)


def stored_at(reply: Command) -> tuple[int, int]:
    """Queue offset and physical offset of what was sent."""
    stored = reply.header(SendMessageResponse)
    return stored.queue_offset, parse_offset_message_id(stored.msg_id).physical_offset


def heartbeat() -> Command:
    consumer = ConsumerData(group_name=GROUP, subscription_data_set=(subscribe(TOPIC, "TagA || TagB", version=1),))
    body = HeartbeatData(
        client_id="10.0.0.9@1",
        producer_data_set=(ProducerData("senders"),),
        consumer_data_set=(consumer,),
    )
    return request(RequestCode.HEART_BEAT, body=encode_body(body))


def lock() -> Command:
    queues = frozenset(MessageQueue(TOPIC, "broker-a", number) for number in range(8))
    body = LockBatchBody(consumer_group=GROUP, client_id="10.0.0.9@1", mq_set=queues)
    return request(RequestCode.LOCK_BATCH_MQ, body=encode_body(body))


def kinds(broker: Asking, namesrv: Asking) -> dict[str, tuple[Asking, Make]]:
    """What is asked, whom, and how to make one."""
    _, offset = stored_at(broker.ask(message()))
    code = RequestCode
    back = ConsumerSendMessageBackRequest(offset=offset, group=GROUP, delay_level=3, max_reconsume_times=16)
    commit = UpdateConsumerOffsetRequest(consumer_group=GROUP, topic=TOPIC, queue_id=0, commit_offset=7)
    committed = QueryConsumerOffsetRequest(consumer_group=GROUP, topic=TOPIC, queue_id=0)
    to_broker: dict[str, Make] = {
        "plain send": message,
        "half message": half_message,
        "delayed send": lambda: message("DELAY\x0118\x02"),
        "send to a retry topic": lambda: message("DELAY\x0118\x02", retry_topic(GROUP)),
        "message sent back": lambda: request(code.CONSUMER_SEND_MSG_BACK, back),
        "first send to a new topic": lambda: message(topic=f"new-{next(_numbers)}"),
        "heartbeat": heartbeat,
        "commit of an offset": lambda: request(code.UPDATE_CONSUMER_OFFSET, commit),
        "committed offset": lambda: request(code.QUERY_CONSUMER_OFFSET, committed),
        "end of a queue": lambda: request(code.GET_MAX_OFFSET, GetMaxOffsetRequest(topic=TOPIC, queue_id=0)),
        "members of a group": lambda: request(code.GET_CONSUMER_LIST_BY_GROUP, ConsumerGroupRequest(GROUP)),
        "lock of eight queues": lock,
        "message by id": lambda: request(code.VIEW_MESSAGE_BY_ID, ViewMessageRequest(offset)),
    }
    asked = {name: (broker, make) for name, make in to_broker.items()}
    asked["route"] = namesrv, lambda: request(code.GET_ROUTEINFO_BY_TOPIC, ext_fields={"topic": TOPIC})
    return asked


def cpu_micros(running: Standalone, asking: Asking, make: Make, windows: int) -> float:
    """Of the server, for one request."""
    made = [[make() for _ in range(WINDOW)] for _ in range(windows)]
    before = cpu_seconds(running.process.pid)
    for commands in made:
        asking.ask(*commands)
    return (cpu_seconds(running.process.pid) - before) / (WINDOW * windows) * 1e6


def confirmed_end_micros(running: Standalone, asking: Asking) -> float:
    """The commit of a transaction by a producer who wants an answer; its half message is sent before."""
    ends = []
    for _ in range(WINDOW * WINDOWS):
        queue_offset, physical_offset = stored_at(asking.ask(half_message()))
        header = EndTransactionRequest(
            producer_group="senders",
            tran_state_table_offset=queue_offset,
            commit_log_offset=physical_offset,
            commit_or_rollback=8,
            msg_id="id",
        )
        ends.append(request(RequestCode.END_TRANSACTION, header))
    made = iter(ends)
    return cpu_micros(running, asking, lambda: next(made), WINDOWS)


def run() -> list[Figure]:
    best: dict[str, float] = {}
    settings = {"waitTimeMillsInTransactionQueue": 10_000, "waitTimeMillsInHeartbeatQueue": 60_000}
    with served(settings) as running:
        broker, namesrv = Asking(running.broker), Asking(running.namesrv)
        broker.ask(heartbeat())
        asked = kinds(broker, namesrv)
        for _ in range(ROUNDS):
            for name, (asking, make) in asked.items():
                windows = WINDOWS_OF_NEW_TOPICS if "new topic" in name else WINDOWS
                best[name] = min(best.get(name, float("inf")), cpu_micros(running, asking, make, windows))
            name = "confirmed end of a transaction"
            best[name] = min(best.get(name, float("inf")), confirmed_end_micros(running, broker))
    return [Figure(name, micros, "µs", micros / best["plain send"], "a plain send") for name, micros in best.items()]


if __name__ == "__main__":
    print(table(run()))
