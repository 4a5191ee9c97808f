"""Users and access rules of clusters with access control: RocketMQ 5.3's, and the accounts of 4.x."""

from __future__ import annotations

import asyncio
from typing import Any

from downrange.client.admin.users import (
    AclInfo,
    DeleteAclRequest,
    ListAclsRequest,
    PolicyEntryInfo,
    PolicyInfo,
    UserInfo,
)
from downrange.console.pages import Page
from downrange.console.requests import Answer, PageRefused, Visit, checked_form
from downrange.console.tables import Column, listing
from downrange.console.views.plain_accounts import account_files, told
from downrange.console.views.shared import command
from downrange.console.words import word
from downrange.model.errors import MQError
from downrange.model.text import Text, joined, said_by

SECONDS = 8.0  # longer than one request may take: what other brokers answered is shown


async def users(visit: Visit) -> Answer:
    people, rules, problems = await _asked(visit)
    columns: list[Column[dict[str, Any]]] = [
        Column("user", Text("user"), lambda row: row["user"]),
        Column("type", Text("type"), lambda row: row["type"]),
        Column("status", Text("status"), lambda row: row["status"]),
        Column("brokers", Text("brokers"), lambda row: row["brokers"]),
    ]
    table = listing(
        people,
        columns,
        visit.query,
        search=lambda row: str(row["user"]),
        sort="user",
        name="users",
        caption=Text("Users"),
    )
    if visit.query.get("format") == "csv":
        return table
    files, plain_problems = await account_files(visit)
    data = {"users": people, "rules": rules, "problems": problems, "files": files, "plain_problems": plain_problems}
    chrome = {
        "table": table,
        "result": joined(": ", (word(visit.query["done"]), visit.query.get("about", "")))
        if "done" in visit.query
        else "",
        "is_guarded": _is_guarded(visit),
    }
    return Page("users.html", Text("Users"), data, command(visit, "user", "list"), chrome=chrome)


def _done(visit: Visit) -> Text:
    """What was done last, from the address; empty when nothing was."""
    done, about = visit.query.get("done", ""), visit.query.get("about", "")
    return joined(": ", (word(done), about)) if done else Text("")


def _is_guarded(visit: Visit) -> bool:
    """Whether a broker has access control, as far as brokers have told their settings."""
    told = [one.settings for one in visit.cluster.snapshot.brokers.values() if one.settings]
    switches = ("authenticationEnabled", "aclEnable")
    return not told or any(settings.get(switch) == "true" for settings in told for switch in switches)


async def _asked(visit: Visit) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, str]]:
    problems: dict[str, str] = {}
    people: dict[str, dict[str, Any]] = {}
    rules: list[dict[str, Any]] = []
    try:
        async with asyncio.timeout(SECONDS):
            found = await visit.admin.users.list()
            listed = await visit.admin.acls.list(ListAclsRequest())
    except TimeoutError:
        return [], [], {visit.cluster.name: Text("no answer within {seconds:g} s", seconds=SECONDS)}
    except MQError as error:
        return [], [], {visit.cluster.name: said_by(error)}
    for broker, known in found.done.items():
        for user in known:
            row = people.setdefault(
                user.username or "",
                {
                    "user": user.username or "",
                    "type": user.user_type or "",
                    "status": user.user_status or "",
                    "brokers": "",
                },
            )
            row["brokers"] = ", ".join(filter(None, (row["brokers"], broker.name)))
    seen: set[str] = set()
    for acls in listed.done.values():
        for acl in acls:
            for row in _rules(acl):
                if (key := repr(row)) not in seen:
                    seen.add(key)
                    rules.append(row)
    problems.update({str(broker): said_by(error) for broker, error in {**found.failed, **listed.failed}.items()})
    return list(people.values()), rules, problems


def _rules(acl: AclInfo) -> list[dict[str, Any]]:
    return [
        {
            "subject": acl.subject or "",
            "resource": entry.resource or "",
            "actions": ", ".join(entry.actions or ()),
            "sources": ", ".join(entry.source_ips or ()),
            "decision": entry.decision or "",
        }
        for policy in acl.policies or ()
        for entry in policy.entries or ()
    ]


async def put_user(visit: Visit) -> Answer:
    """Create a user, or change a password, type or status."""
    form = await checked_form(visit)
    name, password = form.get("name", "").strip(), form.get("password", "")
    if not name:
        raise PageRefused(400, Text("a user needs a name"))
    is_new = form.get("action") == "create"
    if is_new and not password:
        raise PageRefused(400, Text("a new user needs a password"))
    user = UserInfo(
        username=name,
        password=password or None,
        user_type=form.get("type") or None,
        user_status=form.get("status") or None,
    )
    admin = visit.admin.users
    answers = await (admin.create(user) if is_new else admin.update(user))
    return told(visit, "create user" if is_new else "change user", name, answers)


async def delete_user(visit: Visit) -> Answer:
    form = await checked_form(visit)
    name = form.get("user", "")
    if not name or form.get("name", "") != name:
        raise PageRefused(400, Text("type the name {name} to confirm; nothing was done", name=name))
    return told(visit, "delete user", name, await visit.admin.users.delete(name))


async def put_rule(visit: Visit) -> Answer:
    form = await checked_form(visit)
    subject, resource = form.get("subject", "").strip(), form.get("resource", "").strip()
    if not subject or not resource:
        raise PageRefused(400, Text("a rule needs a user and a resource, as User:alice and Topic:orders"))
    subject = subject if ":" in subject else f"User:{subject}"
    entry = PolicyEntryInfo(
        resource=resource,
        actions=tuple(filter(None, form.get("actions", "").replace(" ", "").split(","))),
        source_ips=tuple(filter(None, form.get("sources", "").replace(" ", "").split(","))) or None,
        decision=form.get("decision", "Allow"),
    )
    acl = AclInfo(subject=subject, policies=(PolicyInfo(policy_type="Custom", entries=(entry,)),))
    return told(visit, "put rule", f"{subject} {resource}", await visit.admin.acls.put(acl))


async def delete_rule(visit: Visit) -> Answer:
    form = await checked_form(visit)
    subject, resource = form.get("subject", ""), form.get("resource", "")
    rule = DeleteAclRequest(subject=subject, resource=resource)
    return told(visit, "delete rule", f"{subject} {resource}", await visit.admin.acls.delete(rule))
