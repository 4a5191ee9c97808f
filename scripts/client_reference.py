"""Write docs/reference/clients.md from the settings of clients; `--check` says whether the page is up to date."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from typing import Any

import downrange

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "clients.md"
INTRODUCTION = """# Settings of clients

Every client takes a configuration object: `Producer("billing", config=ProducerConfig(trace=True))`. Names are
RocketMQ's, in Python's spelling; the name in brackets is RocketMQ's own where it differs. Times are in seconds.

This page is made by `scripts/client_reference.py`.
"""
CLASSES = {
    "ClientConfig": "How every client reaches its cluster.",
    "ProducerConfig": "`Producer`, `AsyncProducer`, `TransactionProducer`, `AsyncTransactionProducer`.",
    "ConsumerConfig": "`PushConsumer`, `AsyncPushConsumer`.",
    "LitePullConfig": "`LitePullConsumer`, `AsyncLitePullConsumer`.",
    "SimpleConsumerConfig": "`SimpleConsumer`, `AsyncSimpleConsumer`.",
}


def page() -> str:
    parts = [INTRODUCTION]
    for name, used_by in CLASSES.items():
        config_class = getattr(downrange, name)
        rows = "".join(row(*one) for one in fields(config_class))
        parts.append(
            f"## {name}\n\n{used_by} {' '.join((config_class.__doc__ or '').split())}\n\n"
            f"| name | type | default | meaning |\n|---|---|---|---|{rows}\n"
        )
    return "\n".join(parts)


def fields(config_class: type[Any]) -> list[tuple[str, str, str, str]]:
    """Name, type, default and meaning of each field; the meaning is the text that stands below the field."""
    source = Path(inspect.getsourcefile(config_class) or "").read_text("utf-8")
    body = next(
        node.body
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == config_class.__name__
    )
    found = []
    for node, following in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        meaning = str(following.value.value) if is_text else ""  # type: ignore[union-attr]
        default = "" if node.value is None else ast.unparse(node.value)
        found.append((node.target.id, ast.unparse(node.annotation), default, " ".join(meaning.split())))
    return found


def row(name: str, kind: str, default: str, meaning: str) -> str:
    kind = kind.replace("|", "\\|")
    return f"\n| `{name}` | `{kind}` | {f'`{default}`' if default else 'must be given'} | {meaning} |"


def main() -> None:
    text = page()
    if sys.argv[1:] == ["--check"]:
        if not PAGE.exists() or PAGE.read_text("utf-8") != text:
            sys.exit(f"{PAGE.name} is out of date: run scripts/client_reference.py")
        return
    PAGE.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
