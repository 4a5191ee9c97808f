"""Keeps a snapshot fresh: one small question after another to each broker, as `schedule` says.

A broker that does not answer within two seconds keeps its old figures, with their age and the error, and is asked for
its figures alone until it answers again. A task for each broker, so that a silent one holds up nobody.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, TypeVar

from downrange.client.brokers import Broker
from downrange.client.errors import ClientError
from downrange.client.per_server import ask_each
from downrange.clock import Clock
from downrange.console.answers import Answers, sets_of
from downrange.console.clusters import ANSWER_SECONDS, Cluster
from downrange.console.history import DAY
from downrange.console.history_file import HistoryFile
from downrange.console.metrics import MetricsWatch
from downrange.console.schedule import AT_ONCE, Budget, Kind, Pace, Question, Tier, Wanted, due
from downrange.console.snapshot import BrokerState, Controllers, GroupState, sum_known
from downrange.model.errors import MQError
from downrange.model.text import Text, said_by
from downrange.model.topics import DLQ_PREFIX

log = logging.getLogger(__name__)

T = TypeVar("T")

RECORD_SECONDS: Final = 10.0
ROUND_SECONDS: Final = 1.0
"""After this time it is looked again which questions are the most urgent."""
LOST_MILLIS: Final = 24 * 3600 * 1000
_BROKER: Final = "broker:"


class AnswerTimedOut(ClientError):
    """A server did not answer in the time that the console gives it."""


class Sampler:
    """Asks the servers of one cluster. Runs on the event loop of the console; `run` ends when it is cancelled."""

    def __init__(self, cluster: Cluster, pace: Pace, file: HistoryFile) -> None:
        self._cluster = cluster
        self._clock: Clock = cluster.clock
        self._pace = pace
        self._file = file
        self._answers = Answers(cluster.snapshot, self._clock)
        self._watches: dict[str, _Watch] = {}
        self._controllers: list[str] = []
        self._thinned = 0.0
        self._known_before: dict[str, int] = {}
        """Brokers of the last day, by name, and when each was last heard: what the file knew at the start."""
        self.questions = 0

    async def run(self) -> None:
        """Watch the cluster until cancelled."""
        self.load()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._record_regularly())
            if self._cluster.metrics:
                tasks.create_task(MetricsWatch(self._cluster, self.ask_again).run())
            while True:
                await self._look_for_brokers(tasks)
                await self._clock.sleep(self._pace.brokers)

    def soon(self) -> None:
        """Ask for names and configurations again at once: we have changed something."""
        self._forget_answers(Question(Kind.CONFIGS), Question(Kind.SETTINGS))

    def ask_again(self, group: str) -> None:
        """Ask for the progress and the members of a group at once: we have moved it."""
        self._forget_answers(Question(Kind.GROUP, group), Question(Kind.MEMBERS, group))

    def nudge(self) -> None:
        """A page was opened: what it shows may be due."""
        self._forget_answers()

    def _forget_answers(self, *questions: Question) -> None:
        for watch in self._watches.values():
            for question in questions:
                watch.asked.pop(question, None)
            watch.wake.set()

    @property
    def charged(self) -> float:
        """Seconds of the time of all brokers that the questions took, apart from the first about each group."""
        return sum(watch.budget.charged for watch in self._watches.values())

    # --- which brokers there are --------------------------------------------------------------------------------

    async def _look_for_brokers(self, tasks: asyncio.TaskGroup) -> None:
        snapshot = self._cluster.snapshot
        try:
            brokers = await _in_time(self._cluster.admin.session.brokers(), ANSWER_SECONDS)
        except MQError as error:
            snapshot.error = said_by(error)
            return
        now = self._clock.now()
        if not snapshot.at:
            tasks.create_task(self._look_at_namesrvs())
        snapshot.at, snapshot.error = now, None
        self.keep_list(brokers, now)
        for broker in brokers:
            if broker.address not in self._watches:
                watch = self._watches[broker.address] = _Watch(Budget(self._pace))
                watch.task = tasks.create_task(self._keep_asking(broker, watch))

    def keep_list(self, brokers: list[Broker], now: int) -> None:
        """Take over the list of brokers; those that are gone are remembered for a day."""
        snapshot = self._cluster.snapshot
        had_master = {one.name for one in snapshot.masters}
        listed = {broker.address for broker in brokers}
        names = {broker.name for broker in brokers if broker.broker_id == 0}
        ids = {(broker.name, broker.broker_id) for broker in brokers}
        for address in [address for address in snapshot.brokers if address not in listed]:
            gone = snapshot.brokers.pop(address)
            self._stop_watching(address)
            if not gone.is_master:
                snapshot.lost_slaves.setdefault((gone.name, gone.broker.broker_id), now)
        for name in had_master - names:
            snapshot.lost.setdefault(name, now)
            snapshot.forget_rates(name)
        snapshot.lost |= self._known_before
        self._known_before = {}
        for name in names:
            snapshot.lost.pop(name, None)
        for slave in ids:
            snapshot.lost_slaves.pop(slave, None)
        snapshot.forget_lost(now - LOST_MILLIS)
        for broker in brokers:
            state = snapshot.brokers.setdefault(broker.address, BrokerState(broker))
            if state.broker != broker:  # a slave that became master, or the reverse, is asked other questions
                state.broker = broker
                self._stop_watching(broker.address)

    def _stop_watching(self, address: str) -> None:
        watch = self._watches.pop(address, None)
        if watch is not None and watch.task is not None:
            watch.task.cancel()

    async def _look_at_namesrvs(self) -> None:
        while True:
            answers = await ask_each(["settings"], lambda _: self._cluster.admin.namesrv.config())
            for found in answers.done.values():
                self._cluster.snapshot.namesrvs = dict(found.done)
                self._cluster.snapshot.namesrv_errors = {name: said_by(error) for name, error in found.failed.items()}
            if any(one.settings for one in self._cluster.snapshot.brokers.values()):
                self._controllers = self._cluster.snapshot.controller_addresses
            if self._controllers:  # those that were named last, where no broker is left to name them
                await self._look_at_controllers(self._controllers)
            await self._clock.sleep(self._pace.configs)

    async def _look_at_controllers(self, addresses: list[str]) -> None:
        """Who leads, and which replicas are in sync."""
        controllers = self._cluster.admin.controllers
        snapshot = self._cluster.snapshot
        try:
            views = await _in_time(controllers.metadata(addresses))
        except MQError as error:
            snapshot.controllers = Controllers(errors={address: said_by(error) for address in addresses})
            return
        leaders = [view.controller_leader_address or address for address, view in views.done.items() if view.is_leader]
        found = Controllers(
            leaders[0] if leaders else "", {name: said_by(error) for name, error in views.failed.items()}
        )
        if found.leader:
            try:
                names = sorted({one.name for one in snapshot.brokers.values()} | set(snapshot.lost))
                told = await _in_time(controllers.sync_state(addresses, names))
                found.sets = sets_of(told)
            except MQError as error:
                found.errors[found.leader] = said_by(error)
        snapshot.controllers = found

    # --- one broker -----------------------------------------------------------------------------------------------

    async def _keep_asking(self, broker: Broker, watch: _Watch) -> None:
        state = self._cluster.snapshot.brokers[broker.address]
        while True:
            now = self._clock.monotonic()
            questions, wait = due(self._wanted(state, watch, now), watch.asked, self._pace, now)
            watch.wake.clear()
            if not questions:
                await _wait(watch.wake, wait)
            watch.asked_last = 0
            for question in questions:
                await self._ask_within_budget(broker, state, watch, question)
                watch.asked_last += 1
                if state.error is not None or watch.wake.is_set() or self._clock.monotonic() > now + ROUND_SECONDS:
                    break  # something more urgent may be due now

    async def _ask_within_budget(self, broker: Broker, state: BrokerState, watch: _Watch, question: Question) -> None:
        is_at_once = question.kind in AT_ONCE and question not in watch.known
        watch.known.add(question)
        watch.asked[question] = began = self._clock.monotonic()
        computed = time.thread_time()
        await self._ask(broker, state, question)
        now = self._clock.monotonic()
        if question in watch.asked:  # else it is to be asked again: we changed something meanwhile
            watch.asked[question] += self._pace.longer(question.kind, now - began)
        if is_at_once or state.is_silent:  # a broker that does not answer is asked less often anyway
            await self._clock.sleep(1 / self._pace.most_per_second)
            return
        watch.budget.charge(now, now - began, time.thread_time() - computed)
        if not await _wait(watch.wake, watch.budget.rest(now)):
            return
        await self._clock.sleep(watch.budget.rest(self._clock.monotonic(), is_nudged=True))

    async def _ask(self, broker: Broker, state: BrokerState, question: Question) -> None:
        self.questions += 1
        admin = self._cluster.admin
        try:
            match question:
                case (Kind.RUNTIME, _, _):
                    self._answers.runtime(state, await _in_time(admin.cluster.runtime_of(broker)))
                case (Kind.CONFIGS, _, _):
                    self._answers.configs(
                        state,
                        await _in_time(admin.topics.configs_on(broker)),
                        await _in_time(admin.groups.configs_of(broker)),
                    )
                case (Kind.SETTINGS, _, _):
                    answer = await _in_time(admin.cluster.config(broker=broker.address))
                    state.settings = next((one.table for one in answer.done.values()), state.settings)
                case (Kind.PRODUCERS, _, _):
                    found = await _in_time(admin.cluster.producers(broker=broker.address))
                    self._answers.producers(state, found.done.values())
                case (Kind.GROUP, group, _):
                    self._answers.progress(broker, group, await _in_time(admin.groups.progress_on(broker, group)))
                    self._remember_since(group)
                case (Kind.MEMBERS, group, _):
                    self._answers.members(broker, group, await _in_time(admin.groups.connections_on(broker, group)))
                case (Kind.TOPIC, topic, _):
                    self._answers.ends(broker, topic, await _in_time(admin.topics.status_on(broker, topic)))
                case (Kind.AGES, group, topic):
                    self._answers.ages(group, await _in_time(admin.offsets.time_spans_on(broker, group, topic)))
                case (Kind.WAITING, _, _):
                    delayed = await _in_time(admin.delayed.waiting_on(broker, limit=1))
                    self._answers.waiting(state, delayed, await _in_time(admin.transactions.open_on(broker)))
                case (Kind.MEMBER, group, member):
                    asking = admin.groups.running_info_from(broker, group, member)
                    self._answers.member(group, member, await _in_time(asking))
        except MQError as error:
            self._answers.failed(broker, state, question, said_by(error))
            if isinstance(error, AnswerTimedOut) and question.kind is not Kind.MEMBER:  # a member may be silent itself
                state.error, state.is_silent = said_by(error), True

    def _remember_since(self, name: str) -> None:
        """A group that was behind before the console started has been so since then."""
        group = self._cluster.snapshot.groups.get(name)
        if group is not None and group.behind_since == group.at:
            since = self._cluster.history.above_zero_since(f"group:{name}", self._clock.now() / 1000)
            group.behind_since = group.behind_since if since is None else int(since * 1000)

    # --- what is wanted -------------------------------------------------------------------------------------------

    def _wanted(self, state: BrokerState, watch: _Watch, now: float) -> Iterator[Wanted]:
        yield Wanted(Question(Kind.RUNTIME), Tier.OTHER)
        if state.error is not None:
            return
        yield Wanted(Question(Kind.SETTINGS), Tier.OTHER)
        if not state.is_master:
            return
        yield Wanted(Question(Kind.CONFIGS), Tier.OTHER)
        yield Wanted(Question(Kind.PRODUCERS), Tier.OTHER)
        yield Wanted(Question(Kind.WAITING), Tier.OTHER)
        for name in state.groups:
            group = self._cluster.snapshot.groups.get(name)
            if group is not None:
                yield from self._about_group(state, group, now)
        yield from self._about_topics(state, watch, now)

    def _about_topics(self, state: BrokerState, watch: _Watch, now: float) -> Iterator[Wanted]:
        """What somebody looks at, and of all others the next few in turn: there may be ten thousand.

        Where the budget is short, the turn gets a quarter of the questions.
        """
        for topic in self._cluster.watched.seen("topic", now):
            if topic in state.topics:
                yield Wanted(Question(Kind.TOPIC, topic), Tier.SEEN)
        names = list(state.topics)
        count = min(self._pace.topics_per_second, max(1, watch.asked_last // 4), len(names))
        for _ in range(count):
            watch.turn = (watch.turn + 1) % len(names)
            yield Wanted(Question(Kind.TOPIC, names[watch.turn]), Tier.OTHER)

    def _about_group(self, state: BrokerState, group: GroupState, now: float) -> Iterator[Wanted]:
        is_behind = bool(group.behind)
        tier = Tier.BEHIND if is_behind else Tier.OTHER
        if self._cluster.watched.is_seen("group", group.name, now):
            tier = Tier.SEEN
        yield Wanted(Question(Kind.GROUP, group.name), tier)
        yield Wanted(Question(Kind.MEMBERS, group.name), tier)
        if DLQ_PREFIX + group.name in state.topics:
            yield Wanted(Question(Kind.TOPIC, DLQ_PREFIX + group.name), tier)
        if is_behind:
            mine = {queue.topic for queue, at in group.queues.items() if at.behind and queue.broker_name == state.name}
            for topic in mine:
                yield Wanted(Question(Kind.AGES, group.name, topic), tier)
        if is_behind or tier is Tier.SEEN or len(group.members) > 1:
            for member in list(group.members.values()):
                if min(member.brokers, default="") == state.name:  # one broker asks a member on behalf of all
                    yield Wanted(Question(Kind.MEMBER, group.name, member.client_id), tier)

    # --- history --------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """What the file knows of the last day."""
        begin = self._clock.now() / 1000 - DAY
        for name in self._file.names(self._cluster.name, begin):
            rows = self._file.figures(self._cluster.name, name, begin)
            self._cluster.history.put(name, rows)
            if name.startswith(_BROKER):
                self._known_before[name.removeprefix(_BROKER)] = int(rows[-1][0] * 1000)

    async def _record_regularly(self) -> None:
        while True:
            await self._clock.sleep(RECORD_SECONDS if self._cluster.snapshot.at else 1.0)
            rows = self.record()
            if rows:
                await asyncio.to_thread(self._file.write_figures, self._cluster.name, rows)
            if self._clock.monotonic() - self._thinned > 3600:
                self._thinned = self._clock.monotonic()
                await asyncio.to_thread(self._file.thin, self._clock.now() / 1000)

    def record(self) -> list[tuple[str, tuple[float, ...]]]:
        """Put the figures of now into the rings; the rows for the file, once a minute, of what has changed."""
        snapshot, history = self._cluster.snapshot, self._cluster.history
        seconds = self._clock.now() / 1000
        written: list[tuple[str, tuple[float, ...]]] = []
        figures: dict[str, tuple[float | None, ...]] = {
            "cluster": (
                sum_known(one.runtime.in_tps for one in snapshot.masters if one.runtime),
                sum_known(one.runtime.out_tps for one in snapshot.masters if one.runtime),
            )
        }
        for state in snapshot.masters:
            if state.at and state.error is None:
                figures[_BROKER + state.name] = (1,)
        for group in snapshot.groups.values():
            if group.at:
                oldest = group.oldest
                dead = snapshot.dead_letters(group.name)
                figures[f"group:{group.name}"] = (group.behind, None if oldest is None else oldest / 1000, dead)
        for topic in snapshot.user_topics():
            if topic.rate or self._cluster.watched.is_seen("topic", topic.name, self._clock.monotonic()):
                figures[f"topic:{topic.name}"] = (topic.rate,)
        for name, row in figures.items():
            if history.add(name, seconds, row) and any(row):
                written.append((name, (seconds, *(float("nan") if one is None else one for one in row))))
        return written


@dataclass(slots=True)
class _Watch:
    """What is kept about the questions to one broker."""

    budget: Budget
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when something may be due before its time: a page was opened, or we changed something."""
    asked: dict[Question, float] = field(default_factory=dict)
    """When each question was last asked, in monotonic seconds."""
    known: set[Question] = field(default_factory=set)
    """Questions that were ever asked."""
    asked_last: int = 0
    """Questions of the last round."""
    turn: int = -1
    """The place of the topic whose turn it was last."""
    task: asyncio.Task[None] | None = None


async def _wait(wake: asyncio.Event, seconds: float) -> bool:
    """Wait until somebody wakes us, at most for some seconds; whether somebody did."""
    try:
        async with asyncio.timeout(seconds):
            await wake.wait()
    except TimeoutError:
        return False
    return True


async def _in_time(answer: Awaitable[T], seconds: float = ANSWER_SECONDS) -> T:
    """The answer, or AnswerTimedOut after two seconds."""
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError:
        raise AnswerTimedOut(Text("no answer within {seconds:g} s", seconds=seconds)) from None


@asynccontextmanager
async def watching(clusters: list[Cluster], pace: Pace, file: HistoryFile) -> AsyncIterator[dict[str, Sampler]]:
    """Samplers of all clusters, for the length of a block."""
    samplers = {cluster.name: Sampler(cluster, pace, file) for cluster in clusters}
    tasks = [asyncio.create_task(sampler.run(), name=f"sampler {name}") for name, sampler in samplers.items()]
    for task in tasks:
        task.add_done_callback(_tell_failure)
    try:
        yield samplers
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=2)  # one that is connecting to a server that is gone ends later
        for cluster in clusters:
            await cluster.close()


def _tell_failure(task: asyncio.Task[None]) -> None:
    """A sampler that ends by itself has a fault: pages go on with old figures, and the log says why."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("sampler failed task=%s", task.get_name(), exc_info=error)
