"""The workers that call the callback: threads for plain functions, tasks for async ones."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from downrange.client.consumer.listener import Listener
from downrange.client.consumer.messages import ReceivedMessage

# An async callback that never waits must not keep the event loop to itself for longer than this.
_TURN_SECONDS: Final = 0.005


class NotConsumed(Exception):
    """Raised by callbacks of our own to give a message back: the user has not seen it, or not finished it."""


class Source(Protocol):
    """Where messages come from. Nothing of a source is begun after it was dropped."""

    is_dropped: bool


Q = TypeVar("Q", bound=Source)


class Batch(Generic[Q]):
    """Messages for one call of the callback, and what came of it. A worker writes, the event loop reads afterwards."""

    __slots__ = ("answer", "ended", "error", "is_given_up", "messages", "queue", "started", "was_skipped")

    def __init__(self, queue: Q, messages: Sequence[ReceivedMessage]) -> None:
        self.queue = queue
        self.messages = messages
        self.started = 0.0
        self.ended = 0.0
        self.answer: object = None
        self.error: BaseException | None = None
        self.was_skipped = False
        """It was never begun, because the queue was given up or the consumer is stopping."""
        self.is_given_up = False
        """It took too long: its messages went elsewhere, and its result does not count."""


Report = Callable[[Sequence[Batch[Any]]], None]
Now = Callable[[], float]


class Workers(Protocol):
    """Calls the callback for batches, several at the same time. Every batch is reported once, on the event loop."""

    def submit(self, batches: Iterable[Batch[Any]]) -> None: ...

    def stop(self) -> None:
        """Begin no further batch; waiting batches are reported as skipped."""
        ...

    def end(self) -> None:
        """Let go of threads and tasks. A plain function that still runs cannot be stopped; its thread ends with it."""
        ...


class ThreadWorkers:
    """Up to `count` threads, started when first needed."""

    def __init__(self, listener: Listener, count: int, report: Report, now: Now) -> None:
        self._listener = listener
        self._count = count
        self._report = report
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._todo: queue.SimpleQueue[Batch[Any] | None] = queue.SimpleQueue()
        self._done: deque[Batch[Any]] = deque()
        self._is_told = False
        self._is_stopping = False
        self._is_ended = False
        self._threads: list[threading.Thread] = []
        self._open = 0  # batches submitted and not reported yet

    def submit(self, batches: Iterable[Batch[Any]]) -> None:
        for batch in batches:
            self._open += 1
            self._todo.put(batch)
        while len(self._threads) < min(self._count, self._open):
            thread = threading.Thread(target=self._work, name=f"downrange consume {len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        """In a worker thread."""
        call, get, done = self._listener.call, self._todo.get, self._done
        clock = self._now
        while (batch := get()) is not None:
            if self._is_stopping or batch.queue.is_dropped:
                batch.was_skipped = True
            else:
                batch.started = clock()
                try:
                    batch.answer = call(batch.messages)
                except BaseException as error:
                    batch.error = error
                batch.ended = clock()
            done.append(batch)
            if not self._is_told:
                self._is_told = True
                with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits for this any more
                    self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        self._is_told = False
        finished = []
        while self._done:
            finished.append(self._done.popleft())
        self._open -= len(finished)
        if not self._is_ended:
            self._report(finished)

    def stop(self) -> None:
        self._is_stopping = True

    def end(self) -> None:
        self._is_stopping = True
        self._is_ended = True
        for _ in self._threads:
            self._todo.put(None)


class TaskWorkers:
    """Up to `count` tasks on the event loop. One more is started only while batches wait."""

    def __init__(self, listener: Listener, count: int, report: Report, now: Now) -> None:
        self._listener = listener
        self._count = count
        self._report = report
        self._now = now
        self._todo: deque[Batch[Any]] = deque()
        self._done: list[Batch[Any]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = False

    def submit(self, batches: Iterable[Batch[Any]]) -> None:
        self._todo.extend(batches)
        self._start_one()

    def _start_one(self) -> None:
        if self._todo and len(self._tasks) < self._count:
            task = asyncio.create_task(self._work(), name="downrange consume")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _work(self) -> None:
        clock = self._now
        turn_ends = clock() + _TURN_SECONDS
        while self._todo:
            batch = self._todo.popleft()
            self._start_one()  # a callback that waits must not keep other callbacks waiting
            if self._is_stopping or batch.queue.is_dropped:
                batch.was_skipped = True
            else:
                batch.started = clock()
                try:
                    batch.answer = await self._listener.call(batch.messages)
                except asyncio.CancelledError:
                    batch.was_skipped = True
                    self._tell(batch)
                    raise
                except NotConsumed:
                    batch.was_skipped = True
                except Exception as error:
                    batch.error = error
                batch.ended = clock()
            self._tell(batch)
            if clock() > turn_ends:
                await asyncio.sleep(0)
                turn_ends = clock() + _TURN_SECONDS

    def _tell(self, batch: Batch[Any]) -> None:
        if not self._done:
            asyncio.get_running_loop().call_soon(self._tell_all)
        self._done.append(batch)

    def _tell_all(self) -> None:
        done, self._done = self._done, []
        self._report(done)

    def stop(self) -> None:
        self._is_stopping = True
        self._start_one()

    def end(self) -> None:
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()


def workers(listener: Listener, count: int, report: Report, now: Now) -> Workers:
    kind = TaskWorkers if listener.is_async else ThreadWorkers
    return kind(listener, count, report, now)
