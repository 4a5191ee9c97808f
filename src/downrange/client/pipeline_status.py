"""The progress of pipelines, told as messages: any console of the cluster can read it, and there is its history.

A pipeline sends a JSON message after a batch, at most one in five seconds, to the topic DOWNRANGE_PIPELINES; the key of
the message is the name of the pipeline. The last status is always sent. `client/admin/pipelines.py` reads them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import msgspec

from downrange.client.config import ClientConfig, ProducerConfig
from downrange.clock import Clock, SystemClock
from downrange.model.errors import MQError
from downrange.model.message import Message

if TYPE_CHECKING:
    from downrange.client.producer.blocking.producer import Producer

log = logging.getLogger(__name__)

PIPELINES_TOPIC: Final = "DOWNRANGE_PIPELINES"
PIPELINE_GROUP: Final = "DOWNRANGE_PIPELINES"
SECONDS_BETWEEN: Final = 5.0
_MOST_ERROR_LETTERS: Final = 500


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    """One pipeline after a batch. Lag is in messages, by topic; None stands for what the pipeline does not know."""

    name: str
    kind: str
    """What it does: `stream`, `archive` and so on."""
    source: str = ""
    target: str = ""
    lag: Mapping[str, int] = field(default_factory=dict)
    rows_per_second: float | None = None
    bytes_per_second: float | None = None
    batch_seconds: float | None = None
    last_error: str | None = None
    timestamp: int = 0
    """When it was told, in milliseconds since 1970."""

    @property
    def behind(self) -> int:
        return sum(self.lag.values())

    @classmethod
    def decode(cls, body: bytes) -> PipelineStatus | None:
        """The status in the body of a message; None for a message that is none."""
        try:
            return msgspec.json.decode(body, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None


def key_of(name: str) -> str:
    """The key of the messages of a pipeline: keys hold no blanks."""
    return "_".join(name.split()) or "_"


class PipelineReporter:
    """Sends the status of pipelines, from any thread. A status that cannot be sent is logged and given up."""

    def __init__(self, namesrv: str | ClientConfig | None = None, clock: Clock | None = None) -> None:
        self._namesrv = namesrv
        self._clock = clock or SystemClock()
        self._producer: Producer | None = None
        self._lock = threading.Lock()
        self._told: dict[str, float] = {}
        self._held: dict[str, PipelineStatus] = {}
        """The status of each pipeline that came too early, and that `close` sends if none follows."""

    def __repr__(self) -> str:
        return f"<PipelineReporter of {', '.join(sorted(self._told)) or 'nothing yet'}>"

    def tell(self, status: PipelineStatus) -> bool:
        """Send a status; not at once if one of this pipeline was sent a moment ago, unless it has an error."""
        with self._lock:
            now = self._clock.monotonic()
            is_early = now - self._told.get(status.name, float("-inf")) < SECONDS_BETWEEN
            if is_early and status.last_error is None:
                self._held[status.name] = status
                return False
            self._told[status.name] = now
            self._held.pop(status.name, None)
            return self._try(status)

    def tell_error(self, status: PipelineStatus, error: BaseException) -> None:
        """Send the last status of a pipeline that an error ended."""
        text = str(error).strip() or type(error).__name__
        self.tell(replace(status, last_error=text.splitlines()[0][:_MOST_ERROR_LETTERS]))

    def close(self) -> None:
        """Send each last status that came too early, and close the connection."""
        with self._lock:
            for status in self._held.values():
                self._try(status)
            self._held = {}
            if self._producer is not None:
                self._producer.close()
                self._producer = None

    def _try(self, status: PipelineStatus) -> bool:
        try:
            self._send(status)
        except MQError as error:
            log.warning("pipeline status not sent pipeline=%s reason=%s", status.name, error)
            return False
        return True

    def _send(self, status: PipelineStatus) -> None:
        if self._producer is None:
            from downrange.client.producer.blocking.producer import Producer  # who only reads statuses does without it

            producer = Producer(PIPELINE_GROUP, self._namesrv, ProducerConfig(retry_times_when_send_failed=0))
            producer.start()
            self._producer = producer
        stamped = replace(status, timestamp=self._clock.now())
        self._producer.send(Message(PIPELINES_TOPIC, msgspec.json.encode(stamped), keys=key_of(status.name)))
