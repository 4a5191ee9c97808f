"""The broker sets of the leading controller: its copy of the documents in etcd, changed only together with them.

Every change is one transaction with two conditions: the document is as it was read, and this controller still leads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote
from weakref import WeakValueDictionary

import msgspec

from downrange.controller.coordination import Compare, Coordination, KeyValue, OutcomeUnknown, Put, Target
from downrange.controller.leadership import Leadership, Term
from downrange.controller.state import BrokerSet, Verdict, decode_set, encode_set
from downrange.protocol.errors import BrokerError, NotLeader

log = logging.getLogger(__name__)

MOST_ATTEMPTS: Final = 8
Event = Callable[[BrokerSet | None], Verdict]
"""Decides about a request from the state of its set."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Where things are in etcd."""

    prefix: str

    @property
    def leader(self) -> str:
        return f"{self.prefix}/leader"

    @property
    def sets(self) -> str:
        return f"{self.prefix}/set/"

    def set(self, cluster_name: str, broker_name: str) -> str:
        return f"{self.sets}{quote(cluster_name, safe='')}/{quote(broker_name, safe='')}"


@dataclass(frozen=True, slots=True)
class _Document:
    state: BrokerSet
    mod_revision: int


class BrokerSets:
    """All broker sets by broker name. `change` alone changes one; the changes of one set wait for each other."""

    def __init__(self, store: Coordination, keys: Keys) -> None:
        self._store = store
        self._keys = keys
        self._documents: dict[str, _Document] = {}
        self._doubtful: set[str] = set()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._leadership: Leadership | None = None
        self.commits = 0
        self.conflicts = 0

    def serve(self, leadership: Leadership) -> None:
        """Answer for as long as this leadership has a term."""
        self._leadership = leadership

    def __iter__(self) -> Iterator[BrokerSet]:
        """The sets, without those that were cleaned."""
        return iter([document.state for document in self._documents.values() if not document.state.is_cleaned])

    async def load(self) -> None:
        """Read all documents: a new term begins."""
        found = await self._store.range(self._keys.sets, is_prefix=True)
        self._documents = {}
        self._doubtful.clear()
        for item in found.items:
            self._take(item)

    @property
    def term(self) -> Term:
        """The present term. Raises NotLeader."""
        assert self._leadership is not None
        term = self._leadership.term
        if term is None:
            raise NotLeader("the controller is not leader")
        return term

    def check_leading(self) -> None:
        """Raise NotLeader unless this controller leads."""
        _ = self.term

    def __len__(self) -> int:
        return len(self._documents)

    def settled(self, broker_name: str) -> BrokerSet | None:
        """The state of a set; None while it is being changed, or after a change whose outcome is not known."""
        lock = self._locks.get(broker_name)
        if broker_name in self._doubtful or (lock is not None and lock.locked()):
            return None
        return self.get(broker_name)

    def get(self, broker_name: str) -> BrokerSet | None:
        """The state of a set as this leader last saw it. Raises NotLeader."""
        self.check_leading()
        document = self._documents.get(broker_name)
        return None if document is None else document.state

    async def confirmed(self, broker_name: str) -> BrokerSet | None:
        """The state of a set, after etcd confirmed that this controller leads: it is not older than the question."""
        term = self.term
        if broker_name in self._doubtful:
            async with self._lock(broker_name):
                await self._read_again(broker_name)
        committed = await self._store.txn([term.guard], [])
        if not committed.is_done:
            self._lose(term)
        return self.get(broker_name)

    async def change(self, broker_name: str, event: Event) -> tuple[Verdict, BrokerSet | None]:
        """Let an event happen; its verdict, and the state after it.

        Raises NotLeader, and StoreUnavailable when etcd cannot be asked. After OutcomeUnknown the event may have
        happened: the document is read before anything else is decided about the set.
        """
        async with self._lock(broker_name):
            for _ in range(MOST_ATTEMPTS):
                term = self.term
                if broker_name in self._doubtful:
                    await self._read_again(broker_name)
                document = self._documents.get(broker_name)
                verdict = event(None if document is None else document.state)
                if verdict.after is None:
                    return verdict, None if document is None else document.state
                if await self._commit(term, document, verdict.after):
                    return verdict, verdict.after
        raise BrokerError(f"broker set {broker_name} changes too often: try again")

    async def _commit(self, term: Term, document: _Document | None, after: BrokerSet) -> bool:
        """Store a document; False if it was changed by another, and then it is read."""
        key = self._keys.set(after.cluster_name, after.broker_name)
        same = Compare(key, Target.MODIFIED, 0 if document is None else document.mod_revision)
        try:
            committed = await self._store.txn([same, term.guard], [Put(key, encode_set(after))])
        except OutcomeUnknown:
            self._doubtful.add(after.broker_name)
            raise
        if committed.is_done:
            self.commits += 1
            self._documents[after.broker_name] = _Document(after, committed.revision)
            return True
        self.conflicts += 1
        leader = next((item for item in committed.items if item.key == self._keys.leader), None)
        if leader is None or leader.create_revision != term.create_revision:
            self._lose(term)
        for item in committed.items:
            if item.key == key:
                self._take(item)
        return False

    def _lock(self, broker_name: str) -> asyncio.Lock:
        lock = self._locks.get(broker_name)
        if lock is None:
            lock = self._locks[broker_name] = asyncio.Lock()
        return lock

    def _lose(self, term: Term) -> None:
        assert self._leadership is not None
        self._leadership.lost(term)
        raise NotLeader("the controller is not leader any more")

    async def _read_again(self, broker_name: str) -> None:
        """Find out what became of a change whose outcome nobody knew."""
        found = await self._store.range(self._keys.sets, is_prefix=True)
        for item in found.items:
            if item.key.endswith(f"/{quote(broker_name, safe='')}"):
                self._take(item)
        self._doubtful.discard(broker_name)

    def _take(self, item: KeyValue) -> None:
        try:
            state = decode_set(item.value)
        except msgspec.MsgspecError as error:
            log.error("document cannot be read key=%s reason=%s", item.key, error)
            return
        self._documents[state.broker_name] = _Document(state, item.mod_revision)
