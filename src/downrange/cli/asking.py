"""Run one operator action against a cluster and print its result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from downrange.cli.output import Answer, print_answer

if TYPE_CHECKING:  # importing the client costs more than printing a help page
    from downrange.client.admin import Admin
    from downrange.client.brokers import Broker

T = TypeVar("T")


def ask(namesrv: str | None, action: Callable[[Admin], Awaitable[T]]) -> T:
    from downrange.client.admin import Admin
    from downrange.client.config import ClientConfig
    from downrange.transport.loop import run

    async def once() -> T:
        async with Admin(ClientConfig.of(namesrv)) as admin:
            return await action(admin)

    return run(once())


def answer(namesrv: str | None, as_json: bool, action: Callable[[Admin], Awaitable[Answer]]) -> None:
    print_answer(ask(namesrv, action), as_json=as_json)


def broker_row(broker: Broker) -> dict[str, object]:
    """The fields with which every row about a broker begins."""
    return {"broker": broker.name or None, "address": broker.address or None}
