"""Brokers, name servers and the clients that are connected to them."""

from __future__ import annotations

from typing import Any

from downrange.client.admin.plans import PlanKind, PlanRequest
from downrange.console.findings import differing_keys
from downrange.console.pages import Page
from downrange.console.requests import Answer, PageRefused, Visit, checked_form, see_other
from downrange.console.snapshot import BrokerState
from downrange.console.tables import Column, listing
from downrange.console.views.plans import planned
from downrange.console.views.shared import LIVE_SECONDS, broker_columns, command, crumb, role_of, unheard
from downrange.console.words import word
from downrange.model.text import Text, as_is, joined
from downrange.protocol.codes import version_name
from downrange.settings import masked


async def brokers(visit: Visit) -> Answer:
    snapshot = visit.cluster.snapshot
    table = listing(
        snapshot.brokers.values(), broker_columns(visit), visit.query, search=lambda one: str(one.broker),
        name="brokers", caption=Text("Brokers"),
    )  # fmt: skip
    if visit.query.get("format") == "csv":
        return table
    gone = [{"broker": name, "since": since} for name, since in snapshot.lost.items()]
    told = visit.console.look(visit, visit.cluster).time
    lead = [
        Text("{name} is gone since {since}: no name server lists it.", name=name, since=told(since))
        for name, since in snapshot.lost.items()
    ]
    lead += [
        Text("The metrics at {address} cannot be read: {why}.", address=at, why=why)
        for at, why in snapshot.metrics_errors.items()
    ]
    chrome = {"tables": [table], "lead": lead, "live": LIVE_SECONDS, "empty": Text("No broker is registered.")}
    data = {**table.data(), "gone": gone}
    return Page("listing.html", Text("Brokers"), data, command(visit, "cluster", "list"), chrome=chrome)


def _processes(visit: Visit) -> list[BrokerState]:
    name = visit.path("broker")
    found = [one for one in visit.cluster.snapshot.brokers.values() if one.name == name]
    if not found:
        raise PageRefused(404, Text("there is no broker {name}, or the console has not heard of it yet", name=name))
    return sorted(found, key=lambda one: one.broker.broker_id)


async def broker(visit: Visit) -> Answer:
    """One broker: its master and its slaves, their figures, and how their settings differ from those of others."""
    processes = _processes(visit)
    snapshot = visit.cluster.snapshot
    settings = {str(one.broker.address): masked(one.settings) for one in processes}
    others = {one.name: masked(one.settings) for one in snapshot.masters if one.settings}
    wanted = visit.query.get("key", "").strip().lower()
    first = processes[0]
    rows = [
        {"key": key, "value": value, "others": _others(key, first.name, others)}
        for key, value in sorted(masked(first.settings).items())
        if wanted in key.lower() or wanted in value.lower()
    ]
    table = listing(processes, broker_columns(visit), {}, name="processes", caption=Text("Processes"))
    data = {
        "broker": first.name,
        "processes": table.rows,
        "failed": {one.broker.address: one.error for one in processes if one.error is not None},
        "version": first.runtime.version if first.runtime is not None else None,
        "figures": dict(sorted(first.runtime.table.items())) if first.runtime is not None else {},
        "settings": settings,
        "differences": differing_keys(others) if len(others) > 1 else [],
    }
    chrome = {
        "table": table,
        "rows": rows,
        "key": visit.query.get("key", ""),
        "findings": [one for one in visit.console.findings(visit, visit.cluster) if one.subject == first.name],
        "crumbs": [crumb(visit, Text("Brokers"), "brokers")],
        "live": LIVE_SECONDS,
        "roles": {one.broker.address: role_of(one) for one in processes},
    }
    words = ("config", "get", "-b", first.name)
    return Page("broker.html", as_is(first.name), data, command(visit, *words), chrome=chrome)


def _others(key: str, name: str, tables: dict[str, dict[str, str]]) -> Text:
    """What other masters have for a key, where that is something else."""
    mine = tables.get(name, {}).get(key)
    unlike = [(other, table.get(key)) for other, table in tables.items() if table.get(key) != mine]
    return joined(", ", [joined(": ", (other, Text("not set") if value is None else value)) for other, value in unlike])


async def plan_broker_settings(visit: Visit) -> Answer:
    """A plan that changes settings of one broker while it runs; the broker decides which may be changed."""
    form = await checked_form(visit)
    name = visit.path("broker")
    settings: dict[str, str] = {}
    for line in form.get("settings", "").splitlines():
        if line.strip():
            key, equals, value = line.partition("=")
            if not equals:
                raise PageRefused(400, Text("'{line}' is not key=value", line=line))
            settings[key.strip()] = value.strip()
    if not settings:
        raise PageRefused(400, Text("type at least one key=value"))
    request = PlanRequest(PlanKind.BROKER_SETTINGS, name, settings=settings, broker=name)
    words = ("config", "update", *(f"{key}={value}" for key, value in settings.items()), "-b", name)
    return await planned(visit, request, command(visit, *words), visit.url("brokers", name))


async def write_permission(visit: Visit) -> Answer:
    """Let producers leave a broker, or come back to it: its permission in the routes of all name servers."""
    form = await checked_form(visit)
    name = visit.path("broker")
    is_wipe = form.get("action") == "wipe"
    if is_wipe and form.get("name", "") != name:
        raise PageRefused(400, Text("type the name {name} to confirm; nothing was done", name=name))
    namesrv = visit.admin.namesrv
    answers = await (namesrv.wipe_write_perm(name) if is_wipe else namesrv.add_write_perm(name))
    failed = {server: str(error) for server, error in answers.failed.items()}
    action = "wipe write permission" if is_wipe else "add write permission"
    visit.audit(action, "failed" if failed else "done", subject=name, done=list(answers.done), failed=failed)
    answers.raise_if_none()
    return see_other(visit.url("brokers", name))


async def name_servers(visit: Visit) -> Answer:
    """Name servers, and where their settings differ."""
    snapshot = visit.cluster.snapshot
    tables = {address: masked(table) for address, table in snapshot.namesrvs.items()}
    unlike = set(differing_keys(tables)) if len(tables) > 1 else set()
    keys = sorted({key for table in tables.values() for key in table}, key=lambda key: (key not in unlike, key))
    data = {
        "name_servers": tables,
        "configured": list(visit.cluster.config.namesrv_addresses),
        "errors": snapshot.namesrv_errors if snapshot.error is None else {visit.cluster.namesrv: snapshot.error},
        "differences": sorted(unlike),
    }
    chrome = {"keys": keys, "unlike": unlike, "live": LIVE_SECONDS}
    words = ("namesrv-admin", "config")
    return Page("name_servers.html", Text("Name servers"), data, command(visit, *words), chrome=chrome)


# --- clients ----------------------------------------------------------------------------------------------------------


async def clients(visit: Visit) -> Answer:
    """All producers and consumers that are connected, as brokers know them."""
    rows, masters = _clients(visit), len(visit.cluster.snapshot.masters)
    kind = visit.query.get("kind", "all")
    shown = [row for row in rows if kind in ("all", row["kind"])]
    columns: list[Column[dict[str, Any]]] = [
        Column("client", Text("client"), lambda row: row["client"], "code"),
        Column("kind", Text("kind"), lambda row: word(row["kind"])),
        Column("group", Text("group"), lambda row: row["group"], link=lambda row: row["address_of_group"]),
        Column("address", Text("address"), lambda row: row["address"], "code"),
        Column("language", Text("language"), lambda row: row["language"]),
        Column("version", Text("version"), lambda row: row["version"]),
        Column(
            "brokers",
            Text("brokers"),
            lambda row: (
                Text("all {count}", count=masters) if row["brokers"].count(",") + 1 == masters > 1 else row["brokers"]
            ),
        ),
        Column("heard", Text("last heard"), lambda row: row["heard"], "time"),
    ]
    table = listing(
        shown, columns, visit.query, search=lambda row: f"{row['client']} {row['group']} {row['address']}",
        sort="client", name="clients", caption=Text("Clients"),
    )  # fmt: skip
    if visit.query.get("format") == "csv":
        return table
    choices = [
        {"label": word(one), "address": f"?kind={one}", "is_current": one == kind}
        for one in ("all", "producer", "consumer")
    ]
    chrome = {"tables": [table], "choices": choices, "live": LIVE_SECONDS, "empty": Text("No client is connected.")}
    data = {**table.data(), "failed": unheard(visit)}
    return Page("listing.html", Text("Clients"), data, command(visit, "cluster", "producers"), chrome=chrome)


def _clients(visit: Visit) -> list[dict[str, Any]]:
    snapshot = visit.cluster.snapshot
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for state in snapshot.masters:
        for one in state.producers:
            row = found.setdefault(
                ("producer", one.group, one.client_id),
                {
                    "client": one.client_id, "kind": "producer", "group": one.group,
                    "address": one.address.removeprefix("/"), "language": one.language,
                    "version": version_name(one.version), "brokers": state.name,
                    "heard": one.heard_at or "", "address_of_group": None,
                },
            )  # fmt: skip
            if state.name not in row["brokers"].split(", "):
                row["brokers"] += f", {state.name}"
            row["heard"] = max(row["heard"] or 0, one.heard_at) or ""
    for group in snapshot.groups.values():
        for member in group.members.values():
            found["consumer", group.name, member.client_id] = {
                "client": member.client_id, "kind": "consumer", "group": group.name, "address": member.address,
                "language": member.language, "version": version_name(member.version),
                "brokers": ", ".join(sorted(member.brokers)), "heard": group.members_at or "",
                "address_of_group": visit.url("groups", group.name) + "?tab=members",
            }  # fmt: skip
    return list(found.values())
