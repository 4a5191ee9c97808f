"""The queues that one producer may send to: known ones, and how others are found."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress

from downrange.client.config import ProducerConfig
from downrange.client.errors import NoMaster, NoNameServer, NoRoute
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
        self.waits_for_masters = config.fault_strategy == "adaptive"
        """Whether a send waits, within its time-out, while no broker of its topic has a master."""

    def known(self, topic: str) -> PublishInfo | None:
        """The queues of `topic` if no name server need be asked for them."""
        info = self._infos.get(topic)
        return info if info is not None and self._session.known_route(topic) is info.route else None

    def latest(self, topic: str) -> PublishInfo | None:
        """The queues in the last route that was seen; None when none of them may be written at the moment."""
        info = self.known(topic)
        route = self._session.known_route(topic)
        if info is None and route is not None:
            with suppress(NoRoute):
                info = self._remember(topic, route)
        return info

    def last(self, topic: str) -> PublishInfo | None:
        """The queues that were known last, however old."""
        return self._infos.get(topic)

    def all(self) -> Iterable[PublishInfo]:
        return self._infos.values()

    async def find(self, topic: str, deadline: float) -> PublishInfo:
        """The queues of `topic`; asks a name server unless a usable route is known."""
        is_known = topic in self._infos
        try:
            route = self._session.known_route(topic) if is_known else None
            if route is not None:
                try:
                    return self._remember(topic, route)
                except NoRoute as error:
                    if self.waits_for_masters and isinstance(error, NoMaster):
                        raise  # many sends that wait for one master must not ask for it one by one
                    log.info("route looked up again topic=%s reason=%s", topic, error)
            return self._remember(topic, await self._look_up(topic, deadline, is_known=is_known))
        except NoMaster:
            while self.waits_for_masters and (left := deadline - self._session.clock.monotonic()) > 0:
                await self._session.route_change(topic, left)
                info = self.latest(topic)
                if info is not None:
                    return info
            raise

    async def _look_up(self, topic: str, deadline: float, *, is_known: bool) -> TopicRouteData:
        try:
            async with asyncio.timeout(deadline - self._session.clock.monotonic()):
                return await self._session.follow(topic, self._model_route)
        except NoRoute as error:
            if is_known:  # the only broker of a topic is not registered for a moment
                raise NoMaster(topic, str(error)) from None
            raise
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
