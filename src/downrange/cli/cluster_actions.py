"""Run one operator action against a cluster and print its result."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import typer

from downrange.cli.account import client_config
from downrange.cli.options import Json, Namesrv, Watch
from downrange.cli.output import Answer, print_answer
from downrange.cli.until_signal import stop_on_signal

if TYPE_CHECKING:  # importing the client costs more than printing a help page
    from downrange.client.admin import Admin
    from downrange.client.brokers import Broker
    from downrange.client.session import Session

T = TypeVar("T")


def ask(namesrv: str | None, action: Callable[[Admin], Awaitable[T]]) -> T:
    from downrange.client.admin import Admin
    from downrange.transport.loop import run

    async def once() -> T:
        async with Admin(client_config(namesrv)) as admin, naming_the_nearest_topic(admin.session):
            return await action(admin)

    return run(once())


@contextlib.asynccontextmanager
async def naming_the_nearest_topic(session: Session) -> AsyncIterator[None]:
    """An error about a topic that does not exist names the topic that was probably meant."""
    from downrange.client.errors import NoRoute
    from downrange.model.errors import MQError

    try:
        yield
    except NoRoute as error:
        near = None
        with contextlib.suppress(MQError):
            near = await session.nearest_topic(error.topic)
        if near is None:
            raise
        raise NoRoute(error.topic, f"{error}; did you mean {near}?") from None


Action = Callable[..., Awaitable[Answer]]


def asks(action: Action) -> Callable[..., None]:
    """Make a command of an operator action: it has also `--namesrv` and `--json`, and it prints the answer."""

    def command(*, namesrv: Namesrv = None, json: Json = False, **given: Any) -> None:
        print_answer(ask(namesrv, lambda admin: action(admin, **given)), as_json=json)

    return _as_command(command, action)


def shows(action: Action) -> Callable[..., None]:
    """Make a command of an action that changes nothing: as `asks`, and with `--watch` it is done again and again."""

    def command(*, namesrv: Namesrv = None, json: Json = False, watch: Watch = None, **given: Any) -> None:
        if watch is None:
            print_answer(ask(namesrv, lambda admin: action(admin, **given)), as_json=json)
        else:
            ask(namesrv, lambda admin: again_and_again(lambda: action(admin, **given), json, watch))

    return _as_command(command, action)


async def again_and_again(action: Callable[[], Awaitable[Answer]], as_json: bool, seconds: float) -> None:
    """Print an answer every so many seconds, on a terminal each in the place of the one before, until Ctrl-C."""
    with stop_on_signal() as stop:
        while not stop.is_made:
            answer = await stop.or_result(action())
            if answer is None:
                return
            if sys.stdout.isatty() and not as_json:
                print("\033[H\033[2J", end="")
            with contextlib.suppress(typer.Exit):  # a server that is away now may be back the next time
                print_answer(answer, as_json=as_json)
            sys.stdout.flush()
            await stop.or_result(asyncio.sleep(seconds))


def _as_command(command: Callable[..., None], action: Action) -> Callable[..., None]:
    """Give `command` the parameters of the action beside its own, and its text."""
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
