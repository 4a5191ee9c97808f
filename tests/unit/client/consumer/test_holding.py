"""Leases of a push consumer: what is renewed, and what is said to brokers in which order."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import pytest

from downrange.client.consumer.pop.holding import Holding
from downrange.client.consumer.pop.leases import Leases
from downrange.client.consumer.pop.messages import PoppedMessage
from downrange.client.consumer.pop.queue import PopQueue
from downrange.clock import ManualClock
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue
from downrange.protocol.bodies.pop import ReceiptHandle
from downrange.protocol.errors import InternalError, MessageIllegal
from tests.unit.client.consumer.received import message as received

QUEUE = MessageQueue("orders", "broker-a", -1)
INVISIBLE = 60.0


class NotedLeases:
    """In the place of brokers: notes what it is asked, and answers when the gate is open."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.asked: list[tuple[str, str]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: MQError | None = None

    async def _note(self, what: str, message: PoppedMessage) -> None:
        self.asked.append((what, str(message.receipt_handle.pop_time)))
        await self.gate.wait()
        if self.error is not None:
            raise self.error

    async def change_invisible_duration(self, message: PoppedMessage, seconds: float) -> None:
        await self._note(f"change {seconds:g}", message)
        changed = message.receipt_handle._replace(pop_time=self._clock.now(), invisible_time=int(seconds * 1000))
        msgspec.structs.force_setattr(message, "receipt_handle", changed)

    async def ack(self, messages: Sequence[PoppedMessage], patience: float) -> Mapping[PoppedMessage, MQError]:
        self.asked.append((f"ack {len(messages)}", str(messages[0].receipt_handle.pop_time)))
        await self.gate.wait()
        return {}

    async def make_dead_letter(self, message: PoppedMessage) -> None:
        await self._note("bury", message)


class Case:
    def __init__(self) -> None:
        self.clock = ManualClock(1_000_000)
        self.leases = NotedLeases(self.clock)
        self.holding = Holding(cast(Leases, self.leases), INVISIBLE, self.clock)
        self.queue = PopQueue(QUEUE)

    def hold(self, count: int = 1) -> list[PoppedMessage]:
        found = [self._message(offset) for offset in range(count)]
        self.queue.put(found)
        self.holding.add(self.queue, found)
        return found

    def _message(self, offset: int) -> PoppedMessage:
        plain: dict[str, Any] = {
            name: getattr(received(offset), name) for name in received(offset).__struct_fields__ if name != "plain"
        }
        handle = ReceiptHandle(0, self.clock.now(), int(INVISIBLE * 1000), 3, 0, "broker-a", 0, offset)
        return PoppedMessage(**plain, wire_topic="orders", receipt_handle=handle)

    async def turn(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.fixture
async def case() -> Case:
    return Case()


async def test_a_lease_is_renewed_when_half_of_it_is_over(case: Case) -> None:
    (message,) = case.hold()
    await case.clock.advance(29)
    case.holding.renew()
    await case.turn()
    assert case.leases.asked == []
    await case.clock.advance(2)
    case.holding.renew()
    case.holding.renew()  # once is enough
    await case.turn()
    assert case.leases.asked == [("change 60", "1000000")]
    assert message.receipt_handle.pop_time == 1_031_000


async def test_an_acknowledgement_waits_for_the_renewal_under_way(case: Case) -> None:
    (message,) = case.hold()
    await case.clock.advance(40)
    case.leases.gate.clear()
    case.holding.renew()
    await case.turn()
    case.holding.ack([message])
    await case.turn()
    assert case.leases.asked == [("change 60", "1000000")]
    case.leases.gate.set()
    await case.turn()
    assert case.leases.asked[1:] == [("ack 1", "1040000")]  # with the new handle


async def test_a_failure_waits_for_the_renewal_under_way_too(case: Case) -> None:
    (message,) = case.hold()
    await case.clock.advance(40)
    case.leases.gate.clear()
    case.holding.renew()
    await case.turn()
    case.holding.fail(message, 10)
    await case.turn()
    case.leases.gate.set()
    await case.turn()
    assert case.leases.asked == [("change 60", "1000000"), ("change 10", "1040000")]
    await case.clock.advance(100)
    case.holding.renew()
    await case.turn()
    assert len(case.leases.asked) == 2  # it is no longer ours


async def test_acknowledgements_that_come_meanwhile_go_together(case: Case) -> None:
    messages = case.hold(5)
    case.leases.gate.clear()
    case.holding.ack(messages[:1])
    await case.turn()
    case.holding.ack(messages[1:2])
    case.holding.ack(messages[2:])
    await case.turn()
    case.leases.gate.set()
    await case.holding.settle()
    assert [what for what, _ in case.leases.asked] == ["ack 1", "ack 4"]
    assert case.queue.message_count == 0


@pytest.mark.parametrize(("error", "is_kept"), [(InternalError("busy"), True), (MessageIllegal("gone"), False)])
async def test_a_lease_that_a_broker_refuses_to_renew_is_given_up(case: Case, error: MQError, is_kept: bool) -> None:
    case.hold()
    case.leases.error = error
    await case.clock.advance(40)
    case.holding.renew()
    await case.turn()
    case.holding.renew()
    await case.turn()
    assert len(case.leases.asked) == (2 if is_kept else 1)
    assert case.queue.message_count == is_kept


async def test_an_error_does_not_stop_anything(case: Case) -> None:
    messages = case.hold(3)
    case.leases.error = InternalError("no")
    case.holding.bury(messages[0])
    case.holding.give_back(messages[1:])
    await case.holding.settle()
    assert [what for what, _ in case.leases.asked] == ["bury", "change 0", "change 0"]
    assert case.queue.message_count == 0
    await case.holding.close()
