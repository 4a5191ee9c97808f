"""Sends of each kind through the request path of a broker in this process: CPU time a request, without any socket.

A chunk of 64 requests (and of one) with JSON headers is given to a connection as if it had been received; the replies
are dropped. Each kind is measured with the compiled steps and, in a process of its own, in pure Python.
`python -m bench request_path` measures both; `python -m bench.request_path` only the variant of this process.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bench.report import QUICK, Figure, table
from bench.requests import BODY, TOPIC, half_message, message
from downrange.broker.app import broker
from downrange.broker.config import BrokerConfig
from downrange.compiled import VARIANT
from downrange.model.topics import TopicConfig
from downrange.protocol.bodies.send import BatchEntry, SendMessageRequest, encode_batch
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from downrange.protocol.framing import encode
from downrange.store.config import StoreConfig
from downrange.transport.connection import Connection

WIDTHS: Final = (64, 1)
ROUNDS: Final = 2 if QUICK else 12
REQUESTS: Final = 1_024 if QUICK else 4_096
"""Of one kind in one round."""
_BATCH: Final = 8
_numbers = itertools.count()


class _NowhereTransport(asyncio.Transport):
    """Drops what is written."""

    def get_extra_info(self, name: str, default: object = None) -> object:
        return {"peername": ("127.0.0.1", 40000), "sockname": ("127.0.0.1", 10911)}.get(name, default)

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def close(self) -> None:
        pass


def _batch() -> Command:
    header = SendMessageRequest(
        producer_group="senders", topic=TOPIC, queue_id=0, born_timestamp=int(time.time() * 1000), batch=True
    )
    texts = [f"UNIQ_KEY\x017F0000011A2B18B4AAC20000{next(_numbers):08X}\x02TAGS\x01TagA\x02" for _ in range(_BATCH)]
    return request(
        RequestCode.SEND_BATCH_MESSAGE, header, body=encode_batch([BatchEntry(0, BODY, text) for text in texts])
    )


KINDS: Final[dict[str, Callable[[], Command]]] = {
    "plain send": message,
    "send with WAIT=false": lambda: message(waits="false"),
    "delayed send": lambda: message("DELAY\x0118\x02"),
    "half message": half_message,
    f"batch of {_BATCH}": _batch,
}


async def _measure() -> dict[str, float]:
    """CPU microseconds a request of each kind and width: the least of all rounds, which take turns."""
    best: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        store = StoreConfig(store_path_root_dir=Path(directory))
        async with broker(BrokerConfig(listen_port=0, broker_ip1="127.0.0.1"), store) as running:
            running.topics.put(TopicConfig(TOPIC, 4, 4))
            connection = Connection(running.server)
            connection.connection_made(_NowhereTransport())
            connection.data_received(b"".join(encode(make()) for make in KINDS.values()))  # which makes the queues
            for _ in range(ROUNDS):
                for width in WIDTHS:
                    for kind, make in KINDS.items():
                        name = f"{kind}, {width} at a time"
                        best[name] = min(best.get(name, 1e9), await _round(connection, make, width))
    return best


async def _round(connection: Connection, make: Callable[[], Command], width: int) -> float:
    chunks = [b"".join(encode(make()) for _ in range(width)) for _ in range(REQUESTS // width)]
    spent = 0.0
    for number, chunk in enumerate(chunks):
        if number % max(1, 64 // width) == 0:
            await asyncio.sleep(0)  # what the broker does at the end of a turn is not part of the path
        start = time.thread_time()
        connection.data_received(chunk)
        spent += time.thread_time() - start
    return spent / REQUESTS * 1e6


def figures() -> list[Figure]:
    """Of the variant of this process."""
    return [Figure(f"{name}, {VARIANT}", micros, "µs a request") for name, micros in asyncio.run(_measure()).items()]


def run() -> list[Figure]:
    found: list[Figure] = []
    for pure in ("", "1"):
        command = [sys.executable, "-m", "bench.request_path", "--json"]
        ended = subprocess.run(command, env=os.environ | {"DOWNRANGE_PURE": pure}, capture_output=True, check=True)
        found += [Figure(*row) for row in json.loads(ended.stdout)]
    return found


if __name__ == "__main__":
    print(json.dumps(figures()) if "--json" in sys.argv else table(figures()))
