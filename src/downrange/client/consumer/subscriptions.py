"""Subscriptions of a consumer: made from the user's expressions, checked by a broker, told to all brokers."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from downrange.client.consumer.addresses import masters_of_route
from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.lite_pull_config import LitePullConfig
from downrange.client.consumer.simple_config import SimpleConsumerConfig
from downrange.client.errors import NoRoute
from downrange.client.session import Session
from downrange.model.errors import MessageError, MQError
from downrange.model.subscription import SQL92, SUB_ALL, TAG, Subscription, subscribe
from downrange.model.topics import RETRY_PREFIX
from downrange.protocol.bodies.body import decode_body, encode_body
from downrange.protocol.bodies.groups import (
    CheckClientBody,
    ConsumerConnection,
    ConsumerData,
    ConsumerGroupRequest,
    ConsumeType,
)
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request
from downrange.protocol.errors import NoPermission, RequestCodeNotSupported

log = logging.getLogger(__name__)


class Subscriptions:
    """Topic -> subscription, of one member of a group. Used on the consumer's event loop.

    Holds always: one that replaces another has a higher version, for brokers take no other over theirs.
    Pulls read `table`.
    """

    def __init__(self, session: Session, group: str) -> None:
        self._session = session
        self._group = group
        self.table: dict[str, Subscription] = {}
        self._announced: dict[str, Subscription] = {}
        """Subscriptions that brokers are being told, and that pulls do not name yet."""
        self._missed: set[str] = set()
        self._told: set[str] = set()
        self._may_not_compare = False

    def __repr__(self) -> str:
        return f"<Subscriptions {self._group} {','.join(self.table)}>"

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[Subscription]:
        return iter(self.table.values())

    def new(self, topic: str, expression: str, sql: str | None) -> Subscription:
        """A new subscription by tags `A || B` or by `sql`, not in the table yet; raises MessageError."""
        if not isinstance(expression, str):
            kind = type(expression).__name__  # type: ignore[unreachable]  # callers without types
            raise MessageError(f"tags are a text such as 'A || B', not a {kind}; a consumer is made with its callback")
        if sql is not None and not sql.strip():
            raise MessageError("the SQL expression is blank")
        if sql is not None and expression != SUB_ALL:
            raise MessageError("tags and an SQL expression cannot be combined; SQL92 knows the tag as TAGS")
        text, kind = (expression, TAG) if sql is None else (sql, SQL92)
        return subscribe(topic, text, kind, self._next_version(self.table.get(topic)))

    def _next_version(self, known: Subscription | None) -> int:
        return max(self._session.clock.now(), known.version + 1 if known is not None else 0)

    async def follow(self, topic: str) -> bool:
        """Look a topic up, and have its route kept fresh; whether it exists.

        A topic that does not exist yet is no error, but often a slip of the pen: a warning names the nearest topic.
        """
        try:
            await self._session.follow(topic)
        except NoRoute:
            if topic not in self._missed and not topic.startswith(RETRY_PREFIX):
                self._missed.add(topic)
                log.warning("%s", await self._missing_text(topic))
            return False
        return True

    async def exists(self, topic: str) -> bool:
        """Whether brokers serve a topic that nobody subscribed to; from then on its route is kept fresh."""
        try:
            await self._session.look_up_route(topic)
        except NoRoute:
            return False
        return await self.follow(topic)

    async def _missing_text(self, topic: str) -> str:
        text = f"group {self._group} waits for the topic {topic}, which does not exist yet"
        try:
            near = await self._session.nearest_topic(topic)
        except MQError:
            return text
        return f"{text}; did you mean {near}?" if near is not None else text

    async def compare(self) -> None:
        """Warn if the members of this group subscribe differently: then each of them loses messages.

        A broker keeps the subscriptions of the member that it heard last, and filters the pulls of all by them.
        """
        route = next((found for topic in self.table if (found := self._session.known_route(topic)) is not None), None)
        if route is None or self._may_not_compare:
            return
        try:
            address = masters_of_route(route, self._group)[0].address
            command = request(RequestCode.GET_CONSUMER_CONNECTION_LIST, ConsumerGroupRequest(self._group))
            group = decode_body(ConsumerConnection, (await self._session.invoke(address, command)).body_bytes)
        except MQError as error:
            self._may_not_compare = isinstance(error, NoPermission | RequestCodeNotSupported)
            return
        if {member.client_id for member in group.connection_set} <= {self._session.client_id}:
            return  # nobody else: the broker has not heard of our last change
        for text in _differences(self.table, group.subscription_table):
            if text not in self._told:
                self._told.add(text)
                log.warning("members of group %s subscribe differently and lose messages: %s", self._group, text)

    async def check(self, subscription: Subscription) -> None:
        """Ask a broker whether it can evaluate an SQL expression; raises what is wrong with it.

        One that it cannot evaluate would silently match everything.
        """
        route = self._session.known_route(subscription.topic)
        if subscription.is_tag_type or route is None:
            return
        body = CheckClientBody(client_id=self._session.client_id, group=self._group, subscription_data=subscription)
        address = masters_of_route(route, subscription.topic)[0].address
        await self._session.invoke(address, request(RequestCode.CHECK_CLIENT_CONFIG, body=encode_body(body)))

    def describe(
        self, kind: ConsumeType, config: ConsumerConfig | LitePullConfig | SimpleConsumerConfig
    ) -> ConsumerData:
        """The member as heartbeats describe it."""
        return ConsumerData(
            group_name=self._group,
            consume_type=kind,
            message_model=config.message_model,
            consume_from_where=config.consume_from_where,
            subscription_data_set=tuple({**self.table, **self._announced}.values()),
        )

    async def announce(self, topics: Collection[str]) -> None:
        """Tell brokers that our queues of these topics changed, by a higher version of the subscription.

        Pulls name the new version only afterwards: a broker refuses a version that is newer than the one it was told.
        """
        self._announced = {
            topic: replace(known, version=self._next_version(known))
            for topic in topics
            if (known := self.table.get(topic)) is not None
        }
        await self._session.heartbeats.beat()
        for topic, subscription in self._announced.items():
            known = self.table.get(topic)
            if known is not None and known.version < subscription.version:
                self.table[topic] = replace(known, version=subscription.version)
        self._announced = {}


def _differences(ours: Mapping[str, Subscription], theirs: Mapping[str, Subscription]) -> Iterator[str]:
    """What the subscriptions of this member and those of the member that a broker heard last do not share."""
    for topic in sorted({*ours, *theirs}):
        mine, other = ours.get(topic), theirs.get(topic)
        if (mine is None or other is None) and topic.startswith(RETRY_PREFIX):
            continue  # Java's clients announce the retry topic, too, and pop retry topics come and go with the mode
        if mine is None or other is None:
            yield f"{topic} is subscribed to {'elsewhere, not here' if mine is None else 'here, not elsewhere'}"
        elif (mine.expression_type, mine.expression) != (other.expression_type, other.expression):
            yield f"{topic} with {mine.expression!r} here, with {other.expression!r} elsewhere"
