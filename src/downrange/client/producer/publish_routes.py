"""The queues that one producer may send to: known ones, and how others are found."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from downrange.client.config import ProducerConfig
from downrange.client.errors import NoNameServer, NoRoute
from downrange.client.producer.publish_info import PublishInfo, publish_info, route_from_model
from downrange.client.session import Session
from downrange.model.errors import MQError
from downrange.protocol.bodies.routes import TopicRouteData

log = logging.getLogger(__name__)


class PublishRoutes:
    """The topics one producer has sent to, with their queues. Names are those of the wire.

    Holds always: what `known` returns belongs to the last route its session has seen. `known` and `last` are for any
    thread, the rest for the session's loop.
    """

    def __init__(self, session: Session, config: ProducerConfig) -> None:
        self._session = session
        self._config = config
        self._infos: dict[str, PublishInfo] = {}

    def known(self, topic: str) -> PublishInfo | None:
        """The queues of `topic` if no name server need be asked for them."""
        info = self._infos.get(topic)
        return info if info is not None and self._session.known_route(topic) is info.route else None

    def last(self, topic: str) -> PublishInfo | None:
        """The queues that were known last, however old."""
        return self._infos.get(topic)

    def all(self) -> Iterable[PublishInfo]:
        return self._infos.values()

    async def find(self, topic: str, deadline: float) -> PublishInfo:
        """The queues of `topic`; asks a name server unless a usable route is known."""
        route = self._session.known_route(topic) if topic in self._infos else None
        if route is not None:
            try:
                return self._remember(topic, route)
            except NoRoute as error:
                log.info("route looked up again topic=%s reason=%s", topic, error)
        left = deadline - self._session.clock.monotonic()
        try:
            async with asyncio.timeout(left):
                return self._remember(topic, await self._session.follow(topic, self._model_route))
        except TimeoutError:
            raise NoNameServer(
                f"no route of {topic} within the time of the send; name server {self._session.namesrv} does not answer"
            ) from None

    async def refreshed(self, info: PublishInfo, deadline: float) -> PublishInfo:
        """Look up the route again, because the wanted broker has no address in `info`."""
        try:
            async with asyncio.timeout(deadline - self._session.clock.monotonic()):
                return self._remember(info.topic, await self._session.follow(info.topic, self._model_route))
        except (MQError, TimeoutError) as error:
            log.info("route not refreshed topic=%s reason=%s", info.topic, error)
            return info

    def _remember(self, topic: str, route: TopicRouteData) -> PublishInfo:
        info = self._infos[topic] = publish_info(topic, route)
        return info

    async def _model_route(self) -> TopicRouteData:
        """The route of a topic that does not exist yet: brokers create it with the first message."""
        model = await self._session.look_up_route(self._config.create_topic_key)
        return route_from_model(model, self._config.default_topic_queue_nums)
