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
from downrange.console.formats import plural
from downrange.console.history_file import HistoryFile
from downrange.console.users_file import Role
from downrange.model.errors import MQError

KEPT_MILLIS: Final = 600_000
MOST_PLANS: Final = 500
MOVES: Final = (PlanKind.RESET, PlanKind.SKIP, PlanKind.CLONE, PlanKind.QUEUE)
_FOR_ADMINS: Final = (PlanKind.DELETE_TOPIC, PlanKind.DELETE_GROUP, PlanKind.BROKER_SETTINGS)


_INTERRUPTED: Final = "the console ended while it carried this out; look at the cluster before you make another plan"


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
            raise PlanGone(f"there is no plan {plan_id}; plans are kept for ten minutes")
        return kept

    async def apply(self, kept: KeptPlan, admin: Admin) -> list[PlanOutcome]:
        """Carry a plan out, once; raises PlanDrifted when the cluster is no longer as the plan saw it."""
        if kept.outcomes is not None:
            raise PlanGone(f"plan {kept.id} was carried out already")
        if kept.seconds_left(self._clock.now()) <= 0:
            raise PlanGone(f"plan {kept.id} is older than ten minutes; make it again")
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
            kept.outcomes = [PlanOutcome("", False, str(error))]
            return kept.outcomes
        kept.outcomes = [
            *(PlanOutcome(str(server), True, "done") for server in answers.done),
            *(PlanOutcome(str(server), False, str(error)) for server, error in answers.failed.items()),
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
    return msgspec.json.encode(saved)


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


def sentences(plan: Plan) -> list[str]:
    """What a plan does, in words."""
    request = plan.request
    if request.kind in MOVES:
        return _move_sentences(plan)
    match request.kind:
        case PlanKind.DELETE_TOPIC:
            messages = sum(int(str(change.context.get("messages") or 0)) for change in plan.changes)
            found = [f"{plural(messages, 'message')} of {request.name} can no longer be read."]
            found.append("" if plan.notes else "No group reads it that a broker knows of.")
        case PlanKind.DELETE_GROUP:
            behind = max((int(str(change.context.get("behind") or 0)) for change in plan.changes), default=0)
            waiting = f"{plural(behind, 'message waits', 'messages wait')} for {request.name}"
            found = [f"{waiting}; a group of this name will begin anew."]
        case _:
            changing = [change for change in plan.changes if change.before != change.after]
            found = [f"{plural(len(changing), 'setting changes', 'settings change')} on {request.name}."]
    return [text for text in (*found, *(f"{note}." for note in plan.notes)) if text]


def _move_sentences(plan: Plan) -> list[str]:
    request = plan.request
    again = sum(consumed_again(change) for change in plan.changes)
    lost = sum(skipped(change) for change in plan.changes)
    is_online = any(change.context.get("online") == "yes" for change in plan.changes)
    found = [f"{request.name} goes on at another place in {request.topic}."]
    if lost:
        found.append(f"{plural(lost, 'message')} will be skipped: {request.name} never gets them.")
    if again:
        found.append(f"{plural(again, 'message')} will be consumed again.")
    if not lost and not again:
        found.append("No message is skipped, and none is consumed again.")
    found.append("The running members are told." if is_online else "Nobody runs: the offsets are written.")
    return found


def note(plan: Plan, change: Change) -> str:
    """What one row of a plan means."""
    if plan.request.kind not in MOVES:
        return "unchanged" if change.before == change.after else ""
    lost, again = skipped(change), consumed_again(change)
    if lost:
        return f"{lost:,} skipped"
    return f"{again:,} again" if again else "stays"
