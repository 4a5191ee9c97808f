"""A steady stream of messages, as a process: `feeder.py NAMESRV TOPIC RATE SECONDS`.

Says `ready`, waits for a line of input, sends, and says `sent COUNT`. Every message has the properties `n`, its number,
and `even`, 1 for every second one.
"""

from __future__ import annotations

import asyncio
import sys
import time

from downrange import AsyncProducer, Message
from downrange.transport.loop import run

BATCH = 50


async def main(namesrv: str, topic: str, rate: str, seconds: str) -> None:
    async with AsyncProducer("feeder", namesrv) as producer:
        await producer.queues(topic)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        began, sent = time.monotonic(), 0
        while (passed := time.monotonic() - began) < float(seconds):
            if sent >= passed * float(rate):
                await asyncio.sleep(0.002)
                continue
            numbers = range(sent, sent + BATCH)
            await producer.send_batch(
                [
                    Message(
                        topic,
                        b'{"number": %d, "text": "a message like many others"}' % number,
                        tags="fed",
                        keys=f"fed-{number}",
                        properties={"n": str(number), "even": str(number % 2)},
                    )
                    for number in numbers
                ]
            )
            sent += BATCH
        print(f"sent {sent} in {time.monotonic() - began:.2f} s", flush=True)


if __name__ == "__main__":
    run(main(*sys.argv[1:]))
