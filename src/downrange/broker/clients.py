"""The connected clients: consumers by group with their subscriptions, producers by group.

A member is identified by its connection. It leaves by request, when its connection closes, or when it sent no heartbeat
for two minutes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from downrange.model.subscription import Subscription
from downrange.transport.connection import Connection

log = logging.getLogger(__name__)

CLIENT_EXPIRES_MILLIS: Final = 120_000


@dataclass(slots=True)
class Client:
    """One client of a group, as its last heartbeat described it."""

    connection: Connection
    client_id: str
    language: int
    version: int
    heard_millis: int


@dataclass(slots=True)
class ConsumerGroup:
    """The live members of a group and its settings, which the last heartbeat of any member determines."""

    name: str
    consume_type: str
    message_model: str
    consume_from_where: str
    subscriptions: dict[str, Subscription] = field(default_factory=dict)
    members: dict[Connection, Client] = field(default_factory=dict)

    @property
    def is_broadcasting(self) -> bool:
        return self.message_model == "BROADCASTING"

    def find(self, client_id: str) -> Client | None:
        return next((client for client in self.members.values() if client.client_id == client_id), None)


class Consumers:
    """Group name -> live consumer group.

    `on_change` is called with a group whose members or topics changed, `on_gone` with the name of a group that lost its
    last member.
    """

    def __init__(self) -> None:
        self._groups: dict[str, ConsumerGroup] = {}
        self.on_change: Callable[[ConsumerGroup], None] = lambda group: None
        self.on_gone: Callable[[str], None] = lambda group: None

    def __iter__(self) -> Iterator[ConsumerGroup]:
        return iter(list(self._groups.values()))

    def __len__(self) -> int:
        return len(self._groups)

    def get(self, group: str) -> ConsumerGroup | None:
        return self._groups.get(group)

    def subscription(self, group: str, topic: str) -> Subscription | None:
        live = self._groups.get(group)
        return None if live is None else live.subscriptions.get(topic)

    def groups_of(self, topic: str) -> set[str]:
        """Groups with a live member that subscribes to `topic`."""
        return {group.name for group in self._groups.values() if topic in group.subscriptions}

    def heartbeat(
        self,
        group: str,
        client: Client,
        *,
        consume_type: str,
        message_model: str,
        consume_from_where: str,
        subscriptions: Iterable[Subscription],
    ) -> bool:
        """Add a member or refresh it; True when its arrival or its topics changed the group."""
        live = self._groups.get(group)
        if live is None:
            live = self._groups[group] = ConsumerGroup(group, consume_type, message_model, consume_from_where)
        live.consume_type = consume_type
        live.message_model = message_model
        live.consume_from_where = consume_from_where
        is_new = client.connection not in live.members
        live.members[client.connection] = client
        wanted = {subscription.topic: subscription for subscription in subscriptions}
        changed = is_new or wanted.keys() != live.subscriptions.keys()
        for topic, subscription in wanted.items():
            known = live.subscriptions.get(topic)
            if known is None or subscription.version > known.version:
                live.subscriptions[topic] = subscription
        # Members of one group with different topics overwrite each other, as in RocketMQ.
        for topic in live.subscriptions.keys() - wanted.keys():
            del live.subscriptions[topic]
        if changed:
            self.on_change(live)
        return changed

    def leave(self, group: str, connection: Connection) -> None:
        live = self._groups.get(group)
        if live is not None and live.members.pop(connection, None) is not None:
            self._member_left(live)

    def drop(self, connection: Connection) -> None:
        """Remove the member of a closed connection from its groups."""
        for live in self:
            self.leave(live.name, connection)

    def expire(self, now: int) -> list[Connection]:
        """Forget members that fell silent; return their connections for the caller to close."""
        silent = []
        for live in self:
            gone = [c for c, client in live.members.items() if client.heard_millis + CLIENT_EXPIRES_MILLIS < now]
            for connection in gone:
                log.warning("consumer expired group=%s client=%s", live.name, live.members[connection].client_id)
                self.leave(live.name, connection)
            silent += gone
        return silent

    def _member_left(self, live: ConsumerGroup) -> None:
        if live.members:
            self.on_change(live)
        else:
            self._groups.pop(live.name, None)
            self.on_gone(live.name)


class Producers:
    """Group name -> its connected producers."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[Connection, Client]] = {}
        self._turn = 0
        self.may_see: Callable[[Connection, str], bool] = lambda connection, topic: True
        """Whether a producer may see messages of a topic: everybody may call itself a member of a producer group."""

    def __iter__(self) -> Iterator[tuple[str, list[Client]]]:
        return iter([(group, list(members.values())) for group, members in self._groups.items()])

    def heartbeat(self, group: str, client: Client) -> None:
        self._groups.setdefault(group, {})[client.connection] = client

    def get(self, group: str) -> list[Client] | None:
        members = self._groups.get(group)
        return None if members is None else list(members.values())

    def find(self, client_id: str) -> Client | None:
        """The producer with this id, whatever its group."""
        for members in self._groups.values():
            for client in members.values():
                if client.client_id == client_id:
                    return client
        return None

    def pick(self, group: str, topic: str) -> Client | None:
        """The next producer in turn that may see messages of the topic; if possible one that accepts data."""
        members = [
            client
            for client in self._groups.get(group, {}).values()
            if client.connection.is_open and self.may_see(client.connection, topic)
        ]
        if not members:
            return None
        self._turn += 1
        start = self._turn % len(members)
        ordered = members[start:] + members[:start]
        return next((client for client in ordered if client.connection.is_writable), ordered[0])

    def leave(self, group: str, connection: Connection) -> None:
        members = self._groups.get(group)
        if members is not None:
            members.pop(connection, None)
            if not members:
                del self._groups[group]

    def drop(self, connection: Connection) -> None:
        for group in list(self._groups):
            self.leave(group, connection)

    def expire(self, now: int) -> list[Connection]:
        silent = []
        for group, members in self:
            for client in members:
                if client.heard_millis + CLIENT_EXPIRES_MILLIS < now:
                    log.warning("producer expired group=%s client=%s", group, client.client_id)
                    self.leave(group, client.connection)
                    silent.append(client.connection)
        return silent
