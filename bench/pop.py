"""POP beside pull at equal load: CPU of the broker process for each message.

`backlog`: messages that are there already are taken and then acknowledged (POP) or their offset is committed (pull).
`live`: as many are sent before, so that the figure is the whole cost of a message. One connection, a window of requests
at a time.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from bench.report import QUICK, Figure, cpu_seconds, table
from bench.served import served
from downrange.protocol.bodies.body import encode_body
from downrange.protocol.bodies.offsets import UpdateConsumerOffsetRequest
from downrange.protocol.bodies.pop import (
    AckMessageRequest,
    BatchAck,
    BatchAckMessageBody,
    PopMessageRequest,
    PopMessageResponse,
    ReceiptHandle,
    encode_bits,
    handles_of,
)
from downrange.protocol.bodies.pull import PullMessageRequest, PullMessageResponse, PullSysFlag
from downrange.protocol.bodies.send import SendMessageRequest
from downrange.protocol.bodies.topics import CreateTopicRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from downrange.protocol.framing import FrameDecoder, encode
from tests.support.standalone_process import Standalone

QUEUES: Final = 4
WINDOW: Final = 8
WINDOWS: Final = 5 if QUICK else 60
ROUNDS: Final = 1 if QUICK else 3
GROUP: Final = "workers"
BODY: Final = b"x" * 128
_numbers = itertools.count(1)


class Asking:
    """One connection; whatever is asked must succeed."""

    def __init__(self, running: Standalone) -> None:
        host, _, port = running.broker.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._decoder = FrameDecoder()
        self._pid = running.process.pid

    def ask(self, commands: Iterable[Command]) -> list[Command]:
        """The replies, once all are there."""
        frames = [encode(command) for command in commands]
        self._socket.sendall(b"".join(frames))
        replies: list[Command] = []
        while len(replies) < len(frames):
            replies += self._decoder.feed(self._socket.recv(1 << 20))
        assert all(reply.code == 0 for reply in replies), [reply.remark for reply in replies]
        return replies

    def cpu(self) -> float:
        return cpu_seconds(self._pid)


def send(broker: Asking, topic: str, count: int) -> None:
    broker.ask(
        request(
            RequestCode.SEND_MESSAGE_V2,
            SendMessageRequest(
                producer_group="senders",
                topic=topic,
                queue_id=number % QUEUES,
                born_timestamp=int(time.time() * 1000),
                properties=f"UNIQ_KEY\x017F0000011A2B18B4AAC20000{next(_numbers):08X}\x02TAGS\x01TagA",
            ),
            body=BODY,
        )
        for number in range(count)
    )


class Puller:
    """Takes messages as a pull consumer does: from offsets that it knows."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._next = [0] * QUEUES
        self._turn = 0

    def take(self, broker: Asking, most: int) -> int:
        """A window of pulls; how many messages came."""
        found = 0
        for _ in range(WINDOW):
            queue_id = self._turn % QUEUES
            self._turn += 1
            flags = int(PullSysFlag.SUBSCRIPTION | PullSysFlag.COMMIT_OFFSET)
            header = PullMessageRequest(
                consumer_group=GROUP,
                topic=self._topic,
                queue_id=queue_id,
                queue_offset=self._next[queue_id],
                max_msg_nums=most,
                sys_flag=flags,
                commit_offset=self._next[queue_id],
                suspend_timeout_millis=0,
                subscription="*",
                sub_version=0,
                expression_type="TAG",
            )
            (reply,) = broker.ask([request(RequestCode.PULL_MESSAGE, header)])
            reached = reply.header(PullMessageResponse).next_begin_offset
            found += reached - self._next[queue_id]
            self._next[queue_id] = reached
        broker.ask(
            request(
                RequestCode.UPDATE_CONSUMER_OFFSET,
                UpdateConsumerOffsetRequest(
                    consumer_group=GROUP, topic=self._topic, queue_id=queue_id, commit_offset=offset
                ),
            )
            for queue_id, offset in enumerate(self._next)
        )
        return found


class Popper:
    """Takes messages as a POP consumer does, and acknowledges them: those of a pop together, or each on its own."""

    def __init__(self, topic: str, *, together: bool = True) -> None:
        self._topic = topic
        self._together = together

    def take(self, broker: Asking, most: int) -> int:
        header = PopMessageRequest(
            consumer_group=GROUP,
            topic=self._topic,
            queue_id=-1,
            max_msg_nums=most,
            invisible_time=60_000,
            exp_type="TAG",
            exp="*",
        )
        found = 0
        for _ in range(WINDOW):
            (reply,) = broker.ask([request(RequestCode.POP_MESSAGE, header)])
            handles = handles_of(reply.header(PopMessageResponse), "broker-a")
            broker.ask([self._batch(handles)] if self._together else map(self._ack, handles))
            found += len(handles)
        return found

    def _ack(self, handle: ReceiptHandle) -> Command:
        header = AckMessageRequest(
            consumer_group=GROUP,
            topic=self._topic,
            queue_id=handle.queue_id,
            extra_info=str(handle),
            offset=handle.offset,
        )
        return request(RequestCode.ACK_MESSAGE, header)

    def _batch(self, handles: list[ReceiptHandle]) -> Command:
        queues: dict[ReceiptHandle, list[int]] = {}
        for handle in handles:
            queues.setdefault(handle._replace(offset=0), []).append(handle.offset)
        acks = tuple(
            BatchAck(
                consumer_group=GROUP,
                topic=self._topic,
                start_offset=handle.start_offset,
                queue_id=handle.queue_id,
                revive_queue_id=handle.revive_queue,
                pop_time=handle.pop_time,
                invisible_time=handle.invisible_time,
                bits=encode_bits(offsets, handle.start_offset),
            )
            for handle, offsets in queues.items()
        )
        body = encode_body(BatchAckMessageBody(broker_name="broker-a", acks=acks))
        return request(RequestCode.BATCH_ACK_MESSAGE, body=body)


def measured(broker: Asking, topic: str, taker: Puller | Popper, most: int, *, live: bool) -> float:
    """CPU of the broker for one message, in microseconds."""
    header = CreateTopicRequest(
        topic=topic,
        default_topic="TBW102",
        read_queue_nums=QUEUES,
        write_queue_nums=QUEUES,
        perm=6,
        topic_filter_type="SINGLE_TAG",
        topic_sys_flag=0,
        order=False,
    )
    broker.ask([request(RequestCode.UPDATE_AND_CREATE_TOPIC, header)])
    if not live:
        for _ in range(WINDOWS * WINDOW * max(4, most) // 256 + 1):
            send(broker, topic, 256)
    before, taken = broker.cpu(), 0
    for _ in range(WINDOWS if most > 1 else 4 * WINDOWS):
        if live:
            send(broker, topic, WINDOW * most)
        taken += taker.take(broker, most)
    return (broker.cpu() - before) / taken * 1e6


def run() -> list[Figure]:
    takers: dict[str, Callable[[str], Puller | Popper]] = {
        "pull": Puller,
        "POP, batch ack": Popper,
        "POP, ack by ack": partial(Popper, together=False),
    }
    best: dict[str, float] = {}
    with served({"busyPollMicros": 0}) as running:  # polling is no work for messages
        broker = Asking(running)
        for turn in range(ROUNDS):
            for kind, live in (("backlog", False), ("live", True)):
                for most in (32, 1):
                    for name, make in takers.items():
                        topic = f"{kind}-{most}-{name.translate({ord(' '): '-', ord(','): None})}-{turn}"
                        found = measured(broker, topic, make(topic), most, live=live)
                        label = f"{kind}, {most} at a time, {name}"
                        best[label] = min(best.get(label, found), found)
    figures = []
    for label, micros in best.items():
        base = ", ".join([*label.split(", ")[:2], "pull"])
        figures.append(Figure(f"{label}: server CPU", micros, "µs a message", micros / best[base], "pull"))
    return figures


if __name__ == "__main__":
    print(table(run()))
