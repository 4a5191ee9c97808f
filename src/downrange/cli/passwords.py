"""The password for a user that a command makes or changes. It need not be an argument: others could see it there."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from downrange.cli.options import UsageError
from downrange.settings import user_password


def new_password(given: str | None, file: Path | None) -> str:
    """The password of mqadmin's letter, of a file, of the environment, of standard input, or as it is typed in."""
    password = given or _of_file(file) or user_password() or _typed_in()
    if not password.strip():
        raise UsageError("the password is empty")
    return password


def _of_file(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return file.read_text("utf-8").rstrip("\r\n")
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not UTF-8 text") from None


def _typed_in() -> str:
    if sys.stdin.isatty():
        return str(typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True))
    return sys.stdin.readline().rstrip("\r\n")
