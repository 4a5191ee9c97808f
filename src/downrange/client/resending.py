"""How dead letters are sent again safely: at a rate, with pauses, and with a journal that survives a crash.

The journal notes each letter before it is sent and its outcome afterwards. A letter that was noted and has no outcome
may or may not have been sent when the process died: `DeadLetters.resend` looks for it by its mark before it goes on.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from downrange.client.errors import ClientError
from downrange.clock import Clock
from downrange.model.message import MessageQueue

MARK = "DLQ_RESEND_ID"
"""The property that a letter gets when it is sent again with a journal."""


class JournalDamaged(ClientError):
    """The file is no journal of dead letters that were sent again."""


class Pace:
    """At most `per_second` letters a second, and none during a pause. Both may change while letters are being sent."""

    def __init__(self, clock: Clock, per_second: float | None = None) -> None:
        self.per_second = per_second
        self._clock = clock
        self._next = clock.monotonic()
        self._going = asyncio.Event()
        self._going.set()

    def __repr__(self) -> str:
        return f"<Pace {self.per_second or 'any'}/s{' paused' if self.is_paused else ''}>"

    @property
    def is_paused(self) -> bool:
        return not self._going.is_set()

    def pause(self) -> None:
        self._going.clear()

    def go_on(self) -> None:
        self._going.set()

    async def wait(self) -> None:
        """Return when the next letter may be sent."""
        while True:
            await self._going.wait()
            if self.per_second is None:
                return
            now = self._clock.monotonic()
            if self._next <= now:
                break
            await self._clock.sleep(self._next - now)
        interval = 1 / self.per_second
        self._next = max(self._next, now - interval) + interval  # a letter that was late may be made up for, no more


@dataclass(frozen=True, slots=True)
class Noted:
    """What a journal knows of one letter: its mark, when and to which topic it goes, and the outcome if it has one."""

    mark: str
    topic: str
    timestamp: int
    sent_as: str | None = None
    error: str | None = None

    @property
    def is_concluded(self) -> bool:
        return self.sent_as is not None or self.error is not None


Place = tuple[MessageQueue, int]
"""The queue and the offset of a letter in its dead-letter topic."""


class Journal(Protocol):
    """Where the letters of one job are noted."""

    def get(self, place: Place) -> Noted | None: ...

    def intend(self, place: Place, topic: str, timestamp: int) -> Noted:
        """Note, before it is sent, that a letter will be sent; its mark is new."""
        ...

    def conclude(self, place: Place, sent_as: str | None, error: str | None) -> None: ...


class JournalFile:
    """A journal as JSON lines, which is read again when the job goes on. A line that a crash cut off is dropped.

    With `retry_failed`, letters that failed before have no outcome: they are looked for, and sent if they are nowhere.
    """

    def __init__(self, path: Path, *, retry_failed: bool = False) -> None:
        self.noted: dict[Place, Noted] = {}
        whole = self._read(path)
        if retry_failed:
            self.noted = {place: replace(noted, error=None) for place, noted in self.noted.items()}
        self._file = path.open("a+b")
        self._file.truncate(whole)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def get(self, place: Place) -> Noted | None:
        return self.noted.get(place)

    def intend(self, place: Place, topic: str, timestamp: int) -> Noted:
        noted = Noted(secrets.token_hex(8), topic, timestamp)
        self._write(place, noted)
        return noted

    def conclude(self, place: Place, sent_as: str | None, error: str | None) -> None:
        before = self.noted[place]
        self._write(place, Noted(before.mark, before.topic, before.timestamp, sent_as, error))

    def _write(self, place: Place, noted: Noted) -> None:
        queue, offset = place
        row = [*queue, offset, noted.mark, noted.topic, noted.timestamp, noted.sent_as, noted.error]
        self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self.noted[place] = noted

    def _read(self, path: Path) -> int:
        """Read the lines there are; where the last whole one ends."""
        if not path.exists():
            return 0
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                topic, broker, queue_id, offset, *rest = json.loads(line)
                self.noted[MessageQueue(topic, broker, int(queue_id)), int(offset)] = Noted(*rest)
            except (ValueError, TypeError):
                raise JournalDamaged(f"{path}, line {number}: no journal of `downrange dlq resend`") from None
        return whole
