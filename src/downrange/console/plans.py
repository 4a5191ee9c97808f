"""Plans that were made and not carried out yet: kept for ten minutes, carried out once, and in the file of --history.

What a plan is, and that carrying it out compares the world with it first, is in `client/admin/planning.py`.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from downrange.client.admin import Admin
from downrange.client.admin.plans import Change, Plan, PlanDrifted, PlanKind, consumed_again, skipped
from downrange.clock import Clock
from downrange.console.history_file import HistoryFile
from downrange.console.users_file import Role
from downrange.model.errors import MQError
from downrange.model.text import Text, plural, said_by

KEPT_MILLIS: Final = 600_000
MOST_PLANS: Final = 500
MOVES: Final = (PlanKind.RESET, PlanKind.SKIP, PlanKind.CLONE, PlanKind.QUEUE)
_FOR_ADMINS: Final = (PlanKind.DELETE_TOPIC, PlanKind.DELETE_GROUP, PlanKind.BROKER_SETTINGS)


_INTERRUPTED: Final = Text(
    "the console ended while it carried this out; look at the cluster before you make another plan"
)


class PlanGone(MQError):
    """There is no such plan, or no longer."""


@dataclass(frozen=True, slots=True)
class PlanOutcome:
    """What came of a plan at one server."""

    server: str
    is_done: bool
    text: str


@dataclass(slots=True)
class KeptPlan:
    """A plan with a number, and later what came of it."""

    id: str
    cluster: str
    who: str
    plan: Plan
    command: str
    back: str
    outcomes: list[PlanOutcome] | None = None
    drifted: tuple[str, ...] = field(default=())

    @property
    def kind(self) -> PlanKind:
        return self.plan.request.kind

    @property
    def subject(self) -> str:
        return self.plan.request.name

    @property
    def role(self) -> Role:
        return Role.ADMIN if self.kind in _FOR_ADMINS else Role.OPERATOR

    @property
    def is_move(self) -> bool:
        return self.kind in MOVES

    @property
    def is_online(self) -> bool:
        """Whether members run, who go on while somebody looks at the plan."""
        return any(change.context.get("online") == "yes" for change in self.plan.changes)

    @property
    def state(self) -> str:
        if self.outcomes is not None:
            return "done" if all(one.is_done for one in self.outcomes) else "failed"
        return "refused" if self.drifted else "ready"

    def seconds_left(self, now: int) -> int:
        return max(0, (self.plan.made + KEPT_MILLIS - now) // 1000)


class Plans:
    """The plans of the last minutes. Used on the event loop of the console.

    Holds always: a plan that is being carried out says so in the file, so that no later console carries it out again.
    """

    def __init__(self, file: HistoryFile, clock: Clock) -> None:
        self._file = file
        self._clock = clock
        self._plans: dict[str, KeptPlan] = {}
        for _, text in sorted(file.plans()):
            kept = _decoded(text)
            if kept is not None:
                self._plans[kept.id] = kept

    def add(self, cluster: str, who: str, plan: Plan, command: str, back: str) -> KeptPlan:
        self._forget()
        kept = KeptPlan(secrets.token_hex(6), cluster, who, plan, command, back)
        self._plans[kept.id] = kept
        self._save(kept)
        return kept

    def _save(self, kept: KeptPlan) -> None:
        self._file.write_plan(kept.id, kept.plan.made, _encoded(kept))

    def get(self, plan_id: str, cluster: str) -> KeptPlan:
        kept = self._plans.get(plan_id)
        if kept is None or kept.cluster != cluster:
            raise PlanGone(Text("there is no plan {plan_id}; plans are kept for ten minutes", plan_id=plan_id))
        return kept

    async def apply(self, kept: KeptPlan, admin: Admin) -> list[PlanOutcome]:
        """Carry a plan out, once; raises PlanDrifted when the cluster is no longer as the plan saw it."""
        if kept.outcomes is not None:
            raise PlanGone(Text("plan {id} was carried out already", id=kept.id))
        if kept.seconds_left(self._clock.now()) <= 0:
            raise PlanGone(Text("plan {id} is older than ten minutes; make it again", id=kept.id))
        kept.outcomes = []  # a second request meanwhile must not carry it out, too
        self._save(kept)
        try:
            return await self._carry_out(kept, admin)
        finally:
            self._save(kept)

    async def _carry_out(self, kept: KeptPlan, admin: Admin) -> list[PlanOutcome]:
        try:
            answers = await admin.plans.apply(kept.plan, while_consuming=kept.is_move and kept.is_online)
        except PlanDrifted as error:
            kept.outcomes, kept.drifted = None, error.differences
            raise
        except MQError as error:
            kept.outcomes = [PlanOutcome("", False, said_by(error))]
            return kept.outcomes
        kept.outcomes = [
            *(PlanOutcome(str(server), True, Text("done")) for server in answers.done),
            *(PlanOutcome(str(server), False, said_by(error)) for server, error in answers.failed.items()),
        ]
        return kept.outcomes

    def _forget(self) -> None:
        now = self._clock.now()
        for plan_id in [key for key, one in self._plans.items() if now - one.plan.made > 2 * KEPT_MILLIS]:
            del self._plans[plan_id]
        while len(self._plans) >= MOST_PLANS:
            del self._plans[next(iter(self._plans))]
        self._file.forget_plans(now - 2 * KEPT_MILLIS)


class _SavedPlan(msgspec.Struct, kw_only=True):
    """A plan in the file: errors of servers are texts there."""

    id: str
    cluster: str
    who: str
    plan: Plan
    failed: dict[str, str]
    command: str
    back: str
    outcomes: list[PlanOutcome] | None
    drifted: tuple[str, ...]


def _encoded(kept: KeptPlan) -> bytes:
    saved = _SavedPlan(
        id=kept.id,
        cluster=kept.cluster,
        who=kept.who,
        plan=replace(kept.plan, failed={}),
        failed={server: str(error) for server, error in kept.plan.failed.items()},
        command=kept.command,
        back=kept.back,
        outcomes=kept.outcomes,
        drifted=kept.drifted,
    )
    return msgspec.json.encode(saved, enc_hook=str)  # sentences are kept in English


def _decoded(text: bytes) -> KeptPlan | None:
    """A plan from the file; None for one that another version wrote."""
    try:
        saved = msgspec.json.decode(text, type=_SavedPlan, dec_hook=_no_errors)
    except (msgspec.DecodeError, NotImplementedError):
        return None
    plan = replace(saved.plan, failed={server: MQError(error) for server, error in saved.failed.items()})
    outcomes = [PlanOutcome("", False, _INTERRUPTED)] if saved.outcomes == [] else saved.outcomes
    return KeptPlan(saved.id, saved.cluster, saved.who, plan, saved.command, saved.back, outcomes, saved.drifted)


def _no_errors(kind: type, value: object) -> object:
    raise NotImplementedError(f"{kind} in a plan that was saved")


def sentences(plan: Plan) -> list[Text]:
    """What a plan does, in words."""
    request = plan.request
    if request.kind in MOVES:
        return _move_sentences(plan)
    notes = [Text("{note}.", note=note) for note in plan.notes]
    match request.kind:
        case PlanKind.DELETE_TOPIC:
            found = plural(
                sum(int(str(change.context.get("messages") or 0)) for change in plan.changes),
                "{count} message of {topic} can no longer be read.",
                "{count} messages of {topic} can no longer be read.",
                topic=request.name,
            )
            return [found, *(notes or [Text("No group reads it that a broker knows of.")])]
        case PlanKind.DELETE_GROUP:
            found = plural(
                max((int(str(change.context.get("behind") or 0)) for change in plan.changes), default=0),
                "{count} message waits for {group}; a group of this name will begin anew.",
                "{count} messages wait for {group}; a group of this name will begin anew.",
                group=request.name,
            )
        case _:
            found = plural(
                sum(1 for change in plan.changes if change.before != change.after),
                "{count} setting changes on {name}.",
                "{count} settings change on {name}.",
                name=request.name,
            )
    return [found, *notes]


def _move_sentences(plan: Plan) -> list[Text]:
    request = plan.request
    again = sum(consumed_again(change) for change in plan.changes)
    lost = sum(skipped(change) for change in plan.changes)
    is_online = any(change.context.get("online") == "yes" for change in plan.changes)
    found = [Text("{group} goes on at another place in {topic}.", group=request.name, topic=request.topic)]
    if lost:
        found.append(
            plural(
                lost,
                "{count} message will be skipped: {group} never gets it.",
                "{count} messages will be skipped: {group} never gets them.",
                group=request.name,
            )
        )
    if again:
        found.append(
            plural(again, "{count} message will be consumed again.", "{count} messages will be consumed again.")
        )
    if not lost and not again:
        found.append(Text("No message is skipped, and none is consumed again."))
    found.append(Text("The running members are told.") if is_online else Text("Nobody runs: the offsets are written."))
    return found


def note(plan: Plan, change: Change) -> Text:
    """What one row of a plan means."""
    if plan.request.kind not in MOVES:
        return Text("unchanged") if change.before == change.after else Text("")
    lost, again = skipped(change), consumed_again(change)
    if lost:
        return Text("{count} skipped", count=f"{lost:,}")
    return Text("{count} again", count=f"{again:,}") if again else Text("stays")
