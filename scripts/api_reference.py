"""Write docs/reference/api.md from the docstrings of public names; `--check` says whether the page is up to date."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "api.md"
INTRODUCTION = """# Python API

The names that may be imported from `downrange`, `downrange.errors`, `downrange.testing` and `downrange.spark`. They
keep their meaning between versions; everything else in the package may change. Classes whose names begin with `Async`
are for asyncio, and so are `Admin` and `PullConsumer`; the others block. The fields of configuration classes are on
[a page of their own](clients.md).

This page is made by `scripts/api_reference.py`.
"""
MODULES = ("downrange", "downrange.errors", "downrange.testing", "downrange.spark")


def page() -> str:
    return "\n".join([INTRODUCTION, *(module_part(import_module(name)) for name in MODULES)])


def module_part(module: Any) -> str:
    parts = [f"## {module.__name__}\n\n{markdown(module.__doc__ or '')}\n"]
    if module.__name__ == "downrange.errors":
        return parts[0] + "\n| error | is a | meaning |\n|---|---|---|" + "".join(map(error_row, public(module))) + "\n"
    parts += [described(name, value) for name, value in public(module) if not is_error(value)]
    return "\n".join(parts)


def public(module: Any) -> Iterator[tuple[str, Any]]:
    return ((name, getattr(module, name)) for name in module.__all__)


def is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Exception)


def error_row(named: tuple[str, Any]) -> str:
    name, error = named
    meaning = " ".join((inspect.getdoc(error) or "").split("\n\n")[0].split()).replace("|", "\\|")
    return f"\n| `{name}` | `{error.__base__.__name__}` | {meaning} |"


def described(name: str, value: Any) -> str:
    if not inspect.isclass(value):
        return f"### {name}\n\n```python\n{name}{signature(value)}\n```\n\n{markdown(value.__doc__ or '')}\n"
    parts = [f"### {name}\n"]
    if issubclass(value, Enum):
        parts.append(f"{markdown(value.__doc__ or '')}\n\nValues: {', '.join(f'`{one.name}`' for one in value)}.\n")
        return "\n".join(parts)
    if not name.endswith("Config"):
        parts.append(f"```python\n{name}{signature(value)}\n```\n")
    parts.append(f"{markdown(value.__doc__ or '')}\n")
    rows = "".join(member_row(*one) for one in members(value))
    return "\n".join([*parts, *([f"| member | meaning |\n|---|---|{rows}\n"] if rows else [])])


def members(of: type) -> Iterator[tuple[str, Any]]:
    """Methods and properties of a class that have a name for users, those of its bases included."""
    for name in sorted(dir(of)):
        member = inspect.getattr_static(of, name)
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isfunction(function) and function.__module__.startswith("downrange"):
            yield name, member


def member_row(name: str, member: Any) -> str:
    paragraphs = [part for part in (inspect.getdoc(member) or "").split("\n\n") if not part.startswith("    ")]
    meaning = "<br>".join(" ".join(part.split()) for part in paragraphs).replace("|", "\\|")
    if isinstance(member, property):
        return f"\n| `{name}` | {meaning} |"
    function = getattr(member, "__func__", member)
    is_awaited = "await " if inspect.iscoroutinefunction(function) else ""
    shown = f"{is_awaited}{name}{parameters(function)}".replace("|", "\\|")
    return f"\n| `{shown}` | {meaning} |"


def parameters(function: Any) -> str:
    """The names of the parameters and their defaults, without types."""
    shown = inspect.signature(function)
    kept = [
        one.replace(annotation=inspect.Parameter.empty)
        for one in shown.parameters.values()
        if one.name not in ("self", "cls")
    ]
    return steady(str(shown.replace(parameters=kept, return_annotation=inspect.Signature.empty)))


def signature(value: Any) -> str:
    text = steady(str(inspect.signature(value)).replace("'", "")).removesuffix(" -> None")
    if len(text) < 100:
        return text
    inside, _, result = text[1:].rpartition(")")
    return "(\n    " + ",\n    ".join(re.split(r", (?=\*?\w+(?::|=|,|$)|\*$|\*,)", inside)) + f",\n){result}"


def steady(text: str) -> str:
    """A signature without what differs from process to process."""
    return re.sub(r"<(?:function |factory|object object at)[^>]*>", "...", text)


def markdown(docstring: str) -> str:
    """A docstring as Markdown: blocks that are indented are examples and become Python blocks."""
    blocks = inspect.cleandoc(docstring).split("\n\n")
    shown: list[str] = []
    for block in blocks:
        is_code = block.startswith("    ")
        if is_code and shown and shown[-1].endswith("\n```"):
            shown[-1] = shown[-1].removesuffix("\n```") + f"\n\n{inspect.cleandoc(block)}\n```"
        elif is_code:
            shown.append(f"```python\n{inspect.cleandoc(block)}\n```")
        else:
            shown.append(block)
    return "\n\n".join(shown)


def main() -> None:
    if sys.argv[1:] == ["--check"]:
        if not PAGE.exists() or PAGE.read_text("utf-8") != page():
            sys.exit(f"{PAGE.name} is out of date: run scripts/api_reference.py")
        return
    PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
