"""One request: who asks, from where, whether they may, and the answer with the headers that every answer has.

In this order: the host must be ours (421), the route must exist (404), the person must be known (login page or 401) and
have the role (403), and a write must come from our own page: Origin, Sec-Fetch-Site and the token (403).
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Match, Route, Router
from starlette.types import Receive, Scope, Send

from downrange.client.admin import Admin
from downrange.console import formats
from downrange.console.auth import Who
from downrange.console.clusters import Cluster
from downrange.console.config import is_address
from downrange.console.languages import COOKIE as LANGUAGE_COOKIE
from downrange.console.languages import Language, language_of
from downrange.console.pages import Page, body_response, json_text
from downrange.console.tables import Listing, to_csv
from downrange.console.users_file import Role
from downrange.console.words import word
from downrange.model.errors import MQError
from downrange.model.text import Text, said_by

if TYPE_CHECKING:
    from downrange.console.app import Console

log = logging.getLogger(__name__)

HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
MAX_FORM_BYTES: Final = 6 << 20
READING: Final = ("GET", "HEAD")
COOKIE: Final = "downrange_session"
SECURE_COOKIE: Final = "__Host-downrange_session"


class PageRefused(MQError):
    """A request is not carried out; `status` is HTTP's."""

    def __init__(self, status: int, text: Text) -> None:
        super().__init__(text)
        self.status = status


@dataclass(slots=True)
class Visit:
    """One request as views see it."""

    request: Request
    console: Console
    who: Who
    wants_json: bool = False

    @property
    def cluster(self) -> Cluster:
        name, known = self.request.path_params.get("cluster", ""), self.clusters
        found = known.get(name)
        if found is None:
            raise PageRefused(
                404, Text("there is no cluster {name} here; those are: {names}", name=name, names=", ".join(known))
            )
        return found

    @property
    def clusters(self) -> dict[str, Cluster]:
        """The clusters that this person may look at: with accounts of clusters, the ones that know their account."""
        known = self.console.clusters
        if not self.console.logins.has_accounts_of_clusters:
            return known
        return {name: cluster for name, cluster in known.items() if name in self.who.admins}

    @property
    def admin(self) -> Admin:
        """To ask brokers on behalf of this person."""
        return self.admin_of(self.cluster)

    def admin_of(self, cluster: Cluster) -> Admin:
        return self.who.admins.get(cluster.name, cluster.page_admin)

    @property
    def now(self) -> int:
        return self.console.clock.now()

    @property
    def zone(self) -> Any:
        return formats.zone(unquote(self.request.cookies.get("zone", "")))

    @property
    def language(self) -> Language:
        return language_of(self.request.cookies.get(LANGUAGE_COOKIE), self.request.headers.get("accept-language"))

    @property
    def query(self) -> dict[str, str]:
        return dict(self.request.query_params)

    @property
    def source(self) -> str:
        return self.request.client.host if self.request.client else ""

    def path(self, name: str) -> str:
        return str(self.request.path_params[name])

    def time_of(self, name: str) -> int | None:
        """A time of the query, in the zone of the browser; raises PageRefused when it is none."""
        text = self.request.query_params.get(name, "")
        if not text:
            return None
        found = formats.parse_time(text, self.zone)
        if found is None:
            raise PageRefused(400, Text("{name}={text}: expected a time like 2026-11-16T08:41", name=name, text=text))
        return found

    def may(self, role: Role) -> bool:
        """Whether this person may do what needs a role; nobody may when the console only reads."""
        return self.who.role >= role and (role is Role.VIEWER or not self.console.config.access.read_only)

    @property
    def is_masked(self) -> bool:
        return self.console.config.access.mask is not None and self.who.role is Role.VIEWER

    def url(self, *parts: str) -> str:
        """An address in this cluster."""
        return "/c/" + "/".join(quote(part, safe="") for part in (self.cluster.name, *parts))

    async def form(self) -> dict[str, str]:
        """The fields of a form, the last one of a name."""
        return dict(await self.form_pairs())

    async def form_pairs(self) -> list[tuple[str, str]]:
        content = b""
        async for piece in self.request.stream():
            content += piece
            if len(content) > MAX_FORM_BYTES:
                raise PageRefused(413, Text("a form may have {megabytes} MiB", megabytes=MAX_FORM_BYTES >> 20))
        try:
            return parse_qsl(content.decode("utf-8"), keep_blank_values=True, max_num_fields=20_000)
        except ValueError as error:
            raise PageRefused(400, Text("the form cannot be read: {error}", error=error)) from None

    def audit(self, action: str, outcome: str, **details: object) -> None:
        cluster = self.request.path_params.get("cluster")
        known = {"cluster": cluster} if cluster else {}
        self.console.audit.write(self.now, self.who.name, self.source, action, outcome, **known, **details)


Answer = Page | Response | Listing
Handler = Callable[[Visit], Awaitable[Answer]]


class Address(NamedTuple):
    """One row of the table of addresses."""

    method: str
    path: str
    view: str
    role: Role = Role.VIEWER
    writes: bool = False
    """Belongs to writing: it does not exist in a console that only reads."""
    is_open: bool = False
    """Needs no login."""

    @property
    def handler(self) -> Handler:
        """The view itself. Its module is imported here: the first page does not wait for those of all others."""
        module, _, name = self.view.partition(".")
        found: Handler = getattr(import_module(f"downrange.console.views.{module}"), name)
        return found


class Requests:
    """The ASGI application: everything between uvicorn and the views."""

    def __init__(self, console: Console, table: Sequence[Address]) -> None:
        self._console = console
        reads_only = console.config.access.read_only
        self._routers = {
            method: Router([_route(row) for row in table if row.method == method and not (reads_only and row.writes)])
            for method in ("GET", "POST")
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            raise NotImplementedError("the console starts its parts itself")
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        try:
            response = await self._answer(request)
        except ClientDisconnect:
            return
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        if self._is_secure(request):
            response.headers.setdefault("strict-transport-security", "max-age=31536000")
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        began = time.perf_counter()
        if not self._is_our_host(request):
            return Response("This host is not served here; start the console with --public-url.\n", 421)
        visit: Visit | None = None
        try:
            row, wants_json = self._find(request)
            who = self._who(request, row)
            visit = Visit(request, self._console, who, wants_json)
            self._check(visit, row)
            answer = await row.handler(visit)
            response = self._response(visit, answer)
        except PageRefused as error:
            response = self._refusal(request, visit, error.status, said_by(error))
        except MQError as error:
            response = self._refusal(request, visit, 502, said_by(error))
        response.headers["server-timing"] = f"page;dur={(time.perf_counter() - began) * 1000:.1f}"
        return response

    # --- before the view ------------------------------------------------------------------------------------------

    def _is_our_host(self, request: Request) -> bool:
        host = urlsplit("//" + request.headers.get("host", "")).hostname or ""
        return is_address(host) or host == self._console.config.access.public_host

    def _is_secure(self, request: Request) -> bool:
        public = self._console.config.access.public_url
        return request.url.scheme == "https" or (public is not None and public.startswith("https:"))

    def _find(self, request: Request) -> tuple[Address, bool]:
        scope = request.scope
        wants_json = request.method in READING and scope["path"].endswith(".json")
        scope["wants_json"] = wants_json
        if wants_json:
            path = scope["path"].removesuffix(".json").removesuffix("/index")
            scope["path"] = path or "/"
        router = self._routers.get("GET" if request.method in READING else request.method)
        for route in router.routes if router is not None else ():
            match, child = route.matches({**scope, "method": "GET"})
            if match is Match.FULL:
                scope.update(child)
                return child["endpoint"].row, wants_json
        raise PageRefused(404, Text("there is no page {path} here", path=scope["path"]))

    def _who(self, request: Request, row: Address) -> Who:
        cookie = request.cookies.get(SECURE_COOKIE) or request.cookies.get(COOKIE)
        address = request.client.host if request.client else ""
        who = self._console.logins.who(cookie, address, dict(request.headers))
        if who is None and row.is_open:
            return self._console.logins.nobody("nobody", Role.VIEWER)
        if who is None:
            raise PageRefused(401, Text("you have to log in"))
        return who

    def _check(self, visit: Visit, row: Address) -> None:
        if not row.is_open and visit.who.role < row.role:
            if row.method == "POST":
                visit.audit(row.path, "refused", reason=f"needs the role {row.role.word}")
            raise PageRefused(
                403,
                Text(
                    "this needs the role {role}; you are {yours}",
                    role=word(row.role.word),
                    yours=word(visit.who.role.word),
                ),
            )
        if visit.request.method not in READING and not self._is_same_origin(visit.request):
            visit.audit(row.path, "refused", reason="came from another site")
            raise PageRefused(403, Text("this came from another site and was not carried out"))

    def _is_same_origin(self, request: Request) -> bool:
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return False
        origin = request.headers.get("origin")
        if origin is None:
            return True  # browsers send it with every form; without a browser there is no cookie to misuse
        host = request.headers.get("host", "")
        allowed = {f"http://{host}", f"https://{host}"}
        if (public := self._console.config.access.public_url) is not None:
            parts = urlsplit(public)
            allowed.add(f"{parts.scheme}://{parts.netloc}")
        return origin in allowed

    # --- after it -------------------------------------------------------------------------------------------------

    def _response(self, visit: Visit, answer: Answer) -> Response:
        if isinstance(answer, Response):
            return answer
        if isinstance(answer, Listing):
            return _csv(answer)
        if visit.wants_json:
            return body_response(json_text(answer.data), "application/json", visit.request.headers, answer.status)
        html = self._console.render(visit, answer)
        return body_response(html, "text/html; charset=utf-8", visit.request.headers, answer.status)

    def _refusal(self, request: Request, visit: Visit | None, status: int, text: Text) -> Response:
        wants_page = request.method in READING and not request.scope.get("wants_json")
        if status == 401 and wants_page and self._console.logins.has_login_page:
            target = request.scope["path"] + (f"?{request.url.query}" if request.url.query else "")
            return RedirectResponse(f"/login?next={quote(target, safe='')}", 303)
        if not wants_page and "text/html" not in request.headers.get("accept", ""):
            return body_response(json_text({"error": text}), "application/json", request.headers, status)
        if visit is None:
            visit = Visit(request, self._console, self._known_or_nobody(request))
        page = Page("error.html", _TITLES.get(status, Text("This did not work")), {"error": text}, status=status)
        html = self._console.render(visit, page)
        return body_response(html, "text/html; charset=utf-8", request.headers, status)

    def _known_or_nobody(self, request: Request) -> Who:
        cookie = request.cookies.get(SECURE_COOKIE) or request.cookies.get(COOKIE)
        address = request.client.host if request.client else ""
        who = self._console.logins.who(cookie, address, dict(request.headers))
        return who or self._console.logins.nobody("nobody", Role.VIEWER)


_TITLES: Final = {
    401: Text("Please log in"),
    403: Text("Not allowed"),
    404: Text("Not found"),
    502: Text("A server did not do it"),
}


async def checked_form(visit: Visit) -> dict[str, str]:
    """The fields of a form that carries the token of its page; raises PageRefused."""
    return dict(await checked_pairs(visit))


async def checked_pairs(visit: Visit) -> list[tuple[str, str]]:
    """The fields of a form with the token, names that come several times included; raises PageRefused."""
    pairs = await visit.form_pairs()
    given = dict(pairs).get("_token", "")
    if not hmac.compare_digest(given.encode(), visit.who.token.encode()):
        visit.audit(visit.request.url.path, "refused", reason="token missing or wrong")
        raise PageRefused(403, Text("this form is too old or came from elsewhere; load the page again"))
    return pairs


def see_other(address: str) -> Response:
    return RedirectResponse(address, 303)


def download(content: bytes, name: str, kind: str = "application/octet-stream") -> Response:
    """A file to keep: no browser shows it as a page."""
    headers = {
        "content-disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}",
        "content-security-policy": "default-src 'none'; sandbox",
    }
    return Response(content, 200, headers, media_type=kind)


def _csv(table: Listing) -> Response:
    text = to_csv(table.rows, [column.key for column in table.columns])
    return download(text.encode(), f"{table.name}.csv", "text/csv; charset=utf-8")


class _Endpoint:
    """Carries a row of the table through Starlette's matching of paths."""

    def __init__(self, row: Address) -> None:
        self.row = row

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError("views are called by Requests")


def _route(row: Address) -> Route:
    return Route(row.path, _Endpoint(row))
