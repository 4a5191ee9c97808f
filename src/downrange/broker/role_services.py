"""Coroutines that run while a broker has a certain role, and stop when the broker loses that role."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class RoleServices:
    """Services of one role. `run` must run for as long as the broker does: a service that fails ends it."""

    def __init__(self, **services: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._services = services
        self._tasks: list[asyncio.Task[None]] = []
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        return f"<RoleServices {', '.join(self._services)} {'running' if self._tasks else 'stopped'}>"

    @property
    def are_running(self) -> bool:
        return bool(self._tasks)

    def start(self) -> None:
        """Start every service anew, unless they run."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(service(), name=name) for name, service in self._services.items()]
            for task in self._tasks:
                task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """Stop the services; none of them runs when this returns."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.remove_done_callback(self._ended)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def run(self) -> None:
        try:
            await asyncio.shield(self._failed)
        finally:
            await self.stop()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and not self._failed.done():
            error = task.exception() or RuntimeError(f"the service {task.get_name()} ended")
            self._failed.set_exception(error)
