"""Streams of events to browsers: few, since a browser has six connections to a host; they end with the console."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final

from starlette.responses import StreamingResponse

MOST_OF_ONE: Final = 4
HEARTBEAT_SECONDS: Final = 15.0


class Streams:
    """Open streams by person and address. `close` ends them all: an open one would hold up the end of the process."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._tasks: set[asyncio.Future[None]] = set()
        self.is_closing = asyncio.Event()

    def count(self, owner: str) -> int:
        return self._open.get(owner, 0)

    def is_full(self, owner: str) -> bool:
        return self.count(owner) >= MOST_OF_ONE

    def response(self, owner: str, events: AsyncGenerator[str, None]) -> StreamingResponse:
        """A stream of events that counts as open from its first byte until its reader or the console goes."""
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self._counted(owner, events), headers=headers, media_type="text/event-stream")

    async def _counted(self, owner: str, events: AsyncGenerator[str, None]) -> AsyncIterator[bytes]:
        self._open[owner] = self.count(owner) + 1
        closing = asyncio.ensure_future(self.is_closing.wait())
        upcoming: asyncio.Future[str] | None = None
        try:
            yield b": open\n\n"
            while not self.is_closing.is_set():
                upcoming = upcoming or asyncio.ensure_future(anext(events))
                await asyncio.wait((upcoming, closing), timeout=HEARTBEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if upcoming.done():
                    yield upcoming.result().encode()
                    upcoming = None
                else:
                    yield b": still here\n\n"
        except StopAsyncIteration:
            return
        finally:
            closing.cancel()
            self._open[owner] -= 1
            if not self._open[owner]:
                del self._open[owner]
            # When the reader has gone, whatever is awaited here is cancelled: so another task ends the events.
            ending = asyncio.ensure_future(_end(events, upcoming))
            self._tasks.add(ending)
            ending.add_done_callback(self._tasks.discard)

    def begin_to_close(self) -> None:
        """End all streams, each after the event that is under way."""
        self.is_closing.set()

    async def close(self) -> None:
        """Wait until what fed the streams has ended."""
        if self._tasks:
            await asyncio.wait(self._tasks)


async def _end(events: AsyncGenerator[str, None], upcoming: asyncio.Future[str] | None) -> None:
    if upcoming is not None:
        upcoming.cancel()
        await asyncio.wait((upcoming,))
    await events.aclose()


def event(name: str, data: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"
