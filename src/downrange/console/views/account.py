"""Logging in and out, the settings of the browser, and the audit log."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from downrange.console.auth import SESSION_SECONDS, LoginRefused
from downrange.console.config import LoginKind
from downrange.console.pages import Page
from downrange.console.requests import COOKIE, SECURE_COOKIE, Answer, Visit, checked_form, see_other
from downrange.console.tables import Column, listing


def safe_target(text: str) -> str:
    """Where to go after the login: a page of this console, and nothing else."""
    is_ours = text.startswith("/") and not text.startswith(("//", "/\\")) and text.isprintable()
    return text if is_ours else "/"


async def login_page(visit: Visit) -> Answer:
    target = safe_target(visit.query.get("next", "/"))
    if not visit.console.logins.has_login_page:
        return see_other(target)
    is_acl = visit.console.config.access.login is LoginKind.ACL
    chrome = {"next": target, "is_acl": is_acl, "error": ""}
    return Page("login.html", "Log in", {}, chrome=chrome)


async def log_in(visit: Visit) -> Answer:
    form = await visit.form()
    name, target = form.get("name", "").strip(), safe_target(form.get("next", "/"))
    try:
        cookie = await visit.console.logins.log_in(name, form.get("password", ""), visit.source)
    except LoginRefused as error:
        visit.console.audit.write(visit.now, name[:256], visit.source, "log in", "refused", reason=str(error))
        is_acl = visit.console.config.access.login is LoginKind.ACL
        chrome = {"next": target, "is_acl": is_acl, "error": f"Not logged in: {error}."}
        status = 429 if "too many" in str(error) else 401
        return Page("login.html", "Log in", {"error": str(error)}, status=status, chrome=chrome)
    visit.console.audit.write(visit.now, name, visit.source, "log in", "done")
    response = see_other(target)
    _set_cookie(visit, response, cookie, SESSION_SECONDS)
    return response


async def log_out(visit: Visit) -> Answer:
    await checked_form(visit)
    await visit.console.logins.log_out(_cookie_of(visit))
    response = see_other("/login")
    _set_cookie(visit, response, "", 0)
    return response


def _cookie_of(visit: Visit) -> str | None:
    return visit.request.cookies.get(SECURE_COOKIE) or visit.request.cookies.get(COOKIE)


def _set_cookie(visit: Visit, response: Response, value: str, seconds: int) -> None:
    public = visit.console.config.access.public_url or ""
    is_secure = visit.request.url.scheme == "https" or public.startswith("https:")
    name = SECURE_COOKIE if is_secure else COOKIE
    response.set_cookie(name, value, max_age=seconds, path="/", secure=is_secure, httponly=True, samesite="strict")


async def settings(visit: Visit) -> Answer:
    access = visit.console.config.access
    data = {
        "name": visit.who.name,
        "role": visit.who.role.word,
        "login": access.login.value,
        "read_only": access.read_only,
        "history": "in a file" if visit.console.config.history else "in memory, until the console ends",
    }
    return Page("settings.html", "Settings", data)


async def audit(visit: Visit) -> Answer:
    def rest(entry: dict[str, Any]) -> str:
        hidden = {"at", "who", "from", "action", "outcome", "subject", "cluster"}
        return ", ".join(f"{key}: {value}" for key, value in entry.items() if key not in hidden and value)

    columns: list[Column[dict[str, Any]]] = [
        Column("at", "when", lambda one: one["at"], "time"),
        Column("who", "who", lambda one: one["who"]),
        Column("from", "from", lambda one: one["from"], "code"),
        Column("action", "what", lambda one: one["action"]),
        Column("cluster", "cluster", lambda one: one.get("cluster", "")),
        Column("subject", "about", lambda one: one.get("subject", "")),
        Column("outcome", "outcome", lambda one: one["outcome"], "state"),
        Column("details", "details", rest),
    ]
    table = listing(
        visit.console.audit.entries(), columns, visit.query, search=lambda one: " ".join(map(str, one.values())),
        sort="at", name="audit", caption="Audit log",
    )  # fmt: skip
    if visit.query.get("format") == "csv":
        return table
    path = visit.console.audit.path
    lead = [f"All of it is in {path}." if path else "Kept in memory only; --audit-log FILE keeps it."]
    return Page(
        "listing.html",
        "Audit log",
        table.data(),
        chrome={"tables": [table], "lead": lead, "empty": "Nothing was changed, exported or refused yet."},
    )
