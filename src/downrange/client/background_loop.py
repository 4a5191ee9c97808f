"""The event loop that blocking clients run on: one thread for the whole process, as long as there are such clients."""

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
    """Work under way that can be stopped."""

    def cancel(self) -> object: ...


class WaitingThread(Generic[T]):
    """A thread that waits for one answer, a result or an error. A lock is the cheapest thing to wait on.

    Holds always: the answer is set at most once, and the thread is woken at most once.
    """

    __slots__ = ("_woken", "error", "is_answered", "is_woken", "result")

    def __init__(self) -> None:
        self.is_answered = False
        self.is_woken = False
        self.result: T
        self.error: BaseException | None = None
        self._woken = threading.Lock()
        self._woken.acquire()

    def wait(self, seconds: float = threading.TIMEOUT_MAX) -> None:
        """On the thread that waits."""
        self._woken.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))

    def wake(self) -> None:
        self.is_woken = True
        self._woken.release()

    def answer(self) -> T:
        """The result that was set; raises the error that was set."""
        if self.error is not None:
            raise self.error
        return self.result

    # --- the Waiter of transport/outstanding.py -------------------------------------------------------------------

    def done(self) -> bool:
        return self.is_answered

    def set_result(self, result: T, /) -> None:
        self.result = result
        self.is_answered = True
        self.wake()

    def set_exception(self, error: BaseException, /) -> None:
        self.error = error
        self.is_answered = True
        self.wake()


class BackgroundLoop:
    """A thread that runs an event loop. Made and ended by `hold` and `let_go` only.

    Holds always: a function that `call_soon` took is run, also while the loop is being stopped, so that no thread waits
    for ever.
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
            return self.call(lambda waiting: self._loop.create_task(_tell(waiting, coroutine)))
        except ClientClosed:
            coroutine.close()  # the coroutine never began, or has ended
            raise

    def call(self, begin: Callable[[WaitingThread[T]], Cancellable]) -> T:
        """Run `begin` on the loop and wait until the work that it began sets a result or an error.

        Any thread but the loop's own may call. `begin` returns the work, to be cancelled if the thread is interrupted.
        """
        self.refuse_its_own_thread()
        waiting: WaitingThread[T] = WaitingThread()
        work: list[Cancellable] = []

        def start() -> None:
            try:
                work.append(begin(waiting))
            except BaseException as error:
                waiting.set_exception(error)

        def cancel() -> None:
            for each in work:
                each.cancel()

        self.call_soon(start)
        try:
            waiting.wait()
        except BaseException:  # Ctrl-C must not leave the work running behind our back
            self.call_soon(cancel)
            raise
        if isinstance(waiting.error, asyncio.CancelledError):
            raise ClientClosed("the call was given up: its client was closed")
        return waiting.answer()

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
        # Calls that came through the gate in time find their client closed, and raise that.
        self._loop.run_until_complete(_finish_the_rest())
        self._loop.close()


async def _tell(waiting: WaitingThread[T], coroutine: Coroutine[Any, Any, T]) -> None:
    # The waiting thread goes on from here: a callback of the task would cost it another turn of the loop.
    try:
        result = await coroutine
    except BaseException as error:
        waiting.set_exception(error)
    else:
        waiting.set_result(result)


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
    """Open a client on the loop of this process, which is started if need be and let go if opening fails."""
    background = hold()
    try:
        return background, background.run(opening)
    except BaseException:
        let_go(background)
        raise


def close_client(background: BackgroundLoop, closing: Coroutine[Any, Any, object]) -> None:
    """Close a client that `open_client` opened, once. The loop ends with the last client, also when closing fails."""
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
    """Stop the loop and its thread after the last `hold` was answered."""
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
