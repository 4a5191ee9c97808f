"""The list of commands in `downrange --help`, ordered by task, and in each family: with whole first sentences."""

from __future__ import annotations

from typing import Any, Final

from typer.core import TyperGroup

from downrange.cli.commands import Commands

TASKS: Final = {
    "Run servers": ("standalone", "namesrv", "broker", "proxy", "controller", "console", "shutdown"),
    "Send and receive": ("produce", "consume", "message", "trace", "dlq"),
    "Look after a cluster": ("cluster", "topic", "group", "config", "namesrv-admin", "mqadmin"),
    "Give access": ("user", "acl", "plain-acl", "tls"),
    "Files and bulk work": ("store", "pipeline"),
    "Try and measure": ("simulate", "bench"),
}


class WholeSentences(TyperGroup):
    """A family of commands. Its list has the whole first sentence of each; click would cut it."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # of click, which newer releases of typer include
        rows = [(name, self.commands[name].get_short_help_str(200)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class HelpByTask(TyperGroup):
    """The root command. A command that belongs to no task comes last, under a heading of its own."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = Commands()

    def list_commands(self, ctx: Any) -> list[str]:
        named = [name for names in TASKS.values() for name in names if name in self.commands]
        return [*named, *(name for name in self.commands if name not in named)]

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # of click, which newer releases of typer include
        left = self.list_commands(ctx)
        for task, names in {**TASKS, "Other commands": tuple(left)}.items():
            rows = [(name, self.commands[name].get_short_help_str(200)) for name in names if name in left]
            left = [name for name in left if name not in names]
            if rows:
                with formatter.section(task):
                    formatter.write_dl(rows)
