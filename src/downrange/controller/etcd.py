"""A client of etcd with the five calls that the controller needs, through the JSON gateway that every etcd 3 has.

    range  txn  lease_grant  lease_keepalive  watch          (and `authenticate`, if there is a user)

Keys and values travel in base64, 64-bit numbers as strings, and false and 0 are left out. A call that only reads is
tried at every endpoint in turn. A transaction is sent once: when its answer is lost, nobody knows its outcome.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from downrange.controller.coordination import (
    Committed,
    Compare,
    Delete,
    Found,
    KeyValue,
    Lease,
    OutcomeUnknown,
    Put,
    StoreUnavailable,
    Target,
)
from downrange.controller.http_json import Endpoint, HttpConnection, HttpError

log = logging.getLogger(__name__)

MOST_IDLE: Final = 4
CONNECT_SECONDS: Final = 1.0
_UNAUTHENTICATED: Final = 16  # gRPC's number


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """How etcd is reached."""

    endpoints: tuple[Endpoint, ...]
    timeout: float = 3.0
    """For one call, all endpoints that are tried for it included."""
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    user: str = ""
    password: str = field(default="", repr=False)


class _Refused(Exception):
    """etcd answered with an error. `code` is gRPC's."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class EtcdClient:
    """Calls to one etcd cluster. Any number of tasks may call."""

    def __init__(self, access: EtcdAccess) -> None:
        self._access = access
        self._current = 0
        self._idle: list[HttpConnection] = []
        self._token = ""

    def __repr__(self) -> str:
        return f"<EtcdClient {', '.join(map(str, self._access.endpoints))}>"

    # --- the five calls -----------------------------------------------------------------------------------------

    async def range(self, key: str, *, is_prefix: bool = False) -> Found:
        body = {"key": _b64(key)}
        if is_prefix:
            body["range_end"] = b64encode(_after_prefix(key.encode())).decode()
        answer = await self._read("/v3/kv/range", body)
        return Found(_revision(answer), tuple(map(_key_value, answer.get("kvs", ()))))

    async def txn(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> Committed:
        body = {
            "compare": [_compare(compare) for compare in compares],
            "success": [_operation(operation) for operation in operations],
            "failure": [{"request_range": {"key": _b64(compare.key)}} for compare in compares],
        }
        answer = await (self._write if operations else self._read)("/v3/kv/txn", body)
        if answer.get("succeeded"):
            return Committed(True, _revision(answer))
        ranges = (one.get("response_range", {}) for one in answer.get("responses", ()))
        items = tuple(_key_value(item) for found in ranges for item in found.get("kvs", ()))
        return Committed(False, _revision(answer), items)

    async def lease_grant(self, ttl: int) -> Lease:
        answer = await self._read("/v3/lease/grant", {"TTL": str(ttl)})
        return Lease(int(answer.get("ID", 0)), int(answer.get("TTL", 0)))

    async def lease_keepalive(self, lease: int, timeout: float) -> int:
        answer = await self._read("/v3/lease/keepalive", {"ID": str(lease)}, timeout)
        return int(answer.get("result", {}).get("TTL", 0))

    async def watch(self, key: str, revision: int, timeout: float) -> bool:
        body = {"create_request": {"key": _b64(key), "start_revision": str(revision)}}
        connection: HttpConnection | None = None
        try:
            async with asyncio.timeout(timeout):
                connection = await self._connect()
                async for line in connection.stream("/v3/watch", body, await self._headers()):
                    result = line.get("result", {}) if isinstance(line, dict) else {}
                    if result.get("events") or result.get("canceled"):
                        return True
        except TimeoutError:
            return False
        except (HttpError, _Refused) as error:
            self._next_endpoint()
            raise StoreUnavailable(f"etcd: {error}") from None
        finally:
            if connection is not None:
                connection.abort()
        raise StoreUnavailable(f"etcd: {self._endpoint} ended the watch")

    async def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    # --- calling ------------------------------------------------------------------------------------------------

    @property
    def _endpoint(self) -> Endpoint:
        return self._access.endpoints[self._current]

    def _next_endpoint(self) -> None:
        self._current = (self._current + 1) % len(self._access.endpoints)
        while self._idle:
            self._idle.pop().abort()

    async def _read(self, path: str, body: object, timeout: float | None = None) -> Mapping[str, Any]:
        """A call that may be repeated: each endpoint gets its share of the time."""
        seconds = (timeout or self._access.timeout) / len(self._access.endpoints)
        problem = ""
        for _ in self._access.endpoints:
            try:
                async with asyncio.timeout(seconds):
                    return await self._call(await self._connect(), path, body)
            except TimeoutError:
                problem = f"{self._endpoint} did not answer within {seconds:g} s"
            except (HttpError, _Refused) as error:
                problem = str(error)
            self._next_endpoint()
        raise StoreUnavailable(f"etcd: {problem}")

    async def _write(self, path: str, body: object) -> Mapping[str, Any]:
        """A call that is sent once."""
        deadline = asyncio.get_running_loop().time() + self._access.timeout
        connection = await self._connect_anywhere(deadline)
        try:
            async with asyncio.timeout_at(deadline):
                return await self._call(connection, path, body)
        except TimeoutError:
            problem = f"{self._endpoint} did not answer within {self._access.timeout:g} s"
        except (HttpError, _Refused) as error:
            problem = str(error)
        self._next_endpoint()
        raise OutcomeUnknown(f"etcd: {problem}")

    async def _connect_anywhere(self, deadline: float) -> HttpConnection:
        problem = ""
        for _ in self._access.endpoints:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._headers()  # a token is got before the transaction can have any effect
                    return await self._connect()
            except TimeoutError:
                problem = f"cannot connect to {self._endpoint} in time"
            except (HttpError, _Refused) as error:
                problem = str(error)
            self._next_endpoint()
        raise StoreUnavailable(f"etcd: {problem}")

    async def _connect(self) -> HttpConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
            connection.close()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return await HttpConnection.open(self._endpoint, self._access.tls)
        except TimeoutError:
            raise HttpError(f"cannot connect to {self._endpoint} within {CONNECT_SECONDS:g} s") from None

    async def _call(self, connection: HttpConnection, path: str, body: object) -> Mapping[str, Any]:
        endpoint = connection.endpoint
        is_done = False
        try:
            status, answer = await connection.call(path, body, await self._headers())
            is_done = True
        finally:
            if is_done and connection.is_usable and endpoint == self._endpoint and len(self._idle) < MOST_IDLE:
                self._idle.append(connection)
            else:
                connection.abort()
        if status == 200 and isinstance(answer, dict):
            return answer
        code, text = _error_of(answer)
        if code == _UNAUTHENTICATED or status == 401:
            self._token = ""  # it has expired: the next call gets another one
        raise _Refused(code, f"{endpoint} answered {status} {text}")

    async def _headers(self) -> dict[str, str]:
        access = self._access
        if not access.user:
            return {}
        if not self._token:
            connection = await HttpConnection.open(self._endpoint, access.tls)
            try:
                body = {"name": access.user, "password": access.password}
                status, answer = await connection.call("/v3/auth/authenticate", body, {})
            finally:
                connection.close()
            token = answer.get("token") if isinstance(answer, dict) else None
            if status != 200 or not isinstance(token, str):
                code, text = _error_of(answer)
                raise _Refused(code, f"{self._endpoint} does not let user {access.user} in: {text}")
            self._token = token
        return {"Authorization": self._token}


# --- forms of the gateway ---------------------------------------------------------------------------------------------


def _b64(text: str) -> str:
    return b64encode(text.encode()).decode()


def _after_prefix(prefix: bytes) -> bytes:
    """The first key behind all keys that begin with `prefix`."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _revision(answer: Mapping[str, Any]) -> int:
    return int(answer.get("header", {}).get("revision", 0))


def _key_value(item: Mapping[str, Any]) -> KeyValue:
    return KeyValue(
        b64decode(item.get("key", "")).decode(),
        b64decode(item.get("value", "")),
        int(item.get("create_revision", 0)),
        int(item.get("mod_revision", 0)),
    )


def _compare(compare: Compare) -> dict[str, str]:
    name = "create_revision" if compare.target is Target.CREATED else "mod_revision"
    return {"key": _b64(compare.key), "target": compare.target, "result": "EQUAL", name: str(compare.revision)}


def _operation(operation: Put | Delete) -> dict[str, dict[str, str]]:
    if isinstance(operation, Delete):
        return {"request_delete_range": {"key": _b64(operation.key)}}
    put = {"key": _b64(operation.key), "value": b64encode(operation.value).decode()}
    return {"request_put": {**put, "lease": str(operation.lease)} if operation.lease else put}


def _error_of(answer: object) -> tuple[int, str]:
    """gRPC's code and the words of an error. Texts of etcd never have a password, but may be long."""
    if not isinstance(answer, dict):
        return 2, "no JSON object"
    inner = answer.get("error")
    found = inner if isinstance(inner, dict) else answer
    code = found.get("grpc_code") or found.get("code") or 2
    return int(code), str(found.get("message", inner))[:200]
