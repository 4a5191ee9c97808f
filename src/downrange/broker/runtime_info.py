"""The answer to request 28: the figures that a broker reports to `clusterList`, `brokerStatus` and dashboards.

Keys, spelling mistakes and number formats are RocketMQ's. We have no thread pools: requests wait in the socket, never
in a queue, so the queue sizes are 0 and the capacities are RocketMQ's defaults; the waiting time is the longest that
the event loop keeps a request waiting.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Final

from downrange.broker.live_config import LiveConfig
from downrange.broker.put_latencies import LATENCY_BOUNDS
from downrange.broker.rates import Rates
from downrange.broker.statistics import DayTotals, Statistics
from downrange.protocol.codes import VERSION_4_9_8
from downrange.store.log.segments import disk_use
from downrange.store.message_store import MessageStore

VERSION_NAME: Final = "V4_9_8"

_LATENCY_LABELS: Final = (
    "[<=0ms]", "[0~10ms]", "[10~50ms]", "[50~100ms]", "[100~200ms]", "[200~500ms]", "[500ms~1s]",
    "[1~2s]", "[2~3s]", "[3~4s]", "[4~5s]", "[5~10s]", "[10s~]",
)  # fmt: skip
assert len(_LATENCY_LABELS) == len(LATENCY_BOUNDS) + 1
_POOLS: Final = (
    ("sendThreadPoolQueueSize", "sendThreadPoolQueueCapacity", 10_000),
    ("pullThreadPoolQueueSize", "pullThreadPoolQueueCapacity", 100_000),
    ("queryThreadPoolQueueSize", "queryThreadPoolQueueCapacity", 20_000),
    ("EndTransactionQueueSize", "EndTransactionThreadPoolQueueCapacity", 100_000),
)
_WAITS: Final = (
    "sendThreadPoolQueueHeadWaitTimeMills",
    "pullThreadPoolQueueHeadWaitTimeMills",
    "queryThreadPoolQueueHeadWaitTimeMills",
)
_NO_POOL: Final = 2**31 - 1


def runtime_info(
    config: LiveConfig,
    store: MessageStore,
    statistics: Statistics,
    now: int,
    *,
    delay_offsets: Mapping[int, tuple[int, int]] | None = None,
    waited_millis: float = 0.0,
    transient_buffers: int | None = None,
    path_use: Callable[[Path], float] = disk_use,
) -> dict[str, str]:
    """All figures as text. `delay_offsets`: level -> (offset of the next message to deliver, end of its queue)."""
    table = _store_statistics(statistics, now)
    table |= _days("msgPutTotal", statistics.put_days)
    table |= _days("msgGetTotal", statistics.get_days)
    table |= _disk(store, path_use)
    table |= {
        "brokerVersionDesc": VERSION_NAME,
        "brokerVersion": str(VERSION_4_9_8),
        "commitLogMinOffset": str(store.min_offset),
        "commitLogMaxOffset": str(store.max_offset),
        "dispatchBehindBytes": str(store.dispatch_behind_bytes),
        "dispatchMaxBuffer": "0",  # messages are dispatched in the step that appends them
        "pageCacheLockTimeMills": "0",  # one thread appends, so there is no lock
        "earliestMessageTimeStamp": str(store.earliest_store_time),
        "startAcceptSendRequestTimeStamp": str(config.broker.start_accept_send_request_time_stamp),
        "remainHowManyDataToFlush": readable_bytes(store.max_offset - store.flushed_offset),
        "remainTransientStoreBufferNumbs": str(_NO_POOL if transient_buffers is None else transient_buffers),
    }
    if store.config.uses_transient_pool:
        table["remainHowManyDataToCommit"] = readable_bytes(store.commit_log.wrote_offset - store.max_offset)
    for size, capacity, default in _POOLS:
        table[size] = "0"
        table[capacity] = str(default)
    table |= dict.fromkeys(_WAITS, str(int(waited_millis)))
    for level, (offset, end) in sorted((delay_offsets or {}).items()):
        table[f"scheduleMessageOffset_{level}"] = f"{offset},{end}"
    return table


def _store_statistics(statistics: Statistics, now: int) -> dict[str, str]:
    times = max(1, statistics.put_messages)
    found, missed = statistics.found_rates, statistics.missed_rates
    total = Rates(*((one or 0.0) + (other or 0.0) for one, other in zip(found, missed, strict=True)))
    return {
        "bootTimestamp": str(statistics.started_millis),
        "runtime": _runtime(now - statistics.started_millis),
        "putMessageEntireTimeMax": str(statistics.put_millis_max),
        "putMessageTimesTotal": str(times),
        "putMessageFailedTimes": str(statistics.failed_puts),
        "putMessageSizeTotal": str(statistics.put_bytes),
        "putMessageDistributeTime": _distribution(statistics.latencies.counts()),
        "putMessageAverageSize": java_double(statistics.put_bytes / times),
        "putLatency99": f"{statistics.latencies.percentile(0.99):.2f}",
        "putLatency999": f"{statistics.latencies.percentile(0.999):.2f}",
        "getMessageEntireTimeMax": str(statistics.get_millis_max),
        "putTps": _rates(statistics.put_rates),
        "getFoundTps": _rates(found),
        "getMissTps": _rates(missed),
        "getTotalTps": _rates(total),
        "getTransferedTps": _rates(statistics.transferred_rates),
    }


def _disk(store: MessageStore, path_use: Callable[[Path], float]) -> dict[str, str]:
    table = {
        "commitLogDiskRatio": java_double(store.commit_log_disk_use),
        "consumeQueueDiskRatio": java_double(store.queue_disk_use),
    }
    for path in store.config.commit_log_paths:
        table[f"commitLogDiskRatio_{path}"] = java_double(path_use(path))
    try:
        disk = os.statvfs(store.config.store_path_root_dir)
    except OSError:
        return table  # RocketMQ leaves the key out as well when the directory is gone
    total, free = disk.f_blocks * disk.f_frsize, disk.f_bfree * disk.f_frsize
    table["commitLogDirCapacity"] = f"Total : {readable_bytes(total)}, Free : {readable_bytes(free)}."
    return table


def _days(prefix: str, totals: DayTotals) -> dict[str, str]:
    return {
        f"{prefix}YesterdayMorning": str(totals.yesterday_morning),
        f"{prefix}TodayMorning": str(totals.today_morning),
        f"{prefix}TodayNow": str(totals.now),
    }


def _rates(rates: Rates) -> str:
    return " ".join("" if rate is None else java_double(rate) for rate in rates)


def _distribution(counts: tuple[int, ...] | None) -> str:
    if counts is None:
        return "null"
    return "".join(f"{label}:{count} " for label, count in zip(_LATENCY_LABELS, counts, strict=True))


def _runtime(millis: int) -> str:
    minutes, seconds = divmod(max(0, millis) // 1000, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"


def readable_bytes(count: int) -> str:
    """`66.5 GiB`, as RocketMQ writes sizes."""
    if count < 1024:
        return f"{count} B"
    exponent = min((count.bit_length() - 1) // 10, 6)
    return f"{count / 1024**exponent:.1f} {'KMGTPE'[exponent - 1]}iB"


def java_double(value: float) -> str:
    """A number as Java's Double.toString writes it: plain from a thousandth to ten million, else with an exponent."""
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        return repr(float(value))
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int), f"{value} is not a finite number"
    fraction = "".join(map(str, digits[1:])) or "0"
    return f"{'-' if sign else ''}{digits[0]}.{fraction}E{exponent + len(digits) - 1}"
