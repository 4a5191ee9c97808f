"""Logging in and out, the settings of the browser, and the audit log."""

from __future__ import annotations

from typing import Any, Final

from starlette.responses import Response

from downrange.console.auth import SESSION_SECONDS, LoginRefused
from downrange.console.config import LoginKind
from downrange.console.languages import COOKIE as LANGUAGE_COOKIE
from downrange.console.languages import LANGUAGES
from downrange.console.pages import Page
from downrange.console.requests import COOKIE, SECURE_COOKIE, Answer, PageRefused, Visit, checked_form, see_other
from downrange.console.tables import Column, listing
from downrange.console.words import word
from downrange.model.text import Text, said_by

YEAR_SECONDS: Final = 365 * 86_400


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
    return Page("login.html", Text("Log in"), {}, chrome=chrome)


async def log_in(visit: Visit) -> Answer:
    form = await visit.form()
    name, target = form.get("name", "").strip(), safe_target(form.get("next", "/"))
    try:
        cookie = await visit.console.logins.log_in(name, form.get("password", ""), visit.source)
    except LoginRefused as error:
        visit.console.audit.write(visit.now, name[:256], visit.source, "log in", "refused", reason=str(error))
        is_acl = visit.console.config.access.login is LoginKind.ACL
        chrome = {"next": target, "is_acl": is_acl, "error": Text("Not logged in: {reason}.", reason=said_by(error))}
        status = 429 if "too many" in str(error) else 401
        return Page("login.html", Text("Log in"), {"error": str(error)}, status=status, chrome=chrome)
    visit.console.audit.write(visit.now, name, visit.source, "log in", "done")
    response = see_other(target)
    _set_session(visit, response, cookie, SESSION_SECONDS)
    return response


async def log_out(visit: Visit) -> Answer:
    await checked_form(visit)
    await visit.console.logins.log_out(_cookie_of(visit))
    response = see_other("/login")
    _set_session(visit, response, "", 0)
    return response


def _cookie_of(visit: Visit) -> str | None:
    return visit.request.cookies.get(SECURE_COOKIE) or visit.request.cookies.get(COOKIE)


def _set_session(visit: Visit, response: Response, value: str, seconds: int) -> None:
    _set_cookie(visit, response, SECURE_COOKIE if _is_secure(visit) else COOKIE, value, seconds)


def _is_secure(visit: Visit) -> bool:
    public = visit.console.config.access.public_url or ""
    return visit.request.url.scheme == "https" or public.startswith("https:")


def _set_cookie(visit: Visit, response: Response, name: str, value: str, seconds: int) -> None:
    is_secure = _is_secure(visit)
    response.set_cookie(name, value, max_age=seconds, path="/", secure=is_secure, httponly=True, samesite="strict")


async def choose_language(visit: Visit) -> Answer:
    """Keep the language that somebody chose in their browser, and go back to the page they came from."""
    form = await checked_form(visit)
    code = form.get("language", "")
    if code not in LANGUAGES:
        raise PageRefused(400, Text("there is no language {code} here", code=code))
    response = see_other(safe_target(form.get("next", "/")))
    _set_cookie(visit, response, LANGUAGE_COOKIE, code, YEAR_SECONDS)
    return response


async def settings(visit: Visit) -> Answer:
    access = visit.console.config.access
    data = {
        "name": visit.who.name,
        "role": word(visit.who.role.word),
        "login": access.login.value,
        "read_only": access.read_only,
        "history": Text("in a file") if visit.console.config.history else Text("in memory, until the console ends"),
    }
    return Page("settings.html", Text("Settings"), data)


async def audit(visit: Visit) -> Answer:
    def rest(entry: dict[str, Any]) -> str:
        hidden = {"at", "who", "from", "action", "outcome", "subject", "cluster"}
        return ", ".join(f"{key}: {value}" for key, value in entry.items() if key not in hidden and value)

    columns: list[Column[dict[str, Any]]] = [
        Column("at", Text("when"), lambda one: one["at"], "time"),
        Column("who", Text("who"), lambda one: one["who"]),
        Column("from", Text("from"), lambda one: one["from"], "code"),
        Column("action", Text("what"), lambda one: one["action"]),
        Column("cluster", Text("cluster"), lambda one: one.get("cluster", "")),
        Column("subject", Text("about"), lambda one: one.get("subject", "")),
        Column("outcome", Text("outcome"), lambda one: one["outcome"], "state"),
        Column("details", Text("details"), rest),
    ]
    table = listing(
        visit.console.audit.entries(), columns, visit.query, search=lambda one: " ".join(map(str, one.values())),
        sort="at", name="audit", caption=Text("Audit log"),
    )  # fmt: skip
    if visit.query.get("format") == "csv":
        return table
    path = visit.console.audit.path
    lead = [
        Text("All of it is in {path}.", path=path) if path else Text("Kept in memory only; --audit-log FILE keeps it.")
    ]
    return Page(
        "listing.html",
        Text("Audit log"),
        table.data(),
        chrome={"tables": [table], "lead": lead, "empty": Text("Nothing was changed, exported or refused yet.")},
    )
