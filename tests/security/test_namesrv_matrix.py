"""Every request of a name server with accounts, by every kind of account: the section `name server` of matrix.txt."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Final

import pytest

from downrange.auth.needs import NAMESRV_NEEDS
from downrange.clock import SystemClock
from downrange.namesrv.access import READS
from downrange.namesrv.app import name_server
from downrange.namesrv.config import NamesrvConfig
from downrange.namesrv.handlers import NamesrvHandlers
from downrange.namesrv.kv_config import KVConfig
from downrange.namesrv.route_table import RouteTable
from downrange.protocol.codes import ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.framing import encode
from tests.security.guarded import ADMIN, BATCH, SIGNERS, PlainAcl, Wire, as_sent, exchange, raw_exchange
from tests.security.matrix_requests import NAMESRV, NO_HALF, Scene, ask, broker_identity
from tests.security.test_matrix import MATRIX, Cell, cells, rows
from tests.support.certificates import Certificates

SCENES: Final = {"own": Scene("T1", "G1", 0, 0, NO_HALF), "other": Scene("T9", "G9", 0, 0, NO_HALF)}
WIRES: Final = [
    Wire(is_binary=binary, is_oneway=oneway, is_tls=tls) for binary, tls, oneway in product((False, True), repeat=3)
]
GENERATION: Final = PlainAcl()


def config_in(directory: Path, **settings: object) -> NamesrvConfig:
    return NamesrvConfig(
        listen_port=0,
        kv_config_path=directory / "kv.json",
        config_store_path=directory / "ns.properties",
        failed_login_wait_mills=0,
        **GENERATION.settings(directory),  # type: ignore[arg-type]
        **settings,  # type: ignore[arg-type]
    )


@asynccontextmanager
async def served(directory: Path, **settings: object) -> AsyncIterator[tuple[int, ssl.SSLContext]]:
    """A name server with accounts, a broker with T1 and T9, and a key-value pair; its port, and whom clients trust."""
    certificates = Certificates.make(directory / "tls")
    async with name_server(config_in(directory, tls=certificates.server_config(), **settings)) as server:
        await furnish(server.port)
        yield server.port, ssl.create_default_context(cafile=certificates.ca)


async def furnish(port: int) -> None:
    pair = ask(100, namespace="ORDER_TOPIC_CONFIG", key="T1", value="broker-a:4")
    for command in (*(own_broker(topic) for topic in ("T1", "T9")), pair):
        (reply,) = await exchange(port, [ADMIN.sign(command)])
        assert reply is not None
        assert reply.code == 0, reply.remark


def own_broker(topic: str) -> Command:
    command = broker_identity(103, topic)
    fields = {**command.ext_fields, "brokerName": "broker-a", "brokerAddr": "10.1.1.1:10911"}
    return Command(103, raw_ext=fields, body=command.body)


async def state(port: int) -> list[tuple[int, dict[str, str], bytes]]:
    asked = [
        *(ask(code) for code in (106, 206, 319)), *(ask(105, topic=topic) for topic in ("T1", "T9")),
        ask(219, namespace="ORDER_TOPIC_CONFIG"), ask(219, namespace="n"),
    ]  # fmt: skip
    replies = await exchange(port, [ADMIN.sign(command) for command in asked])
    return [(reply.code, dict(reply.ext_fields), reply.body_bytes) for reply in replies if reply is not None]


def request_of(cell: Cell) -> Command:
    command = NAMESRV[cell.row](SCENES[cell.scene])
    signer = SIGNERS.get("S" if cell.who == "R" else cell.who)
    return command if signer is None else signer.sign(command)


def result(reply: Command) -> str:
    if GENERATION.is_refusal(reply):
        return "D"
    return "3" if reply.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED else "ok"


def test_every_served_code_has_a_row(tmp_path: Path) -> None:
    handlers = NamesrvHandlers(RouteTable(), KVConfig(tmp_path / "kv.json"), config_in(tmp_path), SystemClock())
    known = {int(name) for name in rows("name server")}
    assert known - {9999} == set(NAMESRV_NEEDS)
    missing = [code for code in range(1 << 16) if code in handlers.codes and code not in known]
    assert not missing, f"give these codes rows in {MATRIX.name} and requests in matrix_requests.py: {missing}"
    assert rows("name server").keys() == NAMESRV.keys()


@pytest.mark.parametrize("wire", WIRES, ids=str)
async def test_refused_requests_are_refused_and_change_nothing(tmp_path: Path, wire: Wire) -> None:
    refused = [cell for cell in cells("name server") if cell.expected == "D"]
    wrong: list[str] = []
    async with served(tmp_path) as (port, trust):
        before = await state(port)
        for at in range(0, len(refused), BATCH):
            some = refused[at : at + BATCH]
            commands = [as_sent(request_of(cell), wire) for cell in some]
            replies = await exchange(port, commands, trust if wire.is_tls else None)
            for cell, reply in zip(some, replies, strict=True):
                if reply is not None and result(reply) != "D":
                    wrong.append(f"{cell}, {wire}: answered {reply.code} {reply.remark}")
            assert await state(port) == before, f"one of {some} changed something"
    assert wrong == []


@pytest.mark.parametrize("wire", WIRES[::2], ids=str)
async def test_allowed_requests_reach_their_handlers(tmp_path: Path, wire: Wire) -> None:
    wrong: list[str] = []
    async with served(tmp_path) as (port, trust):
        for cell in cells("name server"):
            if cell.expected == "D":
                continue
            frame = encode(as_sent(request_of(cell), wire), 1)
            for _ in range(2 if cell.who == "R" else 1):
                reply = (await raw_exchange(port, frame, {1}, trust if wire.is_tls else None))[1]
                await furnish(port)
            if result(reply) != cell.expected:
                wrong.append(f"{cell}, {wire}: answered {reply.code} {reply.remark}")
    assert wrong == []


async def test_routes_can_be_kept_from_strangers(tmp_path: Path) -> None:
    async with served(tmp_path, anonymous_read_enable=False) as (port, _):
        for code in sorted(READS):
            asked = NAMESRV[str(int(code))](SCENES["own"])
            replies = await exchange(port, [asked, SIGNERS["W"].sign(asked), SIGNERS["N"].sign(asked)])
            assert [reply is not None and result(reply) for reply in replies] == ["D", "D", "ok"]
