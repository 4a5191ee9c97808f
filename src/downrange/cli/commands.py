"""The commands of `downrange`. A module is imported when its command is asked for: a process needs one of them."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from functools import cache
from importlib import import_module
from typing import Any, Final

import typer
from typer.main import get_group

# The function of each command, or the typer of a family of commands; modules are those of this package.
_PLACES: Final = {
    "namesrv": "namesrv.run",
    "broker": "broker.run_broker",
    "proxy": "grpc_port.run",
    "standalone": "broker.run_standalone",
    "shutdown": "broker.run_shutdown",
    "produce": "produce.run",
    "consume": "consume.run",
    "simulate": "simulate.run",
    "trace": "trace.run",
    "bench": "bench.run",
    "mqadmin": "mqadmin.run",
    "controller": "controller.app",
    "topic": "topic.app",
    "group": "group.app",
    "cluster": "cluster.app",
    "message": "message.app",
    "dlq": "dlq.app",
    "config": "config.app",
    "console": "console.app",
    "user": "user.app",
    "acl": "acl.app",
    "namesrv-admin": "namesrv_admin.app",
    "plain-acl": "plain_acl.app",
    "store": "store.app",
    "pipeline": "pipeline.app",
    "tls": "tls.app",
}

# Members of families that are written in other modules than the family; they come after its own.
_MEMBERS: Final = {
    "topic": {
        "send-rt": "trials.send_rt",
        "queue-entries": "trials.queue_entries",
        "order-conf": "trials.order_conf",
    },
    "group": {
        "connections": "group_members.show_connections",
        "producers": "group_members.show_producers",
        "status": "group_members.show_status",
        "reset-offset": "group_offsets.reset_offset",
        "skip": "group_offsets.skip",
        "clone": "group_offsets.clone",
        "set-offset": "group_offsets.set_offset",
        "ages": "group_offsets.ages",
        "allocate": "trials.allocate",
    },
    "cluster": {
        "up": "cluster_up.up",
        "status": "cluster_up.status",
        "kill": "cluster_up.kill",
        "down": "cluster_up.down",
        "rt": "trials.cluster_rt",
        "export": "trials.export",
    },
    "message": {
        "search": "message_search.search",
        "fate": "message_search.fate",
        "delayed": "waiting.delayed",
        "half": "waiting.half",
    },
    "pipeline": {
        "mirror": "pipeline_mirror.mirror",
        "trace": "pipeline_trace.trace",
        "dlq": "pipeline_dlq.dlq",
        "latest": "pipeline_latest.latest",
        "run": "pipeline_run.run",
        "list": "pipeline_status.list_pipelines",
        "status": "pipeline_status.show_status",
    },
}

# mqadmin reads its words itself: they follow the rules of another program.
_SETTINGS: Final[dict[str, dict[Any, Any]]] = {
    "mqadmin": {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
}


class Commands(MutableMapping[str, Any]):
    """The commands by name. Names are known from the start, a command is made when it is looked up."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = dict.fromkeys(_PLACES)

    def __getitem__(self, name: str) -> Any:
        if self._made[name] is None:
            self._made[name] = _made(name)
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._made

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


def _made(name: str) -> Any:
    """The command as click has it: typer makes it as a member of a program that has only this one."""
    program = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    found = _found(name)
    if isinstance(found, typer.Typer):
        program.add_typer(found, name=name)
    else:
        program.command(name, context_settings=_SETTINGS.get(name))(found)
    return get_group(program).commands[name]


@cache
def _found(name: str) -> Any:
    """The function of a command, or the typer of a family with all its members."""
    found = _at(_PLACES[name])
    for member, place in _MEMBERS.get(name, {}).items():
        found.command(member)(_at(place))
    return found


def _at(place: str) -> Any:
    module, _, name = place.partition(".")
    return getattr(import_module(f"downrange.cli.{module}"), name)
