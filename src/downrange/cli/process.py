"""The frame of every server process: logs to standard error, runs until it is stopped, stops cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Final, TypeVar

import typer

from downrange.cli import run_files
from downrange.cli.run_files import Noted
from downrange.settings import ConfigError, Property
from downrange.transport.errors import ListenFailed
from downrange.transport.loop import run
from downrange.transport.own_address import is_loopback

S = TypeVar("S")

NEW_OBJECTS: Final = 10_000
"""The garbage collector of a server looks at so many new objects at a time. Python's usual number is 700.

The frames of one read are more than 700 objects, which reference counting frees a moment later. A collector that looks
meanwhile counts them as lasting ones. It then soon looks at all objects of all connections, and finds nothing. With
11,000 connections that took 30 to 60 ms, every two seconds. With 10,000 it happened once in 40 s, at the start."""


def start_logging(level: str) -> None:
    if level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ConfigError(f"--log-level {level}: expected DEBUG, INFO, WARNING or ERROR")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine("%(asctime)s %(levelname)-7s %(name)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class OneLine(logging.Formatter):
    """Writes each message as one line of printable characters: names from requests cannot make lines of their own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  the name in the base class
        text = super().formatMessage(record)
        if text.isprintable():
            return text
        return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def check_bind(host: str, protections: Mapping[str, bool], *, insecure: bool) -> None:
    """Refuse an address that other machines can reach, unless all protections are on, or `insecure` asks for it.

    `protections` has the settings that switch each protection on, and whether it is.
    """
    missing = [name for name, is_on in protections.items() if not is_on]
    if missing and not insecure and not is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines: set {', '.join(missing)}, or add --insecure if everybody who "
            "reaches it may do everything"
        )


def overrides(**given: object) -> dict[str, Property]:
    """Settings from the options of the command line that were given."""
    return {key: Property(str(value), "command line") for key, value in given.items() if value is not None}


def listening(bind: str, advertised: str) -> str:
    """What a server prints when it is ready: the address it listens on, and the one that clients are told."""
    port = advertised.rpartition(":")[2]
    listens = f"{bind or '0.0.0.0'}:{port}"
    return listens if listens == advertised else f"{listens}, advertised as {advertised}"


def warn(warnings: Iterable[str]) -> None:
    for warning in warnings:
        typer.echo(f"downrange: warning: {warning}", err=True)


def serve(
    server: AbstractAsyncContextManager[S],
    ready: Callable[[S], tuple[str, Mapping[str, str | Noted]]],
    port_options: Mapping[int, str] | None = None,
) -> None:
    """Run a server until SIGTERM or SIGINT; a second signal ends the process at once.

    `ready` returns a text to print, and by role what `downrange shutdown` may call this process by.
    `port_options` has the option of the command line that gives each port: the error of a port in use names it.
    """
    _take_all_descriptors()
    gc.set_threshold(NEW_OBJECTS)

    async def until_signal() -> None:
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()

        def on_signal() -> None:
            if stop.is_set():
                sys.exit(130)
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        async with server as running:
            text, servers = ready(running)
            for role, called in servers.items():
                server_called = called if isinstance(called, Noted) else Noted(called)
                notes.enter_context(run_files.noted(role, server_called))
            typer.echo(text)
            await stop.wait()

    with contextlib.ExitStack() as notes:
        try:
            run(until_signal())
        except ListenFailed as error:
            option = (port_options or {}).get(error.port) if error.port else None
            if option is None:
                raise
            raise ListenFailed(f"{error}; {option} takes another port") from None


def _take_all_descriptors() -> None:
    """Raise the limit of open files as far as allowed: it starts at 1,024, too few for a thousand connections."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # if the kernel allows less, the limit stays as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
