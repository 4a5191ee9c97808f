"""Subscriptions of a consumer: made from the user's expressions, checked by a broker, told to all brokers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from downrange.client.consumer.addresses import masters_of_route
from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.lite_pull_config import LitePullConfig
from downrange.client.consumer.simple_config import SimpleConsumerConfig
from downrange.client.session import Session
from downrange.model.errors import MessageError
from downrange.model.subscription import SQL92, TAG, Subscription, subscribe
from downrange.protocol.bodies.body import encode_body
from downrange.protocol.bodies.groups import CheckClientBody, ConsumerData, ConsumeType
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request


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

    def __repr__(self) -> str:
        return f"<Subscriptions {self._group} {','.join(self.table)}>"

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[Subscription]:
        return iter(self.table.values())

    def new(self, topic: str, expression: str, sql: str | None) -> Subscription:
        """A new subscription by tags `A || B` or by `sql`, not in the table yet; raises MessageError."""
        if sql is not None and not sql.strip():
            raise MessageError("the SQL expression is blank")
        text, kind = (expression, TAG) if sql is None else (sql, SQL92)
        return subscribe(topic, text, kind, self._next_version(self.table.get(topic)))

    def _next_version(self, known: Subscription | None) -> int:
        return max(self._session.clock.now(), known.version + 1 if known is not None else 0)

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
