"""The running info of a consumer, for operators (request 307)."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping
from typing import Final

from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.pop.queue import PopQueue
from downrange.client.consumer.process_queue import ProcessQueue
from downrange.model.message import MessageQueue
from downrange.model.subscription import Subscription
from downrange.protocol.bodies.consumers import (
    ConsumerRunningInfo,
    ConsumeStatus,
    PopProcessQueueInfo,
    ProcessQueueInfo,
)
from downrange.protocol.bodies.groups import ConsumeType

CLIENT_VERSION: Final = "V4_9_8"
_MIB: Final = 1024 * 1024


def process_queue_info(queue: ProcessQueue, committed: int | None, *, is_locked: bool) -> ProcessQueueInfo:
    smallest, largest = queue.reach
    taken, taken_smallest, taken_largest = queue.taken_reach
    return ProcessQueueInfo(
        commit_offset=queue.done_offset if committed is None else committed,
        cached_msg_min_offset=smallest,
        cached_msg_max_offset=largest,
        cached_msg_count=queue.message_count,
        cached_msg_size_in_mib=queue.byte_count // _MIB,
        transaction_msg_min_offset=taken_smallest,
        transaction_msg_max_offset=taken_largest,
        transaction_msg_count=taken,
        locked=is_locked,
        last_lock_timestamp=queue.last_lock_millis,
        dropped=queue.is_dropped,
        last_pull_timestamp=queue.last_pull_millis,
        last_consume_timestamp=queue.last_consume_millis,
    )


def pop_queue_info(queue: PopQueue) -> PopProcessQueueInfo:
    return PopProcessQueueInfo(
        wait_ack_count=queue.message_count, dropped=queue.is_dropped, last_pop_timestamp=queue.last_pop_millis
    )


def running_info(
    *,
    config: ConsumerConfig,
    namesrv_addresses: Iterable[str],
    started_millis: int,
    subscriptions: Iterable[Subscription],
    queues: Mapping[MessageQueue, ProcessQueueInfo],
    popped: Iterable[PopQueue],
    statistics: Mapping[str, ConsumeStatus],
    with_stacks: bool,
) -> ConsumerRunningInfo:
    """The running info of a push consumer; its properties are Java's six and all settings."""
    settings = {field.name: str(getattr(config, field.name)) for field in dataclasses.fields(config)}
    settings["allocation"] = config.allocation.name
    return ConsumerRunningInfo(
        properties={
            **settings,
            **java_properties(
                ConsumeType.PASSIVELY,
                started_millis,
                namesrv_addresses,
                is_orderly=config.orderly,
                threads=config.consume_threads,
            ),
        },
        subscription_set=tuple(subscriptions),
        mq_table=dict(queues),
        mq_pop_table={queue.queue: pop_queue_info(queue) for queue in popped} or None,
        status_table=dict(statistics),
        jstack=stacks() if with_stacks else None,
    )


def java_properties(
    kind: ConsumeType,
    started_millis: int,
    namesrv_addresses: Iterable[str],
    *,
    is_orderly: bool = False,
    threads: int = 0,
) -> dict[str, str | int | float | bool]:
    """The six that Java's consumers tell, and tools look for."""
    return {
        "PROP_CONSUME_TYPE": kind.value,
        "PROP_CONSUMER_START_TIMESTAMP": str(started_millis),
        "PROP_CONSUMEORDERLY": str(is_orderly).lower(),
        "PROP_CLIENT_VERSION": CLIENT_VERSION,
        "PROP_NAMESERVER_ADDR": "".join(f"{address};" for address in namesrv_addresses),
        "PROP_THREADPOOL_CORE_SIZE": str(threads),
    }


def stacks() -> str:
    """The stack of every thread and of every task of the running loop: the jstack of Java's tools."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    pieces = []
    for identity, frame in sys._current_frames().items():
        pieces.append(f"{names.get(identity, '?')} TID: {identity}\n{''.join(traceback.format_stack(frame))}\n")
    for task in asyncio.all_tasks():
        lines = [line for frame in task.get_stack() for line in traceback.format_stack(frame, limit=1)]
        pieces.append(f"task {task.get_name()}\n{''.join(lines)}\n")
    return "\n".join(pieces)
