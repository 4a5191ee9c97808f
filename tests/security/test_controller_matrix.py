"""Every request of a controller with accounts, by every kind of account: the section `controller` of matrix.txt."""

from __future__ import annotations

import logging
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from downrange.auth.needs import CONTROLLER_NEEDS
from downrange.controller.access import OF_BROKERS, READS
from downrange.controller.handlers import ControllerHandlers
from downrange.protocol.codes import ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.framing import encode
from downrange.protocol.signing import SIGNATURE
from tests.security.guarded import ADMIN, BATCH, SECRETS, SIGNERS, Wire, as_sent, exchange, raw_exchange
from tests.security.matrix_requests import CONTROLLER, ask, of_set
from tests.security.test_matrix import MATRIX, Cell, cells, rows
from tests.security.test_namesrv_matrix import GENERATION, SCENES, WIRES, result
from tests.security.test_secrets import fetched
from tests.support.certificates import Certificates
from tests.support.controllers import running_controller

SECTION = "controller"


@asynccontextmanager
async def served(directory: Path, **settings: object) -> AsyncIterator[tuple[int, ssl.SSLContext]]:
    """A controller with accounts that knows the set broker-a with two replicas; its port, and whom clients trust."""
    certificates = Certificates.make(directory / "tls")
    access: dict[str, Any] = {"tls": certificates.server_config(), **GENERATION.settings(directory), **settings}
    async with running_controller(directory, **access) as running:
        await furnish(running.server.port)
        yield running.server.port, ssl.create_default_context(cafile=certificates.ca)


async def furnish(port: int) -> None:
    here = f"127.0.0.1:{port}"  # something that a probe finds: the brokers are to stay alive
    for id_ in (1, 2):
        applied = of_set(1013, appliedBrokerId=id_, registerCheckCode=f"{here};{id_}")
        alive = of_set(904, brokerAddr=here, brokerId=id_, heartbeatTimeoutMills=600_000)
        await exchange(port, [ADMIN.sign(applied), ADMIN.sign(alive)])
    await exchange(port, [ADMIN.sign(of_set(1002, brokerId=1, designateElect=False))])


async def state(port: int) -> list[tuple[int, bytes]]:
    asked = [ask(1006, []), ask(1010), of_set(1012), of_set(1004)]
    replies = await exchange(port, [ADMIN.sign(command) for command in asked])
    return [(reply.code, reply.body_bytes) for reply in replies if reply is not None]


def request_of(cell: Cell) -> Command:
    command = CONTROLLER[cell.row](SCENES[cell.scene])
    signer = SIGNERS.get("S" if cell.who == "R" else cell.who)
    return command if signer is None else signer.sign(command)


async def test_every_served_code_has_a_row(tmp_path: Path) -> None:
    known = {int(name.partition("/")[0]) for name in rows(SECTION)}
    assert known - {9999} == set(CONTROLLER_NEEDS)
    assert {*OF_BROKERS, *READS} < set(CONTROLLER_NEEDS)
    assert rows(SECTION).keys() == CONTROLLER.keys()
    async with running_controller(tmp_path) as running:
        handlers = ControllerHandlers(running.parts, None, None)  # type: ignore[arg-type]
        missing = [code for code in range(1 << 16) if code in handlers.codes and code not in known]
    assert not missing, f"give these codes rows in {MATRIX.name} and requests in matrix_requests.py: {missing}"


@pytest.mark.parametrize("wire", WIRES, ids=str)
async def test_refused_requests_are_refused_and_change_nothing(tmp_path: Path, wire: Wire) -> None:
    refused = [cell for cell in cells(SECTION) if cell.expected == "D"]
    wrong: list[str] = []
    async with served(tmp_path) as (port, trust):
        before = await state(port)
        assert [code for code, _ in before] == [0, 0, 0, 0]
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
        for cell in cells(SECTION):
            if cell.expected == "D":
                continue
            frame = encode(as_sent(request_of(cell), wire), 1)
            for _ in range(2 if cell.who == "R" else 1):
                reply = (await raw_exchange(port, frame, {1}, trust if wire.is_tls else None))[1]
            if result(reply) != cell.expected:
                wrong.append(f"{cell}, {wire}: answered {reply.code} {reply.remark}")
    assert wrong == []


async def test_views_can_be_kept_from_strangers(tmp_path: Path) -> None:
    async with served(tmp_path, anonymous_read_enable=False) as (port, _):
        for code in sorted(READS):
            asked = CONTROLLER[str(int(code))](SCENES["own"])
            replies = await exchange(port, [asked, SIGNERS["W"].sign(asked), SIGNERS["N"].sign(asked)])
            assert [reply is not None and result(reply) for reply in replies] == ["D", "D", "ok"]


async def test_listed_brokers_need_no_account_but_only_operators_choose_masters(tmp_path: Path) -> None:
    """Brokers of RocketMQ do not sign: they go on working if their addresses are listed."""
    async with served(tmp_path, allowed_broker_addresses="127.0.0.*") as (port, _):
        for name in ("904", "1004", "1012", "1002"):
            (reply,) = await exchange(port, [CONTROLLER[name](SCENES["own"])])
            assert reply is not None
            assert result(reply) == "ok", name
        for name in ("1002/designate", "1002/unclean", "1009", "1010", "1011"):
            (reply,) = await exchange(port, [CONTROLLER[name](SCENES["own"])])
            assert reply is not None
            assert result(reply) == "D", name


async def test_logs_and_metrics_have_no_secret_and_no_signature(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    signatures = set()
    access: dict[str, Any] = GENERATION.settings(tmp_path)
    async with running_controller(tmp_path, metrics_port=0, **access) as running:
        for signer in SIGNERS.values():
            for make in CONTROLLER.values():
                signed = signer.sign(make(SCENES["own"]))
                signatures.add(signed.ext_fields[SIGNATURE])
                await exchange(running.server.port, [signed])
        metrics = (await fetched(f"http://127.0.0.1:{running.metrics_port}/metrics")).decode()
    assert re.search(r'downrange_refused_total\{.*reason="permission"} [1-9]', metrics)
    text = "\n".join(record.getMessage() + str(record.exc_info or "") for record in caplog.records)
    assert "outcome=refused code=1009" in text
    for secret in (*SECRETS.values(), *signatures):
        assert secret not in text + metrics


async def test_secrets_are_not_in_the_settings_that_are_shown(tmp_path: Path) -> None:
    secrets = {
        "etcd_user": "root",
        "etcd_password": "very-secret-1",
        "inner_client_authentication_credentials": '{"accessKey":"inner","secretKey":"very-secret-2"}',
    }
    async with served(tmp_path, **secrets) as (port, _):
        (reply,) = await exchange(port, [ADMIN.sign(ask(1010))])
        assert reply is not None
        assert reply.code == ResponseCode.SUCCESS
        assert b"very-secret" not in reply.body_bytes
        assert b"etcdUser=root" in reply.body_bytes
