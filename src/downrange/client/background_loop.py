"""The event loop that blocking clients run on: one thread for the whole process, there while anybody needs it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, Final, Generic, TypeVar

from downrange.client.errors import ClientClosed
from downrange.transport.loop import loop_factory

T = TypeVar("T")


class _Call(Generic[T]):
    """One coroutine run for a thread that waits. A lock is the cheapest thing to wait on."""

    __slots__ = ("_done", "_task")

    def __init__(self) -> None:
        self._done = threading.Lock()
        self._done.acquire()
        self._task: asyncio.Task[T] | None = None

    def start(self, coroutine: Coroutine[Any, Any, T]) -> None:
        """On the loop's thread."""
        self._task = asyncio.get_running_loop().create_task(coroutine)
        self._task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[T]) -> None:
        self._done.release()

    def cancel(self) -> None:
        """On the loop's thread."""
        if self._task is not None:
            self._task.cancel()

    def wait(self, loop: asyncio.AbstractEventLoop) -> T:
        try:
            self._done.acquire()
        except BaseException:  # Ctrl-C must not leave the work running behind our back
            loop.call_soon_threadsafe(self.cancel)
            raise
        assert self._task is not None
        if self._task.cancelled():
            raise ClientClosed("the call was given up: its client was closed")
        return self._task.result()


class BackgroundLoop:
    """A thread that runs an event loop. Made and ended by `hold` and `let_go` only."""

    def __init__(self) -> None:
        self.users = 0
        self._loop = (loop_factory() or asyncio.new_event_loop)()
        self._thread = threading.Thread(target=self._main, name="downrange", daemon=True)
        self._thread.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the loop and wait for its result. Any thread but the loop's own may call."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise ClientClosed(
                "a blocking call inside a callback or hook would wait for itself: use send_async or another thread"
            )
        call: _Call[T] = _Call()
        self._loop.call_soon_threadsafe(call.start, coroutine)
        return call.wait(self._loop)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


_lock = threading.Lock()
_current: BackgroundLoop | None = None
# Loops of the parent process. They must never be closed here: their epoll descriptor is shared with the parent, and
# closing a loop takes its sockets out of it.
_inherited: Final[list[BackgroundLoop]] = []


def hold() -> BackgroundLoop:
    """The loop of this process, started if need be. Each `hold` is answered by one `let_go`."""
    global _current
    with _lock:
        if _current is None:
            _current = BackgroundLoop()
        _current.users += 1
        return _current


def let_go(background: BackgroundLoop) -> None:
    """Stop the loop and its thread when nobody needs them any more."""
    global _current
    with _lock:
        background.users -= 1
        is_last = background.users == 0 and background is _current
        if is_last:
            _current = None
    if is_last:
        background.stop()


def _after_fork_in_child() -> None:
    global _lock, _current
    _lock = threading.Lock()  # the parent may have held it
    if _current is not None:
        _inherited.append(_current)
        _current = None


os.register_at_fork(after_in_child=_after_fork_in_child)
