"""Peers whose requests are refused, over real sockets: they are slowed down and closed, and nobody else notices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from downrange.broker.app import RunningBroker, broker
from downrange.broker.config import BrokerConfig
from downrange.protocol.bodies.send import SendMessageRequest
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command, request
from downrange.protocol.framing import FrameDecoder, encode
from downrange.protocol.signing import Signer
from downrange.store.config import StoreConfig

ACCOUNTS = """
accounts:
- {accessKey: root-key, secretKey: root-secret, admin: true}
- {accessKey: shop-key, secretKey: shop-secret, topicPerms: [orders=PUB]}
"""
SHOP = Signer("shop-key", "shop-secret")
WRONG = Signer("shop-key", "another-secret")


def send(topic: str = "orders") -> Command:
    header = SendMessageRequest(producer_group="g", topic=topic, queue_id=0, born_timestamp=1)
    return request(RequestCode.SEND_MESSAGE_V2, header, body=b"body")


@asynccontextmanager
async def with_accounts(directory: Path, **settings: object) -> AsyncIterator[RunningBroker]:
    file = directory / "plain_acl.yml"
    file.write_text(ACCOUNTS)
    file.chmod(0o600)
    config = BrokerConfig(
        listen_port=0,
        namesrv_addr="",
        metrics_port=0,
        acl_enable=True,
        acl_file=file,
        **settings,  # type: ignore[arg-type]
    )
    store = StoreConfig(store_path_root_dir=directory / "store", mapped_file_size_commit_log=1 << 20)
    async with broker(config, store) as running:
        running.topics.ensure("orders", 1)
        yield running


class Peer:
    """A connection that sends frames and reads replies, until the broker closes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = FrameDecoder()
        self._opaque = 0

    @classmethod
    async def of(cls, running: RunningBroker) -> Peer:
        return cls(*await asyncio.open_connection("127.0.0.1", running.server.port))

    async def ask(self, *commands: Command) -> list[Command]:
        """All replies to requests that leave in one write; fewer if the broker closes the connection."""
        self._writer.write(b"".join(encode(command, self._opaque + at) for at, command in enumerate(commands)))
        self._opaque += len(commands)
        replies: list[Command] = []
        async with asyncio.timeout(30):
            while len(replies) < len(commands):
                try:
                    data = await self._reader.read(1 << 16)
                except ConnectionError:
                    break
                if not data:
                    break
                replies += self._decoder.feed(data)
        return replies

    async def codes(self, *commands: Command) -> list[int]:
        return [reply.code for reply in await self.ask(*commands)]

    def close(self) -> None:
        self._writer.close()


@pytest.mark.parametrize("bad", [send(), WRONG.sign(send()), SHOP.sign(send("foreign"))], ids=["none", "wrong", "poor"])
async def test_a_connection_with_twenty_refusals_in_a_row_is_closed(tmp_path: Path, bad: Command) -> None:
    async with with_accounts(tmp_path, failed_login_wait_mills=0) as running:
        peer = await Peer.of(running)
        assert await peer.codes(*[bad] * 19) == [ResponseCode.SYSTEM_ERROR] * 19
        assert await peer.codes(SHOP.sign(send())) == [0]
        assert await peer.codes(*[bad] * 30) == [ResponseCode.SYSTEM_ERROR] * 20
        other = await Peer.of(running)
        assert await other.codes(SHOP.sign(send())) == [0]
        other.close()
        peer.close()
        assert running.store.max_offset_of("orders", 0) == 2


async def test_guessing_is_slow_and_a_good_client_at_the_same_address_goes_on(tmp_path: Path) -> None:
    async with with_accounts(tmp_path, failed_login_wait_mills=300) as running:
        good = await Peer.of(running)
        assert await good.codes(*[SHOP.sign(send())] * 3) == [0, 0, 0]
        for _ in range(2):
            guesser = await Peer.of(running)
            assert await guesser.codes(*[WRONG.sign(send())] * 12) == [1] * 12
            guesser.close()
        # The address is in debt now: attempts wait, also over new connections, and in the order they were sent.
        started = time.monotonic()
        guesser = await Peer.of(running)
        guesses = asyncio.ensure_future(guesser.codes(WRONG.sign(send()), WRONG.sign(send()), SHOP.sign(send())))
        fresh = await Peer.of(running)
        assert await good.codes(*[SHOP.sign(send())] * 100) == [0] * 100
        assert await fresh.codes(*[SHOP.sign(send())] * 100) == [0] * 100
        assert not guesses.done()  # good clients wait once at most, for all of their requests together
        assert await guesses == [1, 1, 0]
        assert time.monotonic() - started >= 0.6
        for peer in (good, guesser, fresh):
            peer.close()


async def test_refusals_are_counted_and_audited(tmp_path: Path) -> None:
    file = tmp_path / "audit.log"
    async with with_accounts(tmp_path, failed_login_wait_mills=0, audit_log_file=file) as running:
        peer = await Peer.of(running)
        create = request(RequestCode.UPDATE_AND_CREATE_TOPIC, ext_fields={"topic": "new", "defaultTopic": "TBW102",
            "readQueueNums": "1", "writeQueueNums": "1", "perm": "6", "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": "0", "order": "false"})  # fmt: skip
        await peer.ask(WRONG.sign(send()), WRONG.sign(send()), send(), SHOP.sign(create))
        assert await peer.codes(Signer("root-key", "root-secret").sign(create)) == [0]
        peer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", running.metrics_port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        page = (await reader.read()).decode()
        writer.close()
    counts = {line.split('reason="')[1].split('"')[0]: float(line.split()[-1]) for line in page.splitlines()
              if line.startswith("downrange_refused_total{")}  # fmt: skip
    assert counts == {"login": 3, "permission": 1, "connection": 0}
    lines = file.read_text().splitlines()
    assert [line.split("outcome=")[1].split()[0] for line in lines] == ["refused", "refused", "passed"]
    assert "account=- resource=-" in lines[0]
    assert "account=shop-key resource=Topic:new" in lines[1]
    assert "account=root-key resource=Topic:new" in lines[2]
    assert not any(word in "".join(lines) + page for word in ("root-secret", "shop-secret", "Signature"))
