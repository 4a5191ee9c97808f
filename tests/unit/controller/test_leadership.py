"""Who leads, and until when, by a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from downrange.clock import ManualClock
from downrange.controller.coordination import Compare, Put, StoreUnavailable, Target
from downrange.controller.leadership import Leadership, Peer, Term
from downrange.controller.memory_store import MemoryStore


class Candidate:
    """A controller that only leads."""

    def __init__(self, name: str, store: MemoryStore, clock: ManualClock) -> None:
        self.offices: list[int] = []
        self.fails = False
        self.dead: dict[str, asyncio.Event] = {}
        """The leaders whose processes this candidate finds gone, by address."""
        self.leadership = Leadership(store, "/leader", Peer(name, f"{name}:1"), clock, self.take_office, self.gone)

    async def take_office(self, term: Term) -> None:
        if self.fails:
            raise StoreUnavailable("cannot read the documents")
        assert self.leadership.term is None  # nobody is answered before the documents were read
        self.offices.append(term.create_revision)

    async def gone(self, address: str) -> None:
        await self.dead.setdefault(address, asyncio.Event()).wait()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Leadership]:
        task = asyncio.create_task(self.leadership.run())
        await settle()
        try:
            yield self.leadership
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def leads(leadership: Leadership) -> bool:
    return leadership.term is not None


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def step(clock: ManualClock, seconds: float) -> None:
    """Move the clock in steps of a tenth, so that everybody acts in time."""
    for _ in range(round(seconds * 10)):
        await clock.advance(0.1)
        await settle()


async def test_one_leads_and_renews_and_another_follows_until_it_resigns() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    first, second = Candidate("a", store, clock), Candidate("b", store, clock)
    async with first.running() as leading:
        assert leads(leading)
        async with second.running() as following:
            assert following.term is None
            assert following.leader == Peer("a", "a:1")
            await step(clock, 20)
            assert leads(leading)
            assert 0 < leading.seconds_left <= 1.5
            assert following.term is None
            assert len(first.offices) == 1
        assert (await store.range("/leader")).items
    assert not (await store.range("/leader")).items  # resigned: nobody waits for the lease


async def test_the_office_is_free_at_once_when_the_leader_stops() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    async with Candidate("b", store, clock).running() as old:
        assert old.term is not None
        next_one = Candidate("a", store, clock)
        task = asyncio.create_task(next_one.leadership.run())
        await settle()
        assert not leads(next_one.leadership)
    await settle()
    assert leads(next_one.leadership)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_key_of_a_leader_whose_process_is_gone_is_removed_before_its_lease_ends() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    old, successor = Candidate("a", store, clock), Candidate("b", store, clock)
    async with old.running() as leading, successor.running() as following:
        await step(clock, 5)
        assert not leads(following)
        successor.dead["a:1"].set()
        await settle()
        assert leads(following)  # the clock stood still
        await step(clock, 0.6)  # if it was alive after all, its next renewal tells that it is replaced
        assert not leads(leading)
        assert leads(following)


async def test_a_leader_without_its_store_stops_half_a_second_before_its_lease_ends() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    candidate = Candidate("a", store, clock)
    async with candidate.running() as leading:
        await step(clock, 0.6)  # the first renewal went out after half a second
        store.is_down = True
        await step(clock, 1.3)
        assert leads(leading)
        await step(clock, 0.3)  # more than 1.5 s after that renewal
        assert not leads(leading)
        assert leading.seconds_left == 0
        store.is_down = False
        await step(clock, 1)
        assert leads(leading)  # the lease was still there: it is the same term
        assert len(candidate.offices) == 1


async def test_a_leader_that_was_cut_off_for_longer_than_its_lease_begins_a_new_term() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    candidate = Candidate("a", store, clock)
    async with candidate.running() as leading:
        store.is_down = True
        await step(clock, 7)
        assert not leads(leading)
        assert leading.leader is None
        store.is_down = False
        await step(clock, 1)
        assert leads(leading)
        assert len(candidate.offices) == 2


async def test_a_paused_leader_knows_at_once_that_its_time_is_over() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    async with Candidate("a", store, clock).running() as leading:
        assert leads(leading)
        clock.set(clock.now() + 60_000)  # nothing of it ran meanwhile
        assert not leads(leading)


async def test_a_lease_that_etcd_ended_is_noticed_with_the_next_renewal() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    candidate = Candidate("a", store, clock)
    async with candidate.running() as leading:
        before = leading.term
        store.revoke(next(iter(store._leases)))
        assert leading.term == before  # it cannot know yet, but its transactions fail
        assert before is not None
        assert not (await store.txn([before.guard], [Put("/x", b"")])).is_done
        await step(clock, 2)
        assert leads(leading)
        assert leading.term != before


async def test_a_term_that_a_transaction_ended_is_over() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    async with Candidate("a", store, clock).running() as leading:
        term = leading.term
        assert term is not None
        leading.lost(Term(-1, Compare("/leader", Target.CREATED, -1)))  # of an earlier term
        assert leads(leading)
        leading.lost(term)
        assert not leads(leading)


async def test_an_office_that_cannot_be_taken_is_given_up() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    candidate = Candidate("a", store, clock)
    candidate.fails = True
    async with candidate.running() as leading:
        await step(clock, 2)
        assert not leads(leading)
        candidate.fails = False
        await step(clock, 6)
        await store.range("/leader")  # the key of the first attempt goes with its lease
        await step(clock, 1)
        assert leads(leading)
