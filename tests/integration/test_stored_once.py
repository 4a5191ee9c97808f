"""A bug behind the storing of what several connections sent: the broker stores nothing a second time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from downrange.broker.handlers.sends import Sends
from downrange.broker.message_writer import MessageWriter
from downrange.broker.statistics import LARGE, Statistics
from downrange.broker.waiting_pulls import WaitingPulls
from downrange.compiled import steps
from downrange.protocol.framing import encode
from downrange.store.config import FlushDiskType
from downrange.store.dispatcher import Dispatcher
from downrange.store.index.key_index import KeyIndex
from downrange.store.log.commit_log import CommitLog
from tests.support.broker_client import BrokerClient, client_of, standalone
from tests.support.callers import callers, reply

CALLERS = 12
TOGETHER = 1 if steps is None else CALLERS
"""How many callers' requests are taken together, and so how many find their connections closed for a bug."""
BEFORE = [(Sends, "_read"), (CommitLog, "append")]
BEHIND = [
    (Dispatcher, "_spill"),
    (KeyIndex, "put"),
    (Statistics, "put_large"),
    (MessageWriter, "_applied"),
    (WaitingPulls, "notify"),
    (Sends, "_answer"),
    (Statistics, "sent_together"),
]
AT_ONCE = [(owner, name, FlushDiskType.ASYNC_FLUSH) for owner, name in BEHIND]
WHEN_FLUSHED = [(owner, name, FlushDiskType.SYNC_FLUSH) for owner, name in [*BEHIND, (MessageWriter, "tell_when_safe")]]


class OneFailure:
    """A function that fails the first time, before or after it has done what it does."""

    def __init__(self, owner: type, name: str, *, afterwards: bool) -> None:
        self.has_failed = False
        self._function = getattr(owner, name)
        self._afterwards = afterwards

    def __get__(self, owner: object, kind: type) -> Any:
        return lambda *given: self._call(owner, *given)

    def _call(self, *given: object) -> object:
        if self.has_failed:
            return self._function(*given)
        self.has_failed = True
        if self._afterwards:
            self._function(*given)
        raise ZeroDivisionError("a bug")


def body(number: int) -> bytes:
    return b"%d " % number + bytes(LARGE)


async def send_all(client: BrokerClient, port: int) -> list[bytes]:
    """Send one message over each of many connections at once; those that were acknowledged."""
    acknowledged = []
    with callers(port, CALLERS) as opened:
        for number, caller in enumerate(opened):
            caller.sendall(encode(client.send_command("orders", body(number)), number))
        for number, caller in enumerate(opened):
            try:
                answer = await reply(caller)
            except ConnectionResetError:
                continue
            assert (answer.code, answer.opaque) == (0, number)
            acknowledged.append(body(number))
    return acknowledged


async def stored(client: BrokerClient) -> Counter[bytes]:
    await client.send("orders", b"last")  # if an error has kept queues from growing, they do now
    found: Counter[bytes] = Counter()
    offset = 1
    while b"last" not in found:
        messages, answer = await client.pull("orders", offset=offset)
        found.update(message.body for message in messages)
        offset = answer.next_begin_offset
    return found - Counter([b"last"])


@pytest.mark.parametrize("afterwards", [False, True], ids=["begun", "done"])
@pytest.mark.parametrize(
    ("owner", "name", "flush"), [*AT_ONCE, *WHEN_FLUSHED], ids=lambda step: getattr(step, "__name__", step)
)
async def test_what_was_stored_before_a_bug_is_not_stored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, flush: FlushDiskType, afterwards: bool
) -> None:
    async with (
        standalone(tmp_path, store_options={"flush_disk_type": flush}) as broker,
        client_of(broker) as client,
        client_of(broker) as consumer,
    ):
        await client.send("orders", b"first")
        waiting = consumer.connection.request_nowait(consumer.pull_command("orders", offset=1, wait_millis=15_000))
        await consumer.heartbeat()  # the pull has been taken by now
        failure = OneFailure(owner, name, afterwards=afterwards)
        monkeypatch.setattr(owner, name, failure)
        acknowledged = await send_all(client, broker.server.port)
        assert failure.has_failed
        waiting.cancel()
        found = await stored(client)
        assert set(found) == {body(number) for number in range(CALLERS)}
        assert set(found.values()) == {1}
        if name not in ("_answer", "sent_together"):  # from there on the senders may have their replies already
            assert len(acknowledged) == CALLERS - TOGETHER
        assert len(await send_all(client, broker.server.port)) == CALLERS, "the broker goes on"


@pytest.mark.parametrize(("owner", "name"), BEFORE, ids=lambda step: getattr(step, "__name__", step))
async def test_a_bug_before_the_storing_stores_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    async with standalone(tmp_path) as broker, client_of(broker) as client:
        await client.send("orders", b"first")
        failure = OneFailure(owner, name, afterwards=False)
        monkeypatch.setattr(owner, name, failure)
        acknowledged = await send_all(client, broker.server.port)
        assert failure.has_failed
        assert len(acknowledged) == CALLERS - TOGETHER
        assert await stored(client) == Counter(acknowledged)
        assert len(await send_all(client, broker.server.port)) == CALLERS, "the broker goes on"
