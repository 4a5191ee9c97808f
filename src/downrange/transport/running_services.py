"""Coroutines that run beside a block of code and end with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def running_services(**services: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run services beside the block; stop them when it ends. A service that fails ends the block with its error.

    Unlike a task group this does not wrap the errors of the block, so that a caller can catch them by name.
    """
    owner = asyncio.current_task()
    assert owner is not None
    failure: BaseException | None = None

    def ended(task: asyncio.Task[None]) -> None:
        nonlocal failure
        if not task.cancelled() and failure is None:
            failure = task.exception() or RuntimeError(f"the service {task.get_name()} ended")
            owner.cancel()

    tasks = [asyncio.create_task(service, name=name) for name, service in services.items()]
    for task in tasks:
        task.add_done_callback(ended)
    try:
        yield
    except asyncio.CancelledError:
        if failure is None:
            raise
        owner.uncancel()
        raise failure from None
    finally:
        for task in tasks:
            task.remove_done_callback(ended)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
