"""The steps of docs/tutorial.md, to be run as a reader runs them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"


class Step(NamedTuple):
    """A numbered part of the page: its programs by file name, and its commands in order."""

    title: str
    files: dict[str, str]
    commands: list[str]


def steps() -> Iterator[Step]:
    for part in re.split(r"^## ", PAGE.read_text("utf-8"), flags=re.MULTILINE)[1:]:
        title, _, text = part.partition("\n")
        files = dict(re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", text, re.DOTALL))
        blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
        commands = [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]
        yield Step(title, files, commands)
