"""One question to several servers, and the answer or error of each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from downrange.model.errors import MQError

K = TypeVar("K")
T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class PerServer(Generic[K, T]):
    """The answers of servers in `done`, the errors of others in `failed`.

    Holds always: every server that was asked stands in exactly one of the two, in the order of asking.
    """

    done: dict[K, T] = field(default_factory=dict)
    failed: dict[K, MQError] = field(default_factory=dict)

    def raise_if_none(self) -> None:
        """Raise the first error when no server succeeded."""
        if not self.done and self.failed:
            raise next(iter(self.failed.values()))


async def ask_each(servers: Iterable[K], ask: Callable[[K], Awaitable[T]]) -> PerServer[K, T]:
    """Ask all servers at once; an error of one does not disturb the others."""

    async def one(server: K) -> T | MQError:
        try:
            return await ask(server)
        except MQError as error:
            return error

    asked = list(dict.fromkeys(servers))
    outcomes: PerServer[K, T] = PerServer()
    for server, answer in zip(asked, await asyncio.gather(*map(one, asked)), strict=True):
        if isinstance(answer, MQError):
            outcomes.failed[server] = answer
        else:
            outcomes.done[server] = answer
    return outcomes
