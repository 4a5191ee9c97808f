"""Users of clusters with ACL 2.0, and their access rules. Changes go to masters: slaves copy them."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Final

from msgspec.structs import replace

from downrange.client.admin.chosen_brokers import chosen_brokers, tell_brokers
from downrange.client.brokers import Broker
from downrange.client.errors import ClientError
from downrange.client.per_server import PerServer, ask_each
from downrange.client.session import Session
from downrange.model.text import Text
from downrange.protocol.bodies.body import BodyError, decode_body, encode_body
from downrange.protocol.bodies.users import (
    AccountTable,
    AclInfo,
    DeleteAclRequest,
    ListAclsRequest,
    ListUsersRequest,
    PolicyEntryInfo,
    PolicyInfo,
    SubjectRequest,
    UserInfo,
    UsernameRequest,
)
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request
from downrange.protocol.sealing import unseal

__all__ = [
    "AclAdmin",
    "AclInfo",
    "DeleteAclRequest",
    "ListAclsRequest",
    "PolicyEntryInfo",
    "PolicyInfo",
    "UserAdmin",
    "UserInfo",
]

_CHALLENGE_BYTES: Final = 16


class UserNotFound(ClientError):
    """A broker has no such user, or no rules of one."""


class UserAdmin:
    """Actions on users. `broker` is a broker name or an address."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def create(
        self, user: UserInfo, cluster: str | None = None, broker: str | None = None
    ) -> PerServer[Broker, None]:
        return await self._put(RequestCode.AUTH_CREATE_USER, user, cluster, broker)

    async def update(
        self, user: UserInfo, cluster: str | None = None, broker: str | None = None
    ) -> PerServer[Broker, None]:
        """Change a user; members that are None stay as they are."""
        return await self._put(RequestCode.AUTH_UPDATE_USER, user, cluster, broker)

    async def _put(
        self, code: RequestCode, user: UserInfo, cluster: str | None, broker: str | None
    ) -> PerServer[Broker, None]:
        command = request(code, UsernameRequest(user.username or ""), body=encode_body(user))
        return await tell_brokers(self._session, command, cluster, broker)

    async def delete(
        self, username: str, cluster: str | None = None, broker: str | None = None
    ) -> PerServer[Broker, None]:
        """Delete a user and its rules."""
        command = request(RequestCode.AUTH_DELETE_USER, UsernameRequest(username))
        return await tell_brokers(self._session, command, cluster, broker)

    async def get(
        self, username: str, cluster: str | None = None, broker: str | None = None
    ) -> PerServer[Broker, UserInfo | None]:
        """A user as each broker knows it; None where it does not exist."""

        async def ask(one: Broker) -> UserInfo | None:
            reply = await self._session.ask(one, request(RequestCode.AUTH_GET_USER, UsernameRequest(username)))
            return _without_password(decode_body(UserInfo, reply.body_bytes)) if reply.body_bytes else None

        return await ask_each(await chosen_brokers(self._session, cluster, broker), ask)

    async def list(
        self, filter: str | None = None, cluster: str | None = None, broker: str | None = None
    ) -> PerServer[Broker, tuple[UserInfo, ...]]:
        """The users of each broker whose names have the text `filter`."""

        async def ask(one: Broker) -> tuple[UserInfo, ...]:
            reply = await self._session.ask(one, request(RequestCode.AUTH_LIST_USER, ListUsersRequest(filter=filter)))
            users = decode_body(tuple[UserInfo, ...], reply.body_bytes) if reply.body_bytes else ()
            return tuple(map(_without_password, users))

        return await ask_each(await chosen_brokers(self._session, cluster, broker), ask)

    async def copy(self, source: str, target: str, usernames: Collection[str] = ()) -> tuple[str, ...]:
        """Create or change users at one broker as they are at another, all or some; return their names.

        Our brokers tell passwords to their own account only, so that a copy must be signed with it.
        """
        here, there = await self._session.broker(source), await self._session.broker(target)
        found = {user.username: user for user in await self._with_passwords(here) if user.username is not None}
        names = tuple(usernames) or tuple(sorted(found))
        if missing := [name for name in names if name not in found]:
            raise UserNotFound(Text("{here} has no user {missing}", here=here, missing=missing[0]))
        known = {user.username for user in (await self.list(broker=there.address)).done[there]}
        for name in names:
            code = RequestCode.AUTH_UPDATE_USER if name in known else RequestCode.AUTH_CREATE_USER
            await self._session.ask(there, request(code, UsernameRequest(name), body=encode_body(found[name])))
        return names

    async def _with_passwords(self, broker: Broker) -> tuple[UserInfo, ...]:
        challenge = secrets.token_hex(_CHALLENGE_BYTES)
        command = request(RequestCode.AUTH_LIST_USER, ListUsersRequest(challenge=challenge))
        body = (await self._session.ask(broker, command)).body_bytes
        try:  # RocketMQ's brokers do not know the field, and show all passwords
            return decode_body(tuple[UserInfo, ...], body)
        except BodyError:
            secret = (self._session.config.secret_key or "").encode()
            return decode_body(AccountTable, unseal(body, secret, challenge)).users


class AclAdmin:
    """Actions on the access rules of users. A subject is `User:NAME`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def put(self, acl: AclInfo, cluster: str | None = None, broker: str | None = None) -> PerServer[Broker, None]:
        """Add rules, in the place of those about the same resources."""
        command = request(RequestCode.AUTH_UPDATE_ACL, SubjectRequest(acl.subject or ""), body=encode_body(acl))
        return await tell_brokers(self._session, command, cluster, broker)

    async def delete(
        self, rules: DeleteAclRequest, cluster: str | None = None, broker: str | None = None
    ) -> PerServer[Broker, None]:
        """Delete the rule about one resource, or all rules of a subject."""
        return await tell_brokers(self._session, request(RequestCode.AUTH_DELETE_ACL, rules), cluster, broker)

    async def get(
        self, subject: str, cluster: str | None = None, broker: str | None = None
    ) -> PerServer[Broker, AclInfo | None]:
        """The rules of a subject as each broker knows them; None where it has none."""

        async def ask(one: Broker) -> AclInfo | None:
            reply = await self._session.ask(one, request(RequestCode.AUTH_GET_ACL, SubjectRequest(subject)))
            return decode_body(AclInfo, reply.body_bytes) if reply.body_bytes else None

        return await ask_each(await chosen_brokers(self._session, cluster, broker), ask)

    async def list(
        self, wanted: ListAclsRequest, cluster: str | None = None, broker: str | None = None
    ) -> PerServer[Broker, tuple[AclInfo, ...]]:
        """The rules of each broker with these texts in subject and resource."""

        async def ask(one: Broker) -> tuple[AclInfo, ...]:
            reply = await self._session.ask(one, request(RequestCode.AUTH_LIST_ACL, wanted))
            return decode_body(tuple[AclInfo, ...], reply.body_bytes) if reply.body_bytes else ()

        return await ask_each(await chosen_brokers(self._session, cluster, broker), ask)

    async def copy(self, source: str, target: str, subjects: Collection[str] = ()) -> tuple[str, ...]:
        """Put the rules of one broker into another, all or those of some subjects; return the subjects."""
        here, there = await self._session.broker(source), await self._session.broker(target)
        listed = await self.list(ListAclsRequest(), broker=here.address)
        listed.raise_if_none()
        found = {acl.subject: acl for acls in listed.done.values() for acl in acls if acl.subject is not None}
        names = tuple(subjects) or tuple(found)
        if missing := [name for name in names if name not in found]:
            raise UserNotFound(Text("{here} has no rules of {missing}", here=here, missing=missing[0]))
        for name in names:
            body = encode_body(found[name])
            await self._session.ask(there, request(RequestCode.AUTH_UPDATE_ACL, SubjectRequest(name), body=body))
        return names


def _without_password(user: UserInfo) -> UserInfo:
    """A user without the password that RocketMQ's brokers show."""
    return replace(user, password=None)
