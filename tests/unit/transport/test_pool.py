"""Requests over connections of a pool that end as they begin."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request
from downrange.transport import pool as pools
from downrange.transport.connection import Connection
from downrange.transport.errors import ConnectFailed, ConnectionLost, TransportClosed
from downrange.transport.pool import Pool

SMALL = request(RequestCode.GET_MAX_OFFSET)


async def test_a_connection_that_is_closed_when_it_is_there_was_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(*_: object, **__: object) -> Connection:
        return Connection()  # its peer was gone before anything could be sent

    monkeypatch.setattr(pools, "connect", connect)
    pool = Pool()
    with pytest.raises(ConnectFailed, match="is closed; the request was not sent"):
        await pool.request("127.0.0.1:1", SMALL, 5)


async def test_a_server_that_dies_while_it_accepts_is_never_taken_for_a_closed_client() -> None:
    def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Closed with a reset, as by the end of a process.
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    server = await asyncio.start_server(reset, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    pool = Pool()
    for _ in range(50):
        with pytest.raises((ConnectFailed, ConnectionLost)):
            await pool.request(address, SMALL, 5)
        pool.forgive(address)
    await pool.close(0)
    with pytest.raises(TransportClosed):
        await pool.request(address, SMALL, 5)
    server.close()
