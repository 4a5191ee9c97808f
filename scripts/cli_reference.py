"""Write docs/reference/cli.md from the commands; `--check` says whether the page is up to date."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from typer.main import get_command

from downrange.cli.main import app

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "cli.md"
INTRODUCTION = """# Commands

Every command of `downrange` with its arguments and options, as `--help` shows them. Those of operators are ordered by
task in [operate a cluster](../how-to/operate.md), with mqadmin's names beside them. `-h` and `--help` work everywhere.

This page is made by `scripts/cli_reference.py`.
"""


def page() -> str:
    root: Any = get_command(app)
    parts = [INTRODUCTION, f"## Options of every command\n\n{options(root)}"]
    for name in root.list_commands(None):
        command = root.commands[name]
        parts.append(f"## {name}\n\n{described(f'downrange {name}', command)}")
        for sub_name, sub_command in getattr(command, "commands", {}).items():
            parts.append(f"### {name} {sub_name}\n\n{described(f'downrange {name} {sub_name}', sub_command)}")
    return "\n".join(parts)


def described(words: str, command: Any) -> str:
    """What a command does, how it is called, and its options; of a family of commands only what it is about."""
    about = "\n".join(line.strip() for line in (command.help or "").splitlines()).strip()
    if hasattr(command, "commands") and not command.invoke_without_command:
        return f"{text(about)}\n"
    arguments = [shown_argument(one) for one in command.params if one.param_type_name == "argument"]
    usage = " ".join([words, *arguments, *(["[OPTIONS]"] if options(command) else [])])
    return f"{text(about)}\n\n```\n{usage}\n```\n\n{options(command)}"


def shown_argument(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    name += "..." if argument.nargs == -1 else ""
    return name if argument.required else f"[{name}]"


def options(command: Any) -> str:
    shown = [one for one in command.params if one.name not in ("install_completion", "show_completion")]
    rows = "".join(row(one) for one in shown if not getattr(one, "hidden", False) and getattr(one, "help", None))
    return f"| | default | meaning |\n|---|---|---|{rows}\n" if rows else ""


def row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        names = f"`{parameter.metavar or parameter.name.upper()}`"
    else:
        names = ", ".join(f"`{one}`" for one in [*parameter.opts, *parameter.secondary_opts])
    default = parameter.default
    is_shown = (
        getattr(parameter, "show_default", True)
        and default not in (None, False, True, "", [], ())
        and not callable(default)
    )
    shown_default = f"`{getattr(default, 'value', default)}`" if is_shown else ""
    if parameter.required:
        shown_default = "must be given"
    return f"\n| {names} | {shown_default} | {text(' '.join(parameter.help.split()))} |"


def text(words: str) -> str:
    """Words of a help text as Markdown shows them."""
    return words.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("[$", "\\[$").replace("\b\n", "")


def main() -> None:
    if sys.argv[1:] == ["--check"]:
        if not PAGE.exists() or PAGE.read_text("utf-8") != page():
            sys.exit(f"{PAGE.name} is out of date: run scripts/cli_reference.py")
        return
    PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
