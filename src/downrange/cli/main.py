"""Entry point of the `downrange` command.

An MQError or an error of a file ends a command with one line and an exit code: 2 when the command was wrong (usage,
configuration, a name that breaks a rule, an address that cannot be listened on), 1 when it failed.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import NoReturn

import typer

from downrange import __version__
from downrange.cli.help_by_task import HelpByTask
from downrange.cli.options import UsageError, connect_with_tls
from downrange.cli.output import one_line
from downrange.cli.shown_warnings import show_warnings
from downrange.compiled import VARIANT
from downrange.model.errors import MessageError, MQError
from downrange.settings import ConfigError
from downrange.transport.errors import ListenFailed

app = typer.Typer(
    name="downrange",
    cls=HelpByTask,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A message platform that speaks Apache RocketMQ.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"downrange {__version__} ({VARIANT})")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", help="Show the version.", callback=_show_version, is_eager=True),
    use_tls: bool = typer.Option(False, "--tls", help="Connect with TLS. [$ROCKETMQ_TLS_ENABLE]"),
    tls_config: Path | None = typer.Option(
        None,
        "--tls-config",
        help="Connect with TLS; properties file with tls.client keys. [$ROCKETMQ_TLS_CONFIG_FILE]",
    ),
) -> None:
    connect_with_tls(use_tls, tls_config)


def main() -> NoReturn:
    _open_standard_streams()
    show_warnings()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # here, where a full disk can still be reported
    except MQError as error:
        print(f"downrange: {one_line(error)}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError | ListenFailed | MessageError | UsageError) else 1)
    except UnicodeEncodeError as error:
        print(f"downrange: {error.object!r} is not UTF-8 text", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python would try the failed write again at exit
        if not isinstance(error, BrokenPipeError):  # a closed pipe only says that its reader has seen enough
            where = f"{error.filename}: " if error.filename else ""
            print(f"downrange: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)


def _open_standard_streams() -> None:
    """Open streams that were closed, as by `>&-`: else a socket would get the number, and then all that is printed.

    Characters that the encoding of the terminal does not have are printed as question marks.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  until the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


if __name__ == "__main__":
    main()
