"""A lone caller is polled for; a broker that nobody calls, or that many call, sleeps."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from downrange.transport.busy_poll import ALIKE, FIRST_REST_SECONDS, BusyPoll
from downrange.transport.connection import Connection
from downrange.transport.pool import connect
from downrange.transport.server import Server
from downrange.transport.serving import serve_commands
from tests.support.standalone_process import standalone_process


def echo(command: Command, connection: Connection) -> Command:
    return command.reply()


async def test_the_loop_turns_for_a_lone_caller_until_its_time_is_over() -> None:
    now = 0.0
    poll = BusyPoll(asyncio.get_running_loop(), 1.0, lambda: now)

    def is_polling() -> bool:
        return poll.is_polling

    server = Server(serve_commands(echo))
    server.busy_poll = poll
    async with server:
        caller, other = await connect(f"127.0.0.1:{server.port}"), await connect(f"127.0.0.1:{server.port}")
        for _ in range(ALIKE):
            await caller.request(request(1), 10)
            assert not is_polling()
        await caller.request(request(1), 10)
        assert is_polling()
        now += 2
        while is_polling():
            await asyncio.sleep(0)
        now += FIRST_REST_SECONDS
        await caller.request(request(1), 10)
        assert is_polling()
        await other.request(request(1), 10)
        while is_polling():  # though its time is not over
            await asyncio.sleep(0)
        for connection in (caller, other) * 20:
            await connection.request(request(1), 10)
            assert not is_polling()
        caller.close()
        other.close()


def test_a_broker_that_nobody_calls_any_more_takes_no_processor(tmp_path: Path) -> None:
    def cpu_seconds(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def call(address: str) -> None:
        connection = await connect(address)
        for _ in range(500):
            await connection.request(request(RequestCode.GET_BROKER_CONFIG), 10)
        connection.close()
        await connection.wait_closed()

    with standalone_process(tmp_path, {"busyPollMicros": 1000}) as broker:
        asyncio.run(call(broker.broker))
        before, start = cpu_seconds(broker.process.pid), time.monotonic()
        time.sleep(1)  # what an idle second costs takes a second to see; the rest of the machine does not count
        assert cpu_seconds(broker.process.pid) - before < 0.25 * (time.monotonic() - start)
