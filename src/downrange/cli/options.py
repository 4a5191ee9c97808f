"""Options that many commands share, spelt once; short letters are those of mqadmin."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from downrange.cli.help_by_task import WholeSentences
from downrange.model.errors import MQError

Namesrv = Annotated[
    str | None,
    typer.Option("--namesrv", "-n", help="Name servers, separated by ';'. [$NAMESRV_ADDR, else 127.0.0.1:9876]"),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document instead of tables.")]
Watch = Annotated[
    float | None, typer.Option("--watch", min=0.1, help="Seconds after which this is shown again, until Ctrl-C.")
]
Cluster = Annotated[str | None, typer.Option("--cluster", "-c", help="All masters of this cluster.")]
Broker = Annotated[str | None, typer.Option("--broker", "-b", help="One broker: its name or host:port.")]
Topic = Annotated[str, typer.Argument(help="Topic.")]
Group = Annotated[str, typer.Argument(help="Consumer group.")]
Changes = Annotated[list[str], typer.Argument(help="key=value, any number of them.")]
TlsMode = Annotated[
    str | None, typer.Option("--tls-mode", help="disabled, permissive or enforcing. [permissive with a certificate]")
]
TlsFile = Annotated[
    Path | None,
    typer.Option("--tls-config", help="Properties file with tls.server keys."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done and change nothing.")]


def connect_with_tls(is_wanted: bool, config_file: Path | None) -> None:
    """Make all clients of this process, and of those that it starts, use TLS: by the variables that they read."""
    if is_wanted or config_file is not None:
        os.environ["ROCKETMQ_TLS_ENABLE"] = "true"
    if config_file is not None:
        os.environ["ROCKETMQ_TLS_CONFIG_FILE"] = str(config_file.absolute())


class UsageError(MQError):
    """The command line cannot be carried out; the text says what would be right."""


def command_family(help: str) -> typer.Typer:
    return typer.Typer(
        cls=WholeSentences, help=help, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
    )


def key_values(texts: list[str]) -> dict[str, str]:
    """Split `key=value` arguments."""
    table = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"{text!r} is not key=value")
        table[key] = value
    return table


_PERMS = {"2": 2, "4": 4, "6": 6, "w": 2, "r": 4, "rw": 6}


def parse_perm(text: str) -> int:
    try:
        return _PERMS[text.lower()]
    except KeyError:
        raise UsageError(f"permission {text!r}: expected 2 or w (write), 4 or r (read), 6 or rw (both)") from None


def perm_text(perm: int) -> str:
    """The permission as RocketMQ prints it: `RW-`."""
    return ("R" if perm & 4 else "-") + ("W" if perm & 2 else "-") + ("X" if perm & 1 else "-")
