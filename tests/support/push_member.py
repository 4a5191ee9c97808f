"""A push consumer as a process: `push_member.py NAMESRV GROUP TOPIC concurrent|orderly FILE`.

Appends a line to FILE when a callback begins and when it ends: `begin|end PID BROKER QUEUE OFFSET BODY NANOSECONDS`.
Says `ready` once it has joined its group. SIGTERM makes it drain and leave.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.push import AsyncPushConsumer
from downrange.protocol.bodies.groups import ConsumeFromWhere
from downrange.transport.loop import run

CALLBACK_SECONDS = 0.001


async def main(namesrv: str, group: str, topic: str, kind: str, path: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(what: str, message: ReceivedMessage) -> None:
        where = f"{message.broker_name} {message.queue_id} {message.queue_offset} {message.body.decode()}"
        os.write(file, f"{what} {os.getpid()} {where} {time.monotonic_ns()}\n".encode())

    async def consume(message: ReceivedMessage) -> None:
        note("begin", message)
        await asyncio.sleep(CALLBACK_SECONDS)
        note("end", message)

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    config = ConsumerConfig(orderly=kind == "orderly", consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    consumer = AsyncPushConsumer(group, namesrv, config, on_message=consume)
    await consumer.subscribe(topic)
    async with consumer:
        print("ready", flush=True)
        await stop.wait()


if __name__ == "__main__":
    run(main(*sys.argv[1:]))
