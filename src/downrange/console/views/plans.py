"""Plans: the page with what will be done, and carrying it out."""

from __future__ import annotations

from typing import Any

from downrange.client.admin.plans import PlanDrifted, PlanRequest
from downrange.console.pages import Page
from downrange.console.plans import KeptPlan, note, sentences
from downrange.console.requests import Answer, PageRefused, Visit, checked_form, see_other
from downrange.console.words import word
from downrange.model.errors import MQError
from downrange.model.text import Text, said_by


async def planned(visit: Visit, request: PlanRequest, command: str, back: str) -> Answer:
    """Make a plan from the cluster as it is now, keep it and show it."""
    plan = await visit.admin.plans.make(request)
    if not plan.changes and plan.failed:
        raise next(iter(plan.failed.values()))
    if not plan.changes:
        raise PageRefused(
            400,
            Text(
                "{kind}: there is nothing to change about {name}",
                kind=word(request.kind.value),
                name=request.name,
            ),
        )
    kept = visit.console.plans.add(visit.cluster.name, visit.who.name, plan, command, back)
    return see_other(visit.url("plans", kept.id))


def _changes(kept: KeptPlan) -> list[dict[str, Any]]:
    return [
        {
            "server": change.server,
            "subject": change.subject,
            "before": change.before,
            "after": change.after,
            "end": change.context.get("end"),
            "note": note(kept.plan, change),
        }
        for change in kept.plan.changes
    ]


async def plan(visit: Visit) -> Answer:
    kept = visit.console.plans.get(visit.path("plan"), visit.cluster.name)
    data = {
        "plan": kept.id,
        "kind": kept.kind.value,
        "subject": kept.subject,
        "sentences": sentences(kept.plan),
        "changes": _changes(kept),
        "destroys": kept.plan.destroys,
        "state": kept.state,
        "outcomes": kept.outcomes,
        "drifted": kept.drifted,
        "by": kept.who,
        "created": kept.plan.made,
        "seconds_left": kept.seconds_left(visit.now),
        "failed": {server: said_by(error) for server, error in kept.plan.failed.items()},
    }
    chrome = {
        "back": kept.back,
        "is_move": kept.is_move,
        "may_apply": visit.may(kept.role),
        "apply_address": visit.url("plans", kept.id, "apply"),
        "role_needed": word(kept.role.word),
    }
    title = Text("Plan: {kind} {subject}", kind=word(kept.kind.value), subject=kept.subject)
    if kept.is_move:
        title = Text("Plan: {kind} of {subject}", kind=word(kept.kind.value), subject=kept.subject)
    return Page("plan.html", title, data, kept.command, chrome=chrome)


async def apply_plan(visit: Visit) -> Answer:
    form = await checked_form(visit)
    kept = visit.console.plans.get(visit.path("plan"), visit.cluster.name)
    if not visit.may(kept.role):
        visit.audit(kept.kind.value, "refused", subject=kept.subject, plan=kept.id, reason="role")
        raise PageRefused(
            403,
            Text(
                "this needs the role {role}; you are {yours}",
                role=word(kept.role.word),
                yours=word(visit.who.role.word),
            ),
        )
    if kept.plan.destroys and form.get("name", "") != kept.subject:
        raise PageRefused(400, Text("type the name {name} to confirm; nothing was done", name=kept.subject))
    action = "move" if kept.is_move else kept.kind.value
    try:
        outcomes = await visit.console.plans.apply(kept, visit.admin)
    except PlanDrifted as error:
        visit.audit(action, "refused", subject=kept.subject, plan=kept.id, reason=str(error))
        return see_other(visit.url("plans", kept.id))
    except MQError as error:
        visit.audit(action, "failed", subject=kept.subject, plan=kept.id, reason=str(error))
        raise
    failed = {outcome.server: outcome.text for outcome in outcomes if not outcome.is_done}
    done = [outcome.server for outcome in outcomes if outcome.is_done]
    visit.audit(
        action, "failed" if failed else "done", subject=kept.subject, plan=kept.id, kind=kept.kind.value, done=done,
        failed=failed,
    )  # fmt: skip
    sampler = visit.console.samplers[visit.cluster.name]
    sampler.soon()
    sampler.ask_again(kept.subject)
    return see_other(visit.url("plans", kept.id))
