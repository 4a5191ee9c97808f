"""Run one operator action against a cluster and print its result."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from downrange.cli.account import client_config
from downrange.cli.options import Json, Namesrv
from downrange.cli.output import Answer, print_answer

if TYPE_CHECKING:  # importing the client costs more than printing a help page
    from downrange.client.admin import Admin
    from downrange.client.brokers import Broker

T = TypeVar("T")


def ask(namesrv: str | None, action: Callable[[Admin], Awaitable[T]]) -> T:
    from downrange.client.admin import Admin
    from downrange.transport.loop import run

    async def once() -> T:
        async with Admin(client_config(namesrv)) as admin:
            return await action(admin)

    return run(once())


def asks(action: Callable[..., Awaitable[Answer]]) -> Callable[..., None]:
    """Make a command of an operator action: it has also `--namesrv` and `--json`, and it prints the answer."""

    def command(*, namesrv: Namesrv = None, json: Json = False, **given: Any) -> None:
        print_answer(ask(namesrv, lambda admin: action(admin, **given)), as_json=json)

    hints = get_type_hints(action, localns={"Admin": object}, include_extras=True)
    hints |= get_type_hints(command, include_extras=True)
    _admin, *own = inspect.signature(action).parameters.values()
    *shared, _given = inspect.signature(command).parameters.values()
    parameters = [one.replace(annotation=hints[one.name]) for one in (*own, *shared)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # for typer
    command.__doc__ = action.__doc__
    return command


def broker_row(broker: Broker) -> dict[str, object]:
    """The fields with which every row about a broker begins."""
    return {"broker": broker.name or None, "address": broker.address or None}
