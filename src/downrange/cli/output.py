"""What commands print: tables for people, one JSON document for programs, failures on standard error."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import typer

from downrange.model.errors import MQError

Row = Mapping[str, Any]


def cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, list | tuple):
        return ",".join(map(cell, value))
    return str(value)


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its header, the field of a row that it shows, and how."""

    header: str
    key: str
    show: Callable[[Any], str] = cell
    warns: Callable[[Any], bool] = lambda value: False
    """Whether a value is coloured on a terminal."""


@dataclass(frozen=True, slots=True)
class Table:
    columns: Sequence[Column]
    rows: Sequence[Row]


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a command: `document` for programs, `parts` for people, and for both the servers that failed."""

    document: dict[str, Any]
    parts: Sequence[Table | str]
    failed: Mapping[Any, MQError] = field(default_factory=dict)


def print_answer(answer: Answer, *, as_json: bool) -> None:
    """Print an answer; the command ends with exit code 1 when a server failed."""
    failed = [{"server": str(server), "error": one_line(error)} for server, error in answer.failed.items()]
    if as_json:
        print(json.dumps({**answer.document, "failed": failed}, indent=2, ensure_ascii=False))
    else:
        for part in answer.parts:
            if isinstance(part, str):
                print(visible(part))
            elif not part.rows and failed:
                continue  # an empty table would look like an answer
            else:
                _print_table(part)
    red, plain = ("\033[31m", "\033[0m") if sys.stderr.isatty() else ("", "")
    for failure in failed:
        server, error = failure["server"], failure["error"]
        print(f"{red}downrange: {error if server in error else f'{server}: {error}'}{plain}", file=sys.stderr)
    if failed:
        raise typer.Exit(1)


def one_line(error: BaseException) -> str:
    """The text of an error on one line: RocketMQ's remarks may have several."""
    return visible(" ".join(str(error).split()))


def visible(text: str) -> str:
    """The text without control characters: a message or a server must not control the reader's terminal."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def _print_table(table: Table) -> None:
    """Print a frame on a terminal that is wide enough, else aligned columns; no value is ever cut."""
    lines = [[column.header for column in table.columns]]
    lines += [[visible(column.show(row.get(column.key))) for column in table.columns] for row in table.rows]
    warned = [[column.warns(row.get(column.key)) for column in table.columns] for row in table.rows]
    widths = [max(map(len, texts)) for texts in zip(*lines, strict=True)]
    if sys.stdout.isatty() and sum(widths) + 3 * len(widths) <= shutil.get_terminal_size().columns:
        _print_framed(lines, warned)
        return
    widths[:] = [max(width, len(header) + 1) for width, header in zip(widths, lines[0], strict=True)]
    lines[0] = [f"#{header}" for header in lines[0]]
    aligned = [[text.ljust(width) for text, width in zip(line, widths, strict=True)] for line in lines]
    if sys.stdout.isatty() and any(map(any, warned)):
        _print_coloured(aligned, warned)
        return
    for line in aligned:
        print("  ".join(line).rstrip())


def is_behind(value: Any) -> bool:
    """Whether a number of messages that wait is worth a colour."""
    return isinstance(value, int) and value > 0


def _print_coloured(lines: list[list[str]], warned: list[list[bool]]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for line, marks in zip(lines, [[False] * len(lines[0]), *warned], strict=True):
        texts = [Text(text, "yellow" if mark else "") for text, mark in zip(line, marks, strict=True)]
        console.print(Text("  ").join(texts), soft_wrap=True)


def _print_framed(lines: list[list[str]], warned: list[list[bool]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    headers, *rows = lines
    grid = RichTable(*headers, box=SIMPLE_HEAD, pad_edge=False)
    for row, marks in zip(rows, warned, strict=True):
        # As Text: brackets in a value are no markup.
        grid.add_row(*(Text(text, "yellow" if mark else "") for text, mark in zip(row, marks, strict=True)))
    Console().print(grid)
