"""The web console beside `downrange standalone`: a child process that ends with its parent.

In the event loop of the broker each page would make producers wait. The child reads a pipe that only the parent can
write to: it is closed when the parent ends, however that happens.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from downrange.cli.console import READY, check_extra
from downrange.model.errors import MQError

if TYPE_CHECKING:
    from downrange.broker.app import RunningBroker

START_SECONDS: Final = 20.0


class ConsoleWish(NamedTuple):
    """Where the console is to listen."""

    port: int
    bind: str
    insecure: bool


class ConsoleFailed(MQError):
    """The console did not start."""


@asynccontextmanager
async def console_beside(
    wish: ConsoleWish | None, running: RunningBroker, namesrv: str, directory: Path
) -> AsyncIterator[str | None]:
    """A console for the length of a block; gives its address, or None when none is wanted."""
    if wish is None:
        yield None
        return
    check_extra()
    tls_file = _tls_file(running, directory)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "downrange", "console", "-n", f"local={namesrv}", "--with-parent"),
        *("--port", str(wish.port), "--bind", wish.bind, "--history", str(directory / "console.db")),
        *_options(wish, running, tls_file),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **_environment(running, tls_file)},
    )
    try:
        yield await _address(child)
    finally:
        assert child.stdin is not None
        child.stdin.close()
        await child.wait()


async def _address(child: asyncio.subprocess.Process) -> str:
    assert child.stdout is not None
    try:
        async with asyncio.timeout(START_SECONDS):
            line = (await child.stdout.readline()).decode("utf-8", "replace").strip()
    except TimeoutError:
        raise ConsoleFailed(f"the console did not start within {START_SECONDS:g} s") from None
    if not line.startswith(READY):
        raise ConsoleFailed("the console did not start; its reason stands above")
    return line.removeprefix(READY)


def _tls_file(running: RunningBroker, directory: Path) -> Path | None:
    """The TLS keys of the broker in a file for the console; None if it has no certificate.

    People who log in need no certificate: browsers seldom have one.
    """
    from downrange.auth.private_file import replace_file
    from downrange.settings import format_properties
    from downrange.transport.tls_config import TlsMode, given_keys, resolved

    tls = resolved(running.config.broker.tls)
    if tls.mode is TlsMode.DISABLED:
        return None
    keys = given_keys(tls)
    if _has_login(running):
        keys["tls.server.need.client.auth"] = "none"
    path = directory / "console-tls.properties"
    replace_file(path, format_properties(keys).encode())
    return path


def _has_login(running: RunningBroker) -> bool:
    config = running.config.broker
    return config.acl_enable or config.authentication_enabled


def _options(wish: ConsoleWish, running: RunningBroker, tls_file: Path | None) -> list[str]:
    """With access control its accounts are those of the console; with TLS its certificate is, too."""
    options = ["--auth", "acl"] if _has_login(running) else []
    options += ["--insecure"] if wish.insecure else []
    options += [] if tls_file is None else ["--tls-config", str(tls_file)]
    return options


def _environment(running: RunningBroker, tls_file: Path | None) -> dict[str, str]:
    """What the sampler of the console needs to ask this broker: its own account, and TLS."""
    from downrange.transport.tls_config import resolved

    found: dict[str, str] = {}
    if running.own_account is not None:
        key, secret = running.own_account
        found |= {"ROCKETMQ_ACCESS_KEY": key, "ROCKETMQ_SECRET_KEY": secret}
    if resolved(running.config.broker.tls).is_enabled:
        found["ROCKETMQ_TLS_ENABLE"] = "true"
        if tls_file is not None:
            found["ROCKETMQ_TLS_CONFIG_FILE"] = str(tls_file)
    return found
