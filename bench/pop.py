"""POP beside pull at equal load: CPU of the broker process for each message, and their ratio.

`live`: messages are sent and taken, so that the figure is the whole cost of a message; `backlog`: they are there
already. Taken messages are acknowledged, those of a pop together or each on its own, or (pull) their offsets are
committed. `8 consumers` ask at once, as they do on a busy broker; `1 consumer` asks and waits for the answer, so its
figures are mostly those of system calls, of which POP needs twice as many as pull: it has twice as many requests.

Equal load means: the same messages, as many consumers, as many messages a request. A pull consumer commits its offset
with the next pull, as clients do; a POP consumer acknowledges every message, and waits for the answer.

POP_ROWS="live 8 32; backlog 1 32" measures only these rows.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, NamedTuple

from bench.report import QUICK, Figure, exact_cpu_seconds, table
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

CONSUMERS: Final = 8
QUEUES: Final = CONSUMERS
WINDOWS: Final = 10 if QUICK else 60
ROUNDS: Final = 1 if QUICK else 5
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
        return exact_cpu_seconds(self._pid)


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
    """Takes messages as pull consumers do: each has a queue, and knows its offset there."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._next = [0] * QUEUES

    def take(self, broker: Asking, most: int, at_once: int) -> int:
        """A pull of each queue, so many of them at once; how many messages came."""
        found = 0
        for start in range(0, QUEUES, at_once):
            queues = range(start, start + at_once)
            for queue_id, reply in zip(queues, broker.ask([self._pull(each, most) for each in queues]), strict=True):
                reached = reply.header(PullMessageResponse).next_begin_offset
                found += reached - self._next[queue_id]
                self._next[queue_id] = reached
        return found

    def _pull(self, queue_id: int, most: int) -> Command:
        header = PullMessageRequest(
            consumer_group=GROUP,
            topic=self._topic,
            queue_id=queue_id,
            queue_offset=self._next[queue_id],
            max_msg_nums=most,
            sys_flag=int(PullSysFlag.SUBSCRIPTION | PullSysFlag.COMMIT_OFFSET),
            commit_offset=self._next[queue_id],
            suspend_timeout_millis=0,
            subscription="*",
            sub_version=0,
            expression_type="TAG",
        )
        return request(RequestCode.PULL_MESSAGE, header)

    def commit(self, broker: Asking) -> None:
        """Commit all offsets, as consumers do every few seconds."""
        broker.ask(
            request(
                RequestCode.UPDATE_CONSUMER_OFFSET,
                UpdateConsumerOffsetRequest(
                    consumer_group=GROUP, topic=self._topic, queue_id=queue_id, commit_offset=offset
                ),
            )
            for queue_id, offset in enumerate(self._next)
        )


class Popper:
    """Takes messages as POP consumers do, and acknowledges them: those of a pop together, or each on its own."""

    def __init__(self, topic: str, *, together: bool = True) -> None:
        self._topic = topic
        self._together = together

    def take(self, broker: Asking, most: int, at_once: int) -> int:
        """As many pops as there are queues, so many of them at once; how many messages came."""
        found = 0
        for _ in range(0, QUEUES, at_once):
            acks: list[Command] = []
            for reply in broker.ask([self._pop(most) for _ in range(at_once)]):
                handles = handles_of(reply.header(PopMessageResponse), "broker-a")
                acks += [self._batch(handles)] if self._together else map(self._ack, handles)
                found += len(handles)
            broker.ask(acks)
        return found

    def commit(self, broker: Asking) -> None:
        """Acknowledgements say all."""

    def _pop(self, most: int) -> Command:
        header = PopMessageRequest(
            consumer_group=GROUP,
            topic=self._topic,
            queue_id=-1,
            max_msg_nums=most,
            invisible_time=60_000,
            poll_time=15_000,
            born_time=int(time.time() * 1000),
            exp_type="TAG",
            exp="*",
        )
        return request(RequestCode.POP_MESSAGE, header)

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


class Load(NamedTuple):
    """What is asked of a broker."""

    is_live: bool
    consumers: int
    most: int

    def __str__(self) -> str:
        kind = "live" if self.is_live else "backlog"
        return f"{kind}, {self.consumers} consumer{'s' * (self.consumers > 1)}, {self.most} at a time"


ROWS: Final = [row.split() for row in os.environ.get("POP_ROWS", "").split(";") if row.strip()]
LOADS: Final = [Load(kind == "live", int(consumers), int(most)) for kind, consumers, most in ROWS] or [
    Load(is_live, consumers, most) for is_live in (True, False) for consumers in (CONSUMERS, 1) for most in (32, 4, 1)
]


def measured(broker: Asking, topic: str, taker: Puller | Popper, load: Load) -> float:
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
    windows = WINDOWS * 4 if load.most < 32 else WINDOWS
    if not load.is_live:
        for _ in range(windows):
            send(broker, topic, QUEUES * load.most)
    before, taken = broker.cpu(), 0
    for _ in range(windows):
        if load.is_live:
            send(broker, topic, QUEUES * load.most)
        taken += taker.take(broker, load.most, load.consumers)
    taker.commit(broker)
    assert taken == windows * QUEUES * load.most, f"{taken} messages came"
    return (broker.cpu() - before) / taken * 1e6


def run() -> list[Figure]:
    takers: dict[str, Callable[[str], Puller | Popper]] = {
        "pull": Puller,
        "POP, batch ack": Popper,
        "POP, ack by ack": partial(Popper, together=False),
    }
    best: dict[tuple[Load, str], float] = {}
    with served({"busyPollMicros": 0}) as running:  # polling is no work for messages
        broker = Asking(running)
        for _ in range(ROUNDS):
            for load in LOADS:
                for name, make in takers.items():
                    topic = f"taken-{next(_numbers)}"
                    micros = measured(broker, topic, make(topic), load)
                    best[load, name] = min(best.get((load, name), micros), micros)
    return [
        Figure(f"{load}, {name}: server CPU", micros, "µs a message", micros / best[load, "pull"], "pull")
        for (load, name), micros in best.items()
    ]


if __name__ == "__main__":
    print(table(run()))
