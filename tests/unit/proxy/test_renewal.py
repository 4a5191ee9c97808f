"""Leases of push consumers: when they are renewed, and when they are given up."""

from __future__ import annotations

from typing import cast

from downrange.clock import ManualClock
from downrange.protocol.bodies.pop import ReceiptHandle
from downrange.protocol.errors import InternalError
from downrange.proxy.backend import Backend
from downrange.proxy.handles import Handle
from downrange.proxy.renewal import Renewal
from downrange.transport.errors import RequestTimedOut


class Leasing:
    """The one method of a backend that renewal needs; `fails` are the errors of the next calls."""

    def __init__(self, clock: ManualClock) -> None:
        self.changes: list[int] = []
        self.fails: list[Exception] = []
        self._clock = clock

    async def change_invisible(self, topic: str, group: str, handle: ReceiptHandle, millis: int) -> ReceiptHandle:
        if self.fails:
            raise self.fails.pop()
        self.changes.append(millis)
        return handle._replace(pop_time=self._clock.now(), invisible_time=millis)


def setup() -> tuple[ManualClock, Leasing, Renewal, str]:
    clock = ManualClock()
    backend = Leasing(clock)
    renewal = Renewal(cast(Backend, backend), clock)
    handle = Handle(ReceiptHandle(0, clock.now(), 60_000, 1, 0, "broker-a", 0, 0), 4711)
    renewal.add("client", "T", "g", handle)
    return clock, backend, renewal, str(handle)


async def test_a_lease_is_renewed_shortly_before_it_ends_for_longer_times() -> None:
    clock, backend, renewal, text = setup()
    clock.tick(49)
    await renewal.renew()
    assert backend.changes == []
    clock.tick(2)
    await renewal.renew()
    clock.tick(51)
    await renewal.renew()
    assert backend.changes == [60_000, 180_000]
    current = renewal.take(text)
    assert current is not None
    assert current.lease.invisible_time == 180_000
    assert current.log_offset == 4711
    assert renewal.take(text) is None
    assert len(renewal) == 0


async def test_the_messages_of_a_client_that_left_are_visible_soon() -> None:
    _, backend, renewal, text = setup()
    await renewal.release("another")
    assert backend.changes == []
    await renewal.release("client")
    assert backend.changes == [1000]
    assert renewal.take(text) is None
    assert list(renewal.clients) == []


async def test_a_time_out_is_tried_again_a_refusal_is_not() -> None:
    clock, backend, renewal, _ = setup()
    clock.tick(51)
    backend.fails = [RequestTimedOut("slow")]
    await renewal.renew()
    assert len(renewal) == 1
    backend.fails = [InternalError("no such lease")]
    await renewal.renew()
    assert len(renewal) == 0


async def test_no_lease_is_renewed_for_ever() -> None:
    clock, backend, renewal, _ = setup()
    for _ in range(40):
        if not len(renewal):
            break
        clock.tick(51)
        for _ in range(70):
            await renewal.renew()
            clock.tick(50)
    assert len(renewal) == 0
    assert sum(backend.changes) <= 4.2 * 3_600_000
