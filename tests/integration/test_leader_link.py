"""The connection to the controller that leads, against real listeners."""

from __future__ import annotations

import asyncio

import pytest

from downrange.controller.leader_link import LeaderLink
from tests.support.lasting_port import lasting_port


async def listener(port: int, accepted: list[asyncio.StreamWriter]) -> asyncio.Server:
    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)

    return await asyncio.start_server(accept, "127.0.0.1", port)


async def test_a_process_is_gone_when_nobody_listens_and_not_when_a_connection_breaks() -> None:
    port, accepted = lasting_port(), list[asyncio.StreamWriter]()
    server = await listener(port, accepted)
    link = LeaderLink()
    gone = asyncio.create_task(link.gone(f"127.0.0.1:{port}"))
    try:
        async with asyncio.timeout(30):
            while len(accepted) < 3:  # each time the connection breaks it is made again
                await asyncio.sleep(0.01)
                for writer in accepted:
                    writer.transport.abort()
            assert not gone.done()
            server.close()
            for writer in accepted:
                writer.transport.abort()
            await gone
    finally:
        gone.cancel()
        link.close()


async def test_a_caller_that_gives_up_leaves_the_connection() -> None:
    port, accepted = lasting_port(), list[asyncio.StreamWriter]()
    server = await listener(port, accepted)
    link = LeaderLink()
    try:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await link.gone(f"127.0.0.1:{port}")
        assert len(accepted) == 1
    finally:
        link.close()
        server.close()
        for writer in accepted:
            writer.transport.abort()
