"""The runtime info of a broker: a table of texts, and the figures operators read in it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BrokerRuntime:
    """The answer to GET_BROKER_RUNTIME_INFO. A figure the broker does not send is None."""

    table: dict[str, str]

    @property
    def version(self) -> str | None:
        return self.table.get("brokerVersionDesc")

    @property
    def in_tps(self) -> float | None:
        return self._rate("putTps")

    @property
    def out_tps(self) -> float | None:
        return self._rate("getTransferedTps")

    @property
    def send_queue_size(self) -> int | None:
        return self._number("sendThreadPoolQueueSize")

    @property
    def send_queue_wait_millis(self) -> int | None:
        return self._number("sendThreadPoolQueueHeadWaitTimeMills")

    @property
    def pull_queue_size(self) -> int | None:
        return self._number("pullThreadPoolQueueSize")

    @property
    def pull_queue_wait_millis(self) -> int | None:
        return self._number("pullThreadPoolQueueHeadWaitTimeMills")

    @property
    def page_cache_lock_millis(self) -> int | None:
        return self._number("pageCacheLockTimeMills")

    @property
    def max_offset(self) -> int | None:
        """Where the commit log ends."""
        return self._number("commitLogMaxOffset")

    @property
    def earliest_message_timestamp(self) -> int | None:
        """Store time of the oldest message kept; None while there is none."""
        timestamp = self._number("earliestMessageTimeStamp")
        return timestamp if timestamp is not None and timestamp > 0 else None

    @property
    def disk_ratio(self) -> float | None:
        """How full the disk is; None while the broker has not looked."""
        ratio = self._rate("commitLogDiskRatio")
        return ratio if ratio is not None and ratio >= 0 else None

    @property
    def in_yesterday(self) -> int | None:
        return self._difference("msgPutTotalTodayMorning", "msgPutTotalYesterdayMorning")

    @property
    def out_yesterday(self) -> int | None:
        return self._difference("msgGetTotalTodayMorning", "msgGetTotalYesterdayMorning")

    @property
    def in_today(self) -> int | None:
        return self._difference("msgPutTotalTodayNow", "msgPutTotalTodayMorning")

    @property
    def out_today(self) -> int | None:
        return self._difference("msgGetTotalTodayNow", "msgGetTotalTodayMorning")

    def _rate(self, key: str) -> float | None:
        # Three rates (10 s, 60 s, 600 s) in one text; a piece is empty while there are too few samples.
        first = self.table.get(key, "").split(" ")[0]
        try:
            return float(first)
        except ValueError:
            return None

    def _number(self, key: str) -> int | None:
        try:
            return int(self.table.get(key, ""))
        except ValueError:
            return None

    def _difference(self, later: str, earlier: str) -> int | None:
        now, then = self._number(later), self._number(earlier)
        return None if now is None or then is None else now - then
