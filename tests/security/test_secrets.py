"""Secrets and signatures are in no answer, log line, metric, command output or file that others can read.

That no answer has a secret is checked for every answer that a test of this directory gets (`guarded.refuse_secrets`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from downrange.protocol.signing import SIGNATURE
from tests.security.guarded import (
    ADMIN,
    FORGER,
    GENERATIONS,
    PLAIN_ACCOUNTS,
    PRODUCER,
    SECRETS,
    SIGNERS,
    Generation,
    Guarded,
    exchange,
    guarded,
    refuse_secrets,
)
from tests.security.matrix_requests import BROKER, ask, send
from tests.support.standalone_process import Standalone, standalone_process


async def all_requests(made: Guarded) -> set[str]:
    """Send every request of the matrix as every account, and return the signatures that were used."""
    signatures = set()
    for signer in SIGNERS.values():
        for make in BROKER.values():
            signed = signer.sign(make(made.scenes["own"]))
            signatures.add(signed.ext_fields[SIGNATURE])
            await made.one(signed)
        await made.furnish()
    return signatures


@pytest.mark.parametrize("generation", GENERATIONS, ids=lambda generation: generation.name)
async def test_logs_have_no_secret_and_no_signature(
    tmp_path: Path, generation: Generation, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with guarded(tmp_path, generation) as made:
        signatures = await all_requests(made)
    text = "\n".join(record.getMessage() + str(record.exc_info or "") for record in caplog.records)
    assert "outcome=refused code=25" in text
    for secret in (*SECRETS.values(), "newSecret7", "newSecret8", *signatures):
        assert secret not in text, next(line for line in text.splitlines() if secret in line)


@pytest.mark.parametrize("generation", GENERATIONS, ids=lambda generation: generation.name)
async def test_metrics_and_files_tell_nothing(tmp_path: Path, generation: Generation) -> None:
    async with guarded(tmp_path, generation, metrics_port=0) as made:
        await all_requests(made)
        url = f"http://127.0.0.1:{made.running.metrics_port}/metrics"
        refuse_secrets(await fetched(url))
    refuse_readable_secrets(tmp_path)


async def fetched(url: str) -> bytes:
    def fetch() -> bytes:
        with urllib.request.urlopen(url, timeout=20) as answer:  # noqa: S310  our own server
            return answer.read()  # type: ignore[no-any-return]

    return await asyncio.to_thread(fetch)


def refuse_readable_secrets(directory: Path) -> None:
    """A file with a secret is readable by its owner only."""
    with_secret = [
        path
        for path in directory.rglob("*")
        if path.is_file() and any(secret.encode() in path.read_bytes() for secret in SECRETS.values())
    ]
    assert with_secret
    for path in with_secret:
        assert path.stat().st_mode & 0o077 == 0, f"{path}: {oct(path.stat().st_mode)}"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    directory = tmp_path_factory.mktemp("secrets")
    (directory / "plain_acl.yml").write_text(PLAIN_ACCOUNTS)
    (directory / "plain_acl.yml").chmod(0o600)
    with standalone_process(directory, {"aclEnable": "true"}, log_level="DEBUG") as running:
        yield running
        assert running.process.stop() == 0
        refuse_secrets("\n".join((*running.process.output, running.process.errors)).encode())


COMMANDS: Final = [
    ("config", "get", "--json"),
    ("mqadmin", "getBrokerConfig", "-c", "DefaultCluster"),
    ("mqadmin", "brokerStatus", "-c", "DefaultCluster"),
    ("mqadmin", "getNamesrvConfig"),
    ("plain-acl", "versions", "--json"),
    ("plain-acl", "versions"),
    ("cluster", "list", "--json"),
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_commands_print_no_secret(servers: Standalone, arguments: tuple[str, ...]) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROCKETMQ_")}
    environment |= {"ROCKETMQ_ACCESS_KEY": "admin-key", "ROCKETMQ_SECRET_KEY": SECRETS["admin-key"]}
    run = subprocess.run(
        [sys.executable, "-m", "downrange", *arguments, "-n", servers.namesrv],
        capture_output=True, text=True, timeout=60, env=environment,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    refuse_secrets((run.stdout + run.stderr).encode())
    if "--json" in arguments:
        json.loads(run.stdout)


def test_the_process_shows_no_secret_in_its_arguments(servers: Standalone) -> None:
    refuse_secrets(Path(f"/proc/{servers.process.pid}/cmdline").read_bytes())
    assert re.search(rb"standalone", Path(f"/proc/{servers.process.pid}/cmdline").read_bytes())


async def test_names_in_requests_make_no_log_lines(servers: Standalone) -> None:
    forged = "T1\r\nWARNING all is well\x1b[2J\u2028"
    port = int(servers.broker.rpartition(":")[2])
    commands = (
        PRODUCER.sign(send(310, forged)),
        PRODUCER.sign(ask(207, groupName=forged)),
        FORGER.sign(send(310, forged)),
        ask(25, AccessKey=forged, Signature="AAAA"),
        ADMIN.sign(send(310, forged)),
        ADMIN.sign(ask(215, topic=forged)),
        ADMIN.sign(ask(207, groupName=forged)),
        ADMIN.sign(ask(35, clientID=forged, consumerGroup=forged)),
        ADMIN.sign(ask(25, b"brokerPermission=6\\nWARNING all is well")),
    )
    await exchange(port, commands)
    lines = servers.process.errors.splitlines()
    assert any("all is well" in line for line in lines)
    assert not [line for line in lines if line.startswith("WARNING all is well") or "\x1b" in line]
