"""The event loop that blocking clients run on: one thread for the whole process, there while anybody needs it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, Generic, Protocol, TypeVar

from downrange.client.errors import ClientClosed
from downrange.transport.loop import loop_factory

T = TypeVar("T")


class Cancellable(Protocol):
    """Work under way, as far as a call needs it."""

    def cancel(self) -> object: ...


class Call(Generic[T]):
    """Something begun on the loop for a thread that waits. A lock is the cheapest thing to wait on.

    Holds always: the thread goes on after the first of `set_result` and `set_exception`; each call gets exactly one.
    """

    __slots__ = ("_begin", "_done", "_error", "_result", "_work")

    def __init__(self, begin: Callable[[Call[T]], Cancellable]) -> None:
        self._begin = begin
        self._done = threading.Lock()
        self._done.acquire()
        self._work: Cancellable | None = None
        self._result: T
        self._error: BaseException | None = None

    def begin(self) -> None:
        """On the loop's thread."""
        try:
            self._work = self._begin(self)
        except BaseException as error:
            self.set_exception(error)

    def set_result(self, result: T, /) -> None:
        """On the loop's thread."""
        self._result = result
        self._done.release()

    def set_exception(self, error: BaseException, /) -> None:
        """On the loop's thread."""
        self._error = error
        self._done.release()

    def cancel(self) -> None:
        """On the loop's thread."""
        if self._work is not None:
            self._work.cancel()

    def wait(self, background: BackgroundLoop) -> T:
        try:
            self._done.acquire()
        except BaseException:  # Ctrl-C must not leave the work running behind our back
            background.call_soon(self.cancel)
            raise
        if self._error is None:
            return self._result
        if isinstance(self._error, asyncio.CancelledError):
            raise ClientClosed("the call was given up: its client was closed")
        raise self._error


class BackgroundLoop:
    """A thread that runs an event loop. Made and ended by `hold` and `let_go` only.

    Holds always: what `call_soon` took is run, also while the loop is being stopped, so that no thread waits for ever.
    """

    def __init__(self) -> None:
        self.users = 0
        self._loop = (loop_factory() or asyncio.new_event_loop)()
        self._gate = threading.Lock()
        self._is_open = True
        self._thread = threading.Thread(target=self._main, name="downrange", daemon=True)
        self._thread.start()

    def call_soon(self, function: Callable[[], None]) -> None:
        """Run `function` on the loop's thread. Any thread may call."""
        with self._gate:
            if not self._is_open:
                raise ClientClosed("the client was closed by another thread")
            self._loop.call_soon_threadsafe(function)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the loop and wait for its result. Any thread but the loop's own may call."""
        try:
            return self.call(lambda call: self._loop.create_task(_tell(call, coroutine)))
        except ClientClosed:
            coroutine.close()  # it never began, or has ended
            raise

    def call(self, begin: Callable[[Call[T]], Cancellable]) -> T:
        """Run `begin` on the loop and wait until it, or what it began, has told the call a result.

        Any thread but the loop's own may call. `begin` returns what to cancel should the thread be interrupted.
        """
        self.refuse_its_own_thread()
        call = Call(begin)
        self.call_soon(call.begin)
        return call.wait(self)

    def refuse_its_own_thread(self) -> None:
        """Raise ClientClosed when called on the loop's thread."""
        if threading.get_ident() == self._thread.ident:
            raise ClientClosed(
                "a blocking call inside a callback or hook would wait for itself: use send_async or another thread"
            )

    def stop(self) -> None:
        self.call_soon(self._loop.stop)
        if threading.get_ident() != self._thread.ident:
            self._thread.join()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        with self._gate:
            self._is_open = False
        # Whoever came through the gate in time finds its client closed, and is told so.
        self._loop.run_until_complete(_finish_the_rest())
        self._loop.close()


async def _tell(call: Call[T], coroutine: Coroutine[Any, Any, T]) -> None:
    # The waiting thread goes on from here: a callback of the task would cost it another turn of the loop.
    try:
        result = await coroutine
    except BaseException as error:
        call.set_exception(error)
    else:
        call.set_result(result)


async def _finish_the_rest() -> None:
    await asyncio.sleep(0)
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


_lock = threading.Lock()
_current: BackgroundLoop | None = None
# Loops of the parent process. They must never be closed here: their epoll descriptor is shared with the parent, and
# closing a loop takes its sockets out of it.
_inherited: Final[list[BackgroundLoop]] = []


def open_client(opening: Coroutine[Any, Any, T]) -> tuple[BackgroundLoop, T]:
    """Open a client on the loop of this process, which is started if need be. One that fails to open holds nothing."""
    background = hold()
    try:
        return background, background.run(opening)
    except BaseException:
        let_go(background)
        raise


def close_client(background: BackgroundLoop, closing: Coroutine[Any, Any, object]) -> None:
    """Close a client that `open_client` opened. Once for each; the loop ends with the last, also when closing fails."""
    try:
        background.run(closing)
    finally:
        let_go(background)


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
