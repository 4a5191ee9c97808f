"""Bulk pulls, over sockets: what a reader that says `bulk` gets, and what it cannot get by it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from downrange.model.record import decode_records
from downrange.protocol.bodies.pull import PullMessageResponse
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command, request
from downrange.protocol.framing import FrameDecoder, encode
from tests.support.broker_client import BrokerClient, client_of, standalone

KEY = "maxTransferBytesOnBulkPull"


def bulk(client: BrokerClient, topic: str = "orders", **options: object) -> Command:
    plain = client.pull_command(topic, **options)  # type: ignore[arg-type]
    return msgspec.structs.replace(plain, raw_ext={**plain.ext_fields, "bulk": "true"})


async def send_many(client: BrokerClient, count: int, size: int = 20) -> None:
    for first in range(0, count, 100):
        numbers = range(first, min(first + 100, count))
        await asyncio.gather(
            *(client.send("orders", b"%d " % n + bytes(size), properties={"TAGS": "ab"[n % 2]}) for n in numbers)
        )


def offsets(reply: Command) -> list[int]:
    return [message.queue_offset for message in decode_records(reply.body_bytes)]


async def test_many_messages_and_the_same_numbers(tmp_path: Path) -> None:
    async with standalone(tmp_path) as running, client_of(running) as client:
        await send_many(client, 600)
        reply = await client.ask(bulk(client, offset=10, most=500))
        assert offsets(reply) == list(range(10, 510))
        plain, header = await client.pull("orders", offset=10, most=500)
        assert len(plain) == 32
        numbers = reply.header(PullMessageResponse)
        assert numbers == msgspec.structs.replace(header, next_begin_offset=510)
        tagged = await client.ask(bulk(client, most=500, tags="a"))
        assert offsets(tagged) == list(range(0, 600, 2))
        await client.ask(bulk(client, offset=900, most=500), int(ResponseCode.PULL_OFFSET_MOVED))


async def test_a_bulk_pull_waits_for_messages_like_any_other(tmp_path: Path) -> None:
    async with standalone(tmp_path) as running, client_of(running) as client:
        await client.send("orders", b"first")
        waiting = asyncio.create_task(client.ask(bulk(client, offset=1, most=500, wait_millis=20_000), timeout=30))
        await client.ask(request(RequestCode.GET_BROKER_CONFIG))  # the pull has been taken by now
        assert not waiting.done()
        await client.send("orders", b"second")
        assert offsets(await waiting) == [1]


@pytest.mark.parametrize("limit", [0, 5000])
async def test_the_limit_is_shown_and_kept(tmp_path: Path, limit: int) -> None:
    options = {"max_transfer_bytes_on_bulk_pull": limit}
    async with standalone(tmp_path, broker_options=options) as running, client_of(running) as client:
        await send_many(client, 100)
        config = await client.ask(request(RequestCode.GET_BROKER_CONFIG))
        assert f"{KEY}={limit}" in config.body_bytes.decode().splitlines()
        reply = await client.ask(bulk(client, most=100))
        if limit:
            assert 4500 < len(reply.body_bytes) <= limit
        else:
            assert len(offsets(reply)) == 32
        await client.call(RequestCode.UPDATE_BROKER_CONFIG, body=f"{KEY}=1000000\n".encode())
        assert len(offsets(await client.ask(bulk(client, most=100)))) == 100


async def test_a_reader_that_does_not_read_is_answered_bit_by_bit(tmp_path: Path) -> None:
    """Many bulk pulls at once: the broker holds a few answers, not all of them, and in the end gives all."""
    async with standalone(tmp_path) as running, client_of(running) as client:
        await send_many(client, 300, size=5000)
        pulls = b"".join(encode(bulk(client, most=300), opaque) for opaque in range(1, 101))
        reader, writer = await asyncio.open_connection("127.0.0.1", running.config.broker.listen_port)
        writer.write(pulls)
        async with asyncio.timeout(30):
            while not running.server.usage.unsent_bytes:
                await asyncio.sleep(0.01)
        await client.ask(request(RequestCode.GET_BROKER_CONFIG))  # others are served meanwhile
        assert running.server.usage.unsent_bytes < 5_000_000  # of 100 answers of 1.5 MB
        decoder = FrameDecoder()
        replies: list[Command] = []
        async with asyncio.timeout(30):
            while len(replies) < 100:
                replies += decoder.feed(await reader.read(1 << 20))
        assert [reply.opaque for reply in replies] == list(range(1, 101))
        assert all(len(reply.body_bytes) > 1_500_000 for reply in replies)
        writer.close()
        await writer.wait_closed()
