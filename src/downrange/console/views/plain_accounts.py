"""Accounts of RocketMQ 4.x (plain_acl.yml): brokers tell the versions of their files and take changes, no more."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlencode

from downrange.client.admin.plain_acl import AccountChange
from downrange.client.per_server import PerServer
from downrange.console.requests import Answer, PageRefused, Visit, checked_form, see_other
from downrange.model.errors import MQError
from downrange.model.text import Text, joined, said_by

SECONDS = 8.0  # longer than one request may take: what other brokers answered is shown


async def account_files(visit: Visit) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The files with accounts of each broker, and why others told nothing."""
    try:
        async with asyncio.timeout(SECONDS):
            found = await visit.admin.plain_acl.versions()
    except TimeoutError:
        return [], {visit.cluster.name: Text("no answer within {seconds:g} s", seconds=SECONDS)}
    except MQError as error:
        return [], {visit.cluster.name: said_by(error)}
    rows = [
        {"broker": broker.name, "file": name, "changed": version.timestamp, "version": version.counter}
        for broker, files in found.done.items()
        for name, version in files.items()
    ]
    return rows, {str(broker): said_by(error) for broker, error in found.failed.items()}


async def put_account(visit: Visit) -> Answer:
    """Add an account, or change one; what is left empty stays as it is."""
    form = await checked_form(visit)
    key, secret = form.get("key", "").strip(), form.get("secret", "")
    if not key or not secret:
        raise PageRefused(400, Text("an account needs an access key and a secret key"))
    change = AccountChange(
        key,
        secret,
        admin=form.get("admin") == "on",
        white_remote_address=form.get("address") or None,
        default_topic_perm=form.get("topic_perm") or None,
        default_group_perm=form.get("group_perm") or None,
    )
    return told(visit, "put account", key, await visit.admin.plain_acl.update(change))


async def delete_account(visit: Visit) -> Answer:
    form = await checked_form(visit)
    key = form.get("key", "").strip()
    if not key or form.get("name", "") != key:
        raise PageRefused(400, Text("type the access key twice to confirm; nothing was done"))
    return told(visit, "delete account", key, await visit.admin.plain_acl.delete(key))


def told(visit: Visit, action: str, subject: str, answers: PerServer[Any, None]) -> Answer:
    failed = {str(server): said_by(error) for server, error in answers.failed.items()}
    visit.audit(action, "failed" if failed else "done", subject=subject, failed=failed)
    if failed:
        raise PageRefused(502, joined("; ", [joined(": ", one) for one in failed.items()]))
    return see_other(visit.url("users") + "?" + urlencode({"done": action, "about": subject}))
