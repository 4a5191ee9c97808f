"""A process that reads a topic as a member of a group and writes down what it reads.

`python -m tests.support.lite_pull_reader NAMESRV GROUP TOPIC HISTORY NAME`; SIGTERM ends it in order.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType

from downrange import ConsumeFromWhere, LitePullConfig, LitePullConsumer
from tests.support.history import HistoryWriter


def main(namesrv: str, group: str, topic: str, history: str, name: str) -> None:
    is_stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_stopped
        is_stopped = True

    signal.signal(signal.SIGTERM, stop)
    writer = HistoryWriter(Path(history), name)
    config = LitePullConfig(consume_from_where=ConsumeFromWhere.FIRST_OFFSET, pull_batch_size=32)
    with LitePullConsumer(group, namesrv, config) as consumer:
        consumer.subscribe(topic)
        print("reading", flush=True)
        while not is_stopped:
            for message in consumer.poll(0.2):
                writer.write(
                    "read",
                    "ok",
                    topic=message.topic,
                    queue=f"{message.broker_name}/{message.queue_id}",
                    offset=message.queue_offset,
                    id=message.body.decode(),
                    crc=message.body_crc,
                )


if __name__ == "__main__":
    main(*sys.argv[1:])
