"""No request gets around the guard: every code, every port, behind allowed requests and as a reply."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from downrange.auth.access_control import Account, Need
from downrange.auth.needs import BROKER_NEEDS
from downrange.broker.app import RunningBroker, broker
from downrange.broker.config import BrokerConfig
from downrange.protocol.bodies.send import SendMessageRequest
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command, request
from downrange.protocol.errors import NoPermission
from downrange.protocol.framing import FrameDecoder, encode
from downrange.protocol.signing import ACCESS_KEY, SIGNATURE, Signer, signature
from downrange.store.config import StoreConfig


class OneAccount:
    """Access control with one account, which may only what `rights` says."""

    def __init__(self) -> None:
        self.generation = 0
        self.secret = b"secret-of-one"
        self.topics: set[str] = set()
        self.asked: list[Sequence[Need]] = []

    @property
    def secrets(self) -> Mapping[str, bytes]:
        return {"one": self.secret}

    def authenticate(self, command: Command, address: str) -> Account:
        fields = command.ext_fields
        if fields.get(ACCESS_KEY) != "one":
            raise NoPermission("no account")
        if signature(fields, command.body_bytes, self.secret) != fields.get(SIGNATURE):
            raise NoPermission("wrong signature")
        return Account("one")

    def authorize(self, account: Account, needs: Sequence[Need], command: Command, address: str) -> None:
        self.asked.append(needs)
        for need in needs:
            if need.name not in self.topics:
                raise NoPermission(f"no right on {need.name}")


@asynccontextmanager
async def guarded(directory: Path, access: OneAccount) -> AsyncIterator[RunningBroker]:
    config = BrokerConfig(
        listen_port=0, namesrv_addr="", bind_address="127.0.0.1", metrics_port=-1, failed_login_wait_mills=0
    )
    store = StoreConfig(store_path_root_dir=directory, mapped_file_size_commit_log=1 << 20)
    async with broker(config, store, access=access) as running:
        yield running


async def ask(port: int, *commands: Command) -> list[Command]:
    """Send all requests in one write and wait for their replies, in order of the requests."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"".join(encode(command, number) for number, command in enumerate(commands)))
    decoder, replies = FrameDecoder(), dict[int, Command]()
    async with asyncio.timeout(20):
        while len(replies) < len(commands):
            replies |= {reply.opaque: reply for reply in decoder.feed(await reader.read(1 << 16))}
    writer.close()
    return [replies[number] for number in range(len(commands))]


def send(topic: str, body: bytes = b"body") -> Command:
    header = SendMessageRequest(producer_group="g", topic=topic, queue_id=0, born_timestamp=1)
    return request(RequestCode.SEND_MESSAGE_V2, header, body=body)


SIGNER = Signer("one", "secret-of-one")
WRONG = Signer("one", "another-secret")


@pytest.mark.parametrize("port_below", [0, 2], ids=["main", "vip"])
async def test_no_code_is_answered_without_a_signature(tmp_path: Path, port_below: int) -> None:
    access = OneAccount()
    async with guarded(tmp_path, access) as running:
        for code in sorted({int(code) for code in RequestCode} | {0, -1, 777_777}):
            commands = request(code), WRONG.sign(request(code))
            for reply in await ask(running.server.port - port_below, *commands):
                assert reply.code == ResponseCode.NO_PERMISSION, f"{code}: {reply}"
        assert running.store.max_offset == 0
        assert access.asked == []


async def test_every_served_code_has_a_row(tmp_path: Path) -> None:
    async with guarded(tmp_path, OneAccount()) as running:
        assert running.codes - BROKER_NEEDS.keys() == set()


async def test_requests_behind_allowed_ones_are_looked_at_too(tmp_path: Path) -> None:
    access = OneAccount()
    access.topics = {"mine"}
    async with guarded(tmp_path, access) as running:
        running.topics.ensure("mine", 1)
        running.topics.ensure("theirs", 1)
        good, foreign = SIGNER.sign(send("mine")), SIGNER.sign(send("theirs"))
        changed = Command(good.code, raw_ext=good.ext_fields, body=b"another body")
        for _ in range(3):
            replies = await ask(running.server.port, good, good, foreign, good, changed, send("mine"), good)
            codes = [reply.code == ResponseCode.SUCCESS for reply in replies]
            assert codes == [True, True, False, True, False, False, True]
        assert running.store.max_offset_of("theirs", 0) == 0
        assert running.store.max_offset_of("mine", 0) == 12


async def test_a_right_that_is_taken_away_bites_at_once(tmp_path: Path) -> None:
    access = OneAccount()
    access.topics = {"mine"}
    async with guarded(tmp_path, access) as running:
        running.topics.ensure("mine", 1)
        good = SIGNER.sign(send("mine"))
        assert [reply.code for reply in await ask(running.server.port, good, good)] == [0, 0]
        access.topics = set()
        access.generation += 1
        assert [reply.code for reply in await ask(running.server.port, good)] == [ResponseCode.NO_PERMISSION]
        access.topics = {"mine"}
        access.secret = b"a new secret!"
        access.generation += 1
        assert [reply.code for reply in await ask(running.server.port, good)] == [ResponseCode.NO_PERMISSION]


async def test_a_reply_is_not_taken_for_a_request(tmp_path: Path) -> None:
    access = OneAccount()
    access.topics = {"mine"}
    async with guarded(tmp_path, access) as running:
        running.topics.ensure("mine", 1)
        signed = SIGNER.sign(send("mine"))
        reply = Command(signed.code, raw_ext=send("mine").ext_fields, body=b"body", flag=1)
        reader, writer = await asyncio.open_connection("127.0.0.1", running.server.port)
        writer.write(encode(reply, 1) + encode(signed, 2))
        decoder = FrameDecoder()
        async with asyncio.timeout(20):
            while not (answers := decoder.feed(await reader.read(1 << 16))):
                pass
        assert [answer.opaque for answer in answers] == [2]
        assert running.store.max_offset_of("mine", 0) == 1
        writer.close()
