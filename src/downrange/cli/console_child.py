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
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "downrange", "console", "-n", f"local={namesrv}", "--with-parent"),
        *("--port", str(wish.port), "--bind", wish.bind, "--history", str(directory / "console.db")),
        *_options(wish, running),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **_environment(running)},
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


def _options(wish: ConsoleWish, running: RunningBroker) -> list[str]:
    """With access control its accounts are those of the console; with TLS its certificate is, too."""
    config = running.config.broker
    options = ["--auth", "acl"] if config.acl_enable else []
    options += ["--insecure"] if wish.insecure else []
    if config.tls.config_file is not None:
        options += ["--tls-config", str(config.tls.config_file)]
    return options


def _environment(running: RunningBroker) -> dict[str, str]:
    """What the sampler of the console needs to ask this broker: its own account, and TLS."""
    from downrange.transport.tls_config import resolved

    found: dict[str, str] = {}
    if running.own_account is not None:
        key, secret = running.own_account
        found |= {"ROCKETMQ_ACCESS_KEY": key, "ROCKETMQ_SECRET_KEY": secret}
    tls = running.config.broker.tls
    if resolved(tls).is_enabled:
        found["ROCKETMQ_TLS_ENABLE"] = "true"
        if tls.config_file is not None:
            found["ROCKETMQ_TLS_CONFIG_FILE"] = str(tls.config_file)
    return found
