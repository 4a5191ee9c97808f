"""A broker that owes answers: its routes are looked up, and it is left when they name another master."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from downrange.client.silent_brokers import SILENT_SECONDS, SilentBrokers, is_silent
from downrange.clock import ManualClock
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from downrange.transport.connection import Connection
from downrange.transport.errors import ConnectionLost
from downrange.transport.pool import Pool
from downrange.transport.server import Server
from downrange.transport.serving import LaterReply, serve_commands


def never(command: Command, connection: Connection) -> LaterReply:
    return asyncio.get_running_loop().create_future()


@pytest.fixture
async def hung() -> AsyncIterator[str]:
    """The address of a server that answers nothing."""
    server = Server(serve_commands(never))
    await server.start()
    yield f"127.0.0.1:{server.port}"
    await server.stop()


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    made = Pool()
    yield made
    await made.close(0)


async def test_a_pull_that_waits_is_no_silence_and_a_send_is(hung: str, pool: Pool) -> None:
    connection, now = await pool.get(hung), asyncio.get_running_loop().time()
    pull = connection.request_nowait(request(RequestCode.PULL_MESSAGE), 60)
    assert not is_silent(connection, now + 30)
    send = connection.request_nowait(request(RequestCode.SEND_MESSAGE_V2), 60)
    assert not is_silent(connection, now + SILENT_SECONDS / 2)
    assert is_silent(connection, now + SILENT_SECONDS + 1)
    pull.cancel()
    send.cancel()


async def test_a_silent_master_is_left_when_another_broker_has_its_place(
    hung: str, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("downrange.client.silent_brokers.SILENT_SECONDS", -1.0)

    def links(address: str) -> list[Connection]:
        found = pool.connected(address)
        return [] if found is None else [found]

    masters, asked = {hung}, list[str]()
    silent = SilentBrokers(ManualClock(), links, lambda: frozenset(masters), asked.append)
    silent.watch(masters)
    connection = await pool.get(hung)
    silent.look()
    assert asked == [], "nothing is owed"
    send = connection.request_nowait(request(RequestCode.SEND_MESSAGE_V2), 60)
    silent.look()
    assert asked == [hung]
    assert not send.done()
    masters.clear()
    silent.look()
    with pytest.raises(ConnectionLost):
        await send
