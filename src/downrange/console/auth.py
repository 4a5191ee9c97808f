"""Who is asking: logins, sessions, and the person behind a request.

A session is 256 random bits in a cookie and an entry in memory; it ends after 12 hours, at logout, and when its user
is removed. Without a login everybody on this machine is an administrator. Then, and behind a proxy, there is none,
and the token of forms is derived from a secret of this process.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from downrange.client.admin import Admin
from downrange.clock import Clock
from downrange.console.clusters import Cluster
from downrange.console.config import AccessConfig, LoginKind
from downrange.console.users_file import Role, UsersFile
from downrange.model.errors import MQError
from downrange.model.text import Text, joined, said_by

SESSION_SECONDS: Final = 12 * 3600
MOST_SESSIONS: Final = 10_000
FAILURES_A_MINUTE: Final = 5


class LoginRefused(MQError):
    """Name and password do not fit, or there were too many attempts; the text may be shown to anybody."""


@dataclass(frozen=True, slots=True)
class Who:
    """The person behind a request, and the token that their forms must carry."""

    name: str
    role: Role
    token: str = field(repr=False)
    admins: dict[str, Admin] = field(default_factory=dict, repr=False, compare=False)
    """With `--auth acl`: a session of their own with each cluster that knows them."""


@dataclass(slots=True)
class LoginSession:
    """One login, in memory."""

    who: Who
    ends: float


class Logins:
    """All sessions. Used on the event loop of the console."""

    def __init__(self, access: AccessConfig, clusters: dict[str, Cluster], clock: Clock) -> None:
        self.access = access
        self._clusters = clusters
        self._clock = clock
        self._users = UsersFile(access.users_file) if access.login is LoginKind.FILE and access.users_file else None
        self._sessions: dict[str, LoginSession] = {}
        self._failures: dict[tuple[str, str], deque[float]] = {}
        self._secret = secrets.token_bytes(32)
        self._closing: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<Logins {self.access.login} sessions={len(self._sessions)}>"

    @property
    def has_login_page(self) -> bool:
        return self.access.login in (LoginKind.FILE, LoginKind.ACL)

    @property
    def has_accounts_of_clusters(self) -> bool:
        return self.access.login is LoginKind.ACL

    def nobody(self, name: str, role: Role) -> Who:
        """A person without a session."""
        token = hmac.new(self._secret, name.encode(), hashlib.sha256).hexdigest()
        return Who(name, role, token)

    def who(self, cookie: str | None, address: str, headers: dict[str, str]) -> Who | None:
        """The person behind a request; None: they have to log in, or their proxy does not say who they are."""
        match self.access.login:
            case LoginKind.NONE:
                return self.nobody("local", Role.ADMIN)
            case LoginKind.HEADER:
                return self._from_proxy(address, headers)
            case _:
                return self._from_session(cookie)

    def _from_proxy(self, address: str, headers: dict[str, str]) -> Who | None:
        name = headers.get(self.access.user_header.lower(), "").strip()
        if address not in self.access.proxy_addresses or not name:
            return None
        try:
            role = Role[headers.get(self.access.role_header.lower(), "viewer").strip().upper()]
        except KeyError:
            role = Role.VIEWER
        return self.nobody(name[:256], role)

    def _from_session(self, cookie: str | None) -> Who | None:
        session = self._sessions.get(cookie or "")
        if session is None:
            return None
        is_over = session.ends < self._clock.monotonic()
        if self._users is not None and self._users.role(session.who.name) is not session.who.role:
            is_over = True
        if is_over:
            self._closing = asyncio.ensure_future(self.log_out(cookie))
            return None
        return session.who

    async def log_in(self, name: str, password: str, address: str) -> str:
        """The cookie of a new session; raises LoginRefused."""
        recent = self._recent(name, address)
        if len(recent) >= FAILURES_A_MINUTE:
            raise LoginRefused(Text("too many attempts; wait a minute"))
        recent.append(self._clock.monotonic())
        token = secrets.token_urlsafe(32)
        if self.access.login is LoginKind.ACL:
            who = Who(name, Role.ADMIN, token, await self._admins(name, password))
        else:
            assert self._users is not None
            user = await asyncio.to_thread(self._users.check, name, password)
            if user is None:
                raise LoginRefused(Text("name and password do not fit"))
            who = Who(name, user.role, token)
        recent.clear()
        cookie = secrets.token_urlsafe(32)
        self._make_room()
        self._sessions[cookie] = LoginSession(who, self._clock.monotonic() + SESSION_SECONDS)
        return cookie

    def _recent(self, name: str, address: str) -> deque[float]:
        now = self._clock.monotonic()
        if len(self._failures) > MOST_SESSIONS:
            self._failures = {key: times for key, times in self._failures.items() if times and times[-1] > now - 60}
        times = self._failures.setdefault((name, address), deque())
        while times and times[0] <= now - 60:
            times.popleft()
        return times

    def _make_room(self) -> None:
        now = self._clock.monotonic()
        if len(self._sessions) >= MOST_SESSIONS:
            self._sessions = {key: one for key, one in self._sessions.items() if one.ends > now}
        while len(self._sessions) >= MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]

    async def _admins(self, access_key: str, secret_key: str) -> dict[str, Admin]:
        """Sessions of this user with the clusters that know them. A cluster without access control proves nothing."""
        found: dict[str, Admin] = {}
        reasons: list[Text] = []
        for name, cluster in self._clusters.items():
            admin = cluster.admin_of(access_key, secret_key)
            problem = await _problem(admin)
            if problem is None:
                found[name] = admin
            else:
                reasons.append(joined(": ", (name, problem)))
                await admin.session.close()
        if not found:
            raise LoginRefused(joined("; ", reasons) if reasons else Text("there is no cluster to ask"))
        return found

    async def log_out(self, cookie: str | None) -> None:
        session = self._sessions.pop(cookie or "", None)
        if session is not None:
            for admin in session.who.admins.values():
                await admin.session.close()

    async def close(self) -> None:
        for cookie in list(self._sessions):
            await self.log_out(cookie)


async def _problem(admin: Admin) -> Text | None:
    """Why an account is not let in: no broker, no access control, or the broker refuses it."""
    try:
        async with asyncio.timeout(5):
            masters = await admin.session.masters()
            if not masters:
                return Text("no broker is registered")
            answers = await admin.cluster.config(broker=masters[0].address)
            answers.raise_if_none()
    except TimeoutError:
        return Text("no answer within {seconds:g} s", seconds=5)
    except MQError as error:
        return said_by(error)
    settings = next(iter(answers.done.values())).table
    is_on = "true" in (settings.get("aclEnable"), settings.get("authenticationEnabled"))
    return None if is_on else Text("it has no access control, so that a key proves nothing")
