"""What `downrange --help` shows, and options that many commands share."""

from __future__ import annotations

from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from downrange.cli.help_by_task import TASKS
from downrange.cli.main import app

LISTS = ["cluster status", "topic list", "group ages", "dlq list", "controller status", "user list", "message half"]


def test_commands_are_ordered_by_task_and_none_is_left_over() -> None:
    shown = CliRunner().invoke(app, ["--help"]).stdout
    headings = [line.rstrip(":") for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Options", *TASKS]
    named = [name for names in TASKS.values() for name in names]
    assert sorted(named) == sorted(get_command(app).commands)  # type: ignore[attr-defined]
    assert "..." not in shown.replace("[ARGS]...", "")  # no sentence is cut off


@pytest.mark.parametrize("words", LISTS)
def test_lists_can_be_watched(words: str) -> None:
    command: Any = get_command(app)
    for word in words.split():
        command = command.commands[word]
    assert "--watch" in [option for parameter in command.params for option in parameter.opts]
