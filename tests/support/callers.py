"""Callers of a server that are plain blocking sockets: what several send at once lies in the kernel until it looks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from downrange.protocol.command import Command
from downrange.protocol.framing import decode_frame


@contextmanager
def callers(port: int, count: int) -> Iterator[list[socket.socket]]:
    opened = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(count)]
    try:
        yield opened
    finally:
        for one in opened:
            one.close()


async def until(condition: Callable[[], object], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


async def reply(caller: socket.socket) -> Command:
    caller.setblocking(False)
    loop = asyncio.get_running_loop()

    async def exactly(size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = await loop.sock_recv(caller, size - len(data))
            if not more:
                raise ConnectionResetError("the server closed the connection")
            data += more
        return data

    async with asyncio.timeout(30):
        length = await exactly(4)
        rest = await exactly(int.from_bytes(length, "big"))
    header = int.from_bytes(rest[1:4], "big")
    return decode_frame((rest[0], rest[4 : 4 + header], rest[4 + header :]))
