"""Builds a console once, and runs it: samplers, jobs and the HTTP server, on one event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any, Final
from urllib.parse import quote

import uvicorn

from downrange.clock import Clock, SystemClock
from downrange.console import formats
from downrange.console.audit import AuditLog
from downrange.console.auth import Logins
from downrange.console.clusters import Cluster
from downrange.console.config import ConsoleConfig, LoginKind
from downrange.console.findings import Finding, Looked, findings
from downrange.console.history_file import HistoryFile
from downrange.console.jobs import Jobs
from downrange.console.languages import LANGUAGES
from downrange.console.pages import Page, Templates
from downrange.console.plans import Plans
from downrange.console.requests import READING, Requests, Visit
from downrange.console.sampler import Sampler, watching
from downrange.console.static_files import StaticFiles
from downrange.console.streams import Streams
from downrange.console.users_file import Role
from downrange.console.views import ADDRESSES
from downrange.model.errors import MQError
from downrange.model.text import Text

log = logging.getLogger(__name__)


WARM_SECONDS: Final = 1.5


class ConsoleCannotListen(MQError):
    """The address of the console is taken, or not of this machine."""


class Console:
    """Everything that lives as long as a console. Views get it with each visit."""

    def __init__(self, config: ConsoleConfig, clock: Clock | None = None) -> None:
        self.config = config
        self.clock = clock or SystemClock()
        self.clusters = {
            name: Cluster(name, one, self.clock, config.metrics.get(name, ())) for name, one in config.clusters.items()
        }
        self.samplers: dict[str, Sampler] = {}
        self.file = HistoryFile(config.history)
        self.audit = AuditLog(config.audit_path)
        self.logins = Logins(config.access, self.clusters, self.clock)
        self.plans = Plans(self.file, self.clock)
        self.jobs = Jobs(self.file, self.clock)
        self.streams = Streams()
        self.static = StaticFiles()
        self._templates = Templates(self.static)
        self._findings: dict[str, tuple[float, str, list[Finding]]] = {}

    def __repr__(self) -> str:
        return f"<Console {', '.join(self.clusters)}>"

    def look(self, visit: Visit, cluster: Cluster) -> Looked:
        return Looked(cluster.snapshot, cluster.history, visit.now, visit.zone)

    def findings(self, visit: Visit, cluster: Cluster) -> list[Finding]:
        """The findings of a cluster, at most a second old."""
        now, zone = self.clock.monotonic(), str(visit.zone)
        kept = self._findings.get(cluster.name)
        if kept is None or now - kept[0] > 1 or kept[1] != zone:
            kept = (now, zone, findings(self.look(visit, cluster)))
            self._findings[cluster.name] = kept
        return kept[2]

    async def warm(self) -> None:
        """Prepare views and templates when the first page is out: it comes sooner without that."""
        await asyncio.sleep(WARM_SECONDS)
        for address in ADDRESSES:
            _ = address.handler
            await asyncio.sleep(0)  # requests that wait have their turn between the modules
        await asyncio.to_thread(self._templates.warm)

    def render(self, visit: Visit, page: Page) -> str:
        values = {**self._layout(visit, page), **page.data, **page.chrome}
        return self._templates.render(page.template, values, visit.language)

    def _layout(self, visit: Visit, page: Page) -> dict[str, Any]:
        known = visit.clusters if visit.who.name != "nobody" else {}
        cluster = known.get(str(visit.request.path_params.get("cluster", "")))
        cookies = visit.request.cookies
        zone, now = visit.zone, visit.now
        return {
            "title": page.title,
            "command": page.command,
            "visit": visit,
            "who": visit.who,
            "token": visit.who.token,
            "is_known": visit.who.name != "nobody",
            "has_name": self.config.access.login is not LoginKind.NONE,
            "has_login_page": self.logins.has_login_page,
            "read_only": self.config.access.read_only,
            "may_operate": visit.may(Role.OPERATOR),
            "may_administer": visit.may(Role.ADMIN),
            "cluster": cluster.name if cluster is not None else None,
            "clusters": list(known),
            "navigation": navigation(cluster, visit) if cluster is not None else [],
            "theme": cookies.get("theme") if cookies.get("theme") in ("light", "dark") else "auto",
            "dense": cookies.get("dense") == "1",
            "json_address": json_address(visit),
            "now": now,
            "moment": lambda millis, exact=False: formats.moment(millis, zone, now, with_millis=exact),
            "when": lambda millis: formats.when(millis, zone, now),
            "zone_name": str(zone),
            "language": visit.language,
            "languages": list(LANGUAGES.values()),
            "here": here(visit),
        }


_PAGES = (
    ("overview", "", Text("Overview"), "o"),
    ("topics", "topics", Text("Topics"), "t"),
    ("groups", "groups", Text("Groups"), "g"),
    ("messages", "messages", Text("Messages"), "m"),
    ("tail", "tail", Text("Live tail"), "l"),
    ("dead-letters", "dead-letters", Text("Dead letters"), "d"),
    ("delayed", "delayed", Text("Delayed"), "y"),
    ("transactions", "transactions", Text("Transactions"), "x"),
    ("clients", "clients", Text("Clients"), "c"),
    ("brokers", "brokers", Text("Brokers"), "b"),
    ("name-servers", "name-servers", Text("Name servers"), "n"),
    ("pipelines", "pipelines", Text("Pipelines"), "p"),
    ("users", "users", Text("Users"), "u"),
)


def navigation(cluster: Cluster, visit: Visit) -> list[dict[str, Any]]:
    """The pages of a cluster, with the figures that stand beside their names."""
    snapshot = cluster.snapshot
    dead = snapshot.all_dead_letters
    trouble = len(snapshot.lost) + sum(1 for one in snapshot.brokers.values() if one.error is not None)
    badges = {
        "groups": (len(snapshot.groups_behind) or "", Text("groups behind")),
        "dead-letters": (formats.number(dead) if dead else "", Text("dead letters")),
        "brokers": ("!" if trouble else "", Text("brokers in trouble")),
    }
    parts = visit.request.scope["path"].split("/")
    current = parts[3] if len(parts) > 3 else "overview"
    current = {"at": "messages", "plans": "", "jobs": "dead-letters"}.get(current, current)
    return [
        {
            "name": name,
            "address": f"/c/{quote(cluster.name)}" + (f"/{path}" if path else ""),
            "label": label,
            "key": key,
            "badge": badges.get(name, ("", ""))[0],
            "badge_title": badges.get(name, ("", ""))[1],
            "is_current": name == current,
        }
        for name, path, label, key in _PAGES
    ]


def here(visit: Visit) -> str:
    """The address of this page, to come back to; that of a form leads to the beginning."""
    if visit.request.method not in READING:
        return "/"
    query = visit.request.url.query
    return quote(visit.request.scope["path"], safe="/") + (f"?{query}" if query else "")


def json_address(visit: Visit) -> str:
    path = quote(visit.request.scope["path"], safe="/")
    query = visit.request.url.query
    return ("/index" if path == "/" else path) + ".json" + (f"?{query}" if query else "")


@asynccontextmanager
async def console(config: ConsoleConfig, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[Console, str]]:
    """A running console, for the length of a block, and the address that people open."""
    built = Console(config)
    listening = _listen(config.bind, config.port)
    server = _Server(
        uvicorn.Config(
            Requests(built, ADDRESSES),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=30,
            http="h11",
            ws="none",
            proxy_headers=False,
            ssl_context_factory=None if tls is None else lambda _config, _default: tls,
        )
    )
    async with watching(list(built.clusters.values()), config.pace, built.file) as samplers:
        built.samplers = samplers
        serving = asyncio.create_task(server.serve([listening]))
        warming = asyncio.create_task(built.warm())
        try:
            port = listening.getsockname()[1]
            host = f"[{config.bind}]" if ":" in config.bind else config.bind
            yield built, config.access.public_url or f"http{'s' if tls else ''}://{host}:{port}/"
        finally:
            server.should_exit = True
            built.streams.begin_to_close()
            warming.cancel()
            await asyncio.wait((serving, warming))
            await built.streams.close()
            await built.jobs.close()
            await built.logins.close()
            built.file.close()


class _Server(uvicorn.Server):
    """uvicorn without its own handling of signals: the process has one already."""

    def capture_signals(self) -> Any:
        return nullcontext()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(256)
        listening.setblocking(False)
    except OSError as error:
        text = f"cannot listen on {host}:{port}: {error.strerror or error}; --port takes another port"
        raise ConsoleCannotListen(text) from None
    return listening
