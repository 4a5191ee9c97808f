"""Entry point of the `downrange` command.

Errors we raise on purpose end a command with one line and an exit code: 2 when what was asked for cannot work as asked
(usage, configuration, an address that cannot be listened on), 1 when it failed.
"""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from downrange import __version__
from downrange.cli import namesrv
from downrange.model.errors import MQError
from downrange.settings import ConfigError
from downrange.transport.errors import ListenFailed

app = typer.Typer(
    name="downrange",
    help="A message platform that speaks Apache RocketMQ.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"downrange {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", help="Show the version.", callback=_show_version, is_eager=True),
) -> None:
    pass


app.command("namesrv")(namesrv.run)


def main() -> NoReturn:
    try:
        app()
    except MQError as error:
        print(f"downrange: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError | ListenFailed) else 1)
    sys.exit(0)


if __name__ == "__main__":
    main()
