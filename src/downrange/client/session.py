"""Connections, routes and name servers shared by everything one process does with a cluster."""

from __future__ import annotations

import asyncio
import difflib
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Collection
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar

import msgspec

from downrange.client.background_work import BackgroundWork
from downrange.client.brokers import Broker, master_of, masters_of, reachable, sorted_brokers
from downrange.client.config import ClientConfig
from downrange.client.errors import BrokerNotFound, ClusterNotFound, NoNameServer, NoRoute, NotANameServer
from downrange.client.heartbeats import Heartbeats
from downrange.client.per_server import PerServer, ask_each
from downrange.client.producer.stored_reply import take_stored
from downrange.client.route_chase import RouteChase
from downrange.client.silent_brokers import SilentBrokers
from downrange.clock import Clock, SystemClock
from downrange.model.errors import MQError
from downrange.model.text import Text
from downrange.model.topics import is_system_topic
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.routes import (
    MASTER_ID,
    ClusterInfo,
    GetRouteInfoRequest,
    TopicList,
    TopicRouteData,
)
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command, request
from downrange.protocol.errors import RequestCodeNotSupported, TopicNotExist, broker_error
from downrange.protocol.signing import Signer
from downrange.transport.connection import Connection
from downrange.transport.errors import ConnectionLost, TransportError
from downrange.transport.own_address import own_address
from downrange.transport.pool import Pool
from downrange.transport.serving import CommandHandler, LaterReply, refuse, serve_commands
from downrange.transport.tls import ClientTls

if TYPE_CHECKING:
    from downrange.client.consumer.broker_requests import GroupMember

log = logging.getLogger(__name__)

T = TypeVar("T")

ONLY_SUCCESS: Collection[int] = (ResponseCode.SUCCESS,)
# Requests that name servers of all releases answer: a server that does not know them is something else.
_OF_EVERY_NAMESRV: Final = (
    RequestCode.GET_ROUTEINFO_BY_TOPIC,
    RequestCode.GET_BROKER_CLUSTER_INFO,
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
)
# The body of requests to a name server that need none. Name servers ignore it. A web server whose address was given by
# mistake would wait for the end of a line; after this one it answers, and the answer shows what it is.
_BLANK_LINE: Final = b"\r\n\r\n"


class Session:
    """A client's view of a cluster: the name server in use, the routes it gave, and the open connections.

    An error reply becomes the exception of its code here and nowhere else (`accepted`). Requests of
    brokers are answered from `handlers`, to which producers and consumers add their codes. `start` begins the work in
    the background: refreshing the routes that are followed, and heartbeats. Used on one event loop.
    """

    def __init__(
        self,
        config: ClientConfig,
        *,
        handler: CommandHandler = refuse,
        clock: Clock | None = None,
        random_source: random.Random | None = None,
        instance_name: str | None = None,
    ) -> None:
        """`instance_name` gives the client an id that is the same after a restart."""
        self.config = config
        self.clock = clock or SystemClock()
        self.client_id = new_client_id() if instance_name is None else f"{own_address()}@{instance_name}"
        self.handlers: dict[int, CommandHandler] = {}
        self.members: dict[str, GroupMember] = {}
        """The consumers of this client by group; see consumer/broker_requests.py."""
        self.heartbeats = Heartbeats(
            self.client_id, self.addresses_in_use, self.invoke, self.clock, config.heartbeat_seconds
        )
        self._other_requests = handler
        self.signer: Signer | None = None
        if config.access_key and config.secret_key:
            self.signer = Signer(config.access_key, config.secret_key, config.security_token)
        self.is_signing = self.signer is not None
        self.tls = ClientTls(config.tls) if config.use_tls else None
        self._pool = Pool(
            serve_commands(self._answer),
            read_replies=take_stored,
            connect_timeout=config.connect_timeout_seconds,
            tls=self.tls,
        )
        self.connection_known = self._pool.known
        # Clients that start together must not all load the first name server of the list.
        self._namesrvs = list(config.namesrv_addresses)
        (random_source or random.Random()).shuffle(self._namesrvs)  # noqa: S311  spreads load, guards nothing
        self._chosen = 0
        self._routes: dict[str, tuple[float, TopicRouteData]] = {}
        self.route_changes = 0
        """Counts the changes of routes: anything derived from a route at another count may be out of date."""
        self._followed: dict[str, None] = {}  # a set that keeps its order
        self._missing: set[str] = set()
        """Topics that no broker served when they were looked up last."""
        self._looking_up: dict[str, asyncio.Lock] = {}
        self._addresses: frozenset[str] = frozenset()
        self._work = BackgroundWork()
        self._chase = RouteChase(self.clock, self._work, self._refresh)
        self.silent = SilentBrokers(
            self.clock, self._links, lambda: self.addresses_in_use(masters_only=True), self._look_for_master
        )
        self.route_watchers: set[Callable[[str], None]] = set()
        """Called with the topic whose route has changed."""
        self._is_started = False

    def __repr__(self) -> str:
        return f"<Session namesrv={self.namesrv} routes={len(self._routes)} {self._pool!r}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def start(self) -> None:
        """Begin the work in the background; ends with `close`."""
        if not self._is_started:
            self._is_started = True
            self._work.start(self._refresh_routes(), "routes")
            self._work.start(self.silent.run(), "silent brokers")
            self._work.start(self.heartbeats.run(), "heartbeats")

    async def close(self) -> None:
        await self._work.cancel()
        await self._pool.close()

    def _answer(self, command: Command, connection: Connection) -> Command | LaterReply | None:
        return self.handlers.get(command.code, self._other_requests)(command, connection)

    # --- asking ---------------------------------------------------------------------------------------------------

    async def invoke(
        self, address: str, command: Command, timeout: float | None = None, accept: Collection[int] = ONLY_SUCCESS
    ) -> Command:
        """The reply of one server. A reply code that is not in `accept` is raised as its BrokerError."""
        seconds = self.config.request_timeout_seconds if timeout is None else timeout
        command = self.signed(command)
        connection = self._pool.connected(address)
        if connection is not None:  # nearly always, and spares a detour
            return accepted(await connection.request(command, seconds), accept)
        return accepted(await self._pool.request(address, command, seconds), accept)

    async def ask(self, broker: Broker, command: Command, timeout: float | None = None) -> Command:
        """The reply of a broker; raises BrokerNotFound when it has no address at the moment."""
        return await self.invoke(reachable(broker).address, command, timeout)

    async def oneway(self, address: str, command: Command) -> None:
        await self._pool.oneway(address, self.signed(command))

    def signed(self, command: Command) -> Command:
        """A request as the cluster wants it: with the user's signature, if there is a user."""
        return command if self.signer is None else self.signer.sign(command)

    def connection(self, address: str) -> Connection | None:
        """The open connection to a server, if there is one."""
        return self._pool.connected(address)

    # --- name servers ---------------------------------------------------------------------------------------------

    @property
    def namesrv(self) -> str:
        """The name server that answered last, or the one to be tried first."""
        return self._namesrvs[self._chosen]

    async def ask_namesrv(self, command: Command) -> Command:
        """Ask the name server in use; when it cannot be reached, the next one that answers takes its place."""
        if not command.body:
            command = msgspec.structs.replace(command, body=_BLANK_LINE)
        problems = []
        for _ in self._namesrvs:
            try:
                return await self._ask_over_live_connection(self.namesrv, command)
            except RequestCodeNotSupported as error:
                if command.code not in _OF_EVERY_NAMESRV:
                    raise
                raise NotANameServer(
                    f"{self.namesrv} is not a name server, but a broker or something else ({error.remark.strip()}); "
                    f"name servers listen on 9876 unless told otherwise; the address is {self.config.source}"
                ) from None
            except TransportError as error:
                problems.append(str(error))
                self._chosen = (self._chosen + 1) % len(self._namesrvs)
        raise NoNameServer(f"no name server answers ({'; '.join(problems)}); the address is {self.config.source}")

    async def _ask_over_live_connection(self, address: str, command: Command) -> Command:
        """Ask again over a new connection if a kept one was lost: it may have died unnoticed, with the server well.

        Only for requests that may be sent twice, as all of `ask_namesrv` are.
        """
        try:
            return await self.invoke(address, command)
        except ConnectionLost:
            return await self.invoke(address, command)

    async def ask_every_namesrv(self, ask: Callable[[str], Awaitable[T]]) -> PerServer[str, T]:
        """Ask each name server: they know nothing of each other, so every change must be sent to all."""
        return await ask_each(self.config.namesrv_addresses, ask)

    # --- routes ---------------------------------------------------------------------------------------------------

    async def route(self, topic: str) -> TopicRouteData:
        """The route of `topic`: the known one, or a fresh one when that is older than `route_seconds`."""
        known = self._routes.get(topic)
        if known is not None and self.clock.monotonic() - known[0] < self.config.route_seconds:
            return known[1]
        return await self.look_up_route(topic)

    async def look_up_route(self, topic: str) -> TopicRouteData:
        """The route of `topic`, asked from a name server; raises NoRoute."""
        command = request(
            RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfoRequest(topic, accept_standard_json_only=True)
        )
        try:
            reply = await self.ask_namesrv(command)
        except TopicNotExist:
            # A name server that has just started knows no topics yet: followed topics keep their last route.
            self._missing.add(topic)
            if topic not in self._followed and self._routes.pop(topic, None) is not None:
                self.route_changes += 1
            raise NoRoute(
                topic,
                Text(
                    "no broker serves the topic {topic}, says name server {namesrv}", topic=topic, namesrv=self.namesrv
                ),
            ) from None
        route = decode_body(TopicRouteData, reply.body_bytes)
        self._store_route(topic, route)
        return route

    async def nearest_topic(self, topic: str) -> str | None:
        """The name of a user's topic that a topic without a route was probably meant to be; None if it exists."""
        reply = await self.ask_namesrv(request(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER))
        topics = decode_body(TopicList, reply.body_bytes).topic_list
        near = difflib.get_close_matches(topic, [name for name in topics if not is_system_topic(name)], n=1)
        return near[0] if near and near[0] != topic else None

    # --- routes that are kept fresh -------------------------------------------------------------------------------

    def known_route(self, topic: str) -> TopicRouteData | None:
        """The last route seen, however old: better than none while no name server answers."""
        known = self._routes.get(topic)
        return None if known is None else known[1]

    async def follow(
        self, topic: str, otherwise: Callable[[], Awaitable[TopicRouteData]] | None = None
    ) -> TopicRouteData:
        """The route of a topic this client works with; from now on it is looked up again every `route_seconds`.

        `otherwise` gives the route to use when no broker serves the topic yet. Of several calls at the same time one
        looks the route up, and the others wait for its answer, no longer than `route_lock_seconds`.
        """
        self._followed.setdefault(topic, None)
        lock = self._looking_up.setdefault(topic, asyncio.Lock())
        before = self._routes.get(topic)
        try:
            async with asyncio.timeout(self.config.route_lock_seconds):
                await lock.acquire()
        except TimeoutError:
            raise NoNameServer(
                f"the route of {topic} is being looked up for more than {self.config.route_lock_seconds:g} s, "
                f"name server {self.namesrv} does not answer"
            ) from None
        try:
            now = self._routes.get(topic)
            if now is not None and now is not before:
                return now[1]
            try:
                return await self.look_up_route(topic)
            except NoRoute as missing:
                if otherwise is None:
                    raise
                try:
                    route = await otherwise()
                except NoRoute:
                    raise missing from None
                self._store_route(topic, route)
                return route
        finally:
            lock.release()

    def refresh_soon(self, topic: str) -> None:
        """Look a route up in the background, because a broker failed; ever less often while it stays the same."""
        if self._is_started:
            self._chase.soon(topic)

    def _links(self, address: str) -> tuple[Connection, ...]:
        connection = self._pool.connected(address)
        return () if connection is None else (connection,)

    def _look_for_master(self, address: str) -> None:
        """A master is silent: perhaps another broker has its place."""
        for topic in self._followed:
            route = self.known_route(topic)
            if route is not None and any(data.master_address == address for data in route.broker_datas):
                self._chase.soon(topic)

    async def route_change(self, topic: str, seconds: float) -> bool:
        """Wait until the route of a topic changes, at most so long, and look it up meanwhile; whether it did change."""
        if self._is_started:
            return await self._chase.change(topic, seconds)
        await self.clock.sleep(seconds)
        return False

    async def refresh_followed(self) -> None:
        """Look up all followed topics, and disconnect from brokers that no route names any more."""
        for topic in list(self._followed):
            await self._refresh(topic)
        self._drop_offline_brokers()

    async def _refresh(self, topic: str) -> None:
        try:
            await self.follow(topic)
        except MQError as error:
            log.info("route not refreshed topic=%s reason=%s", topic, error)

    async def _refresh_routes(self) -> None:
        while True:
            await self.clock.sleep(self.config.route_seconds)
            await self.refresh_followed()

    def _store_route(self, topic: str, route: TopicRouteData) -> None:
        known = self._routes.get(topic)
        is_same = known is not None and known[1] == route
        if known is not None and is_same:
            route = known[1]  # the same object: what was derived from it stays valid
        self._routes[topic] = (self.clock.monotonic(), route)
        addresses = _addresses_of(route)
        if not is_same:
            self.route_changes += 1
        if not is_same or topic in self._missing:
            before = set() if known is None or topic in self._missing else _addresses_of(known[1])
            self._missing.discard(topic)
            self.silent.watch(data.master_address for data in route.broker_datas if data.master_address)
            for address in addresses - before:
                self._pool.forgive(address)  # it was registered a moment ago: no need to wait any longer
            self._chase.changed(topic)
            for watcher in tuple(self.route_watchers):
                watcher(topic)
            self.silent.look()
        if topic in self._followed and not addresses <= self._addresses:
            self._addresses |= addresses
            self.heartbeats.beat_soon()

    def addresses_in_use(self, masters_only: bool = False) -> frozenset[str]:
        """The brokers named by the routes of the topics this client works with."""
        return frozenset(
            address
            for topic in self._followed
            if (route := self.known_route(topic)) is not None
            for data in route.broker_datas
            for broker_id, address in data.broker_addrs.items()
            if broker_id == MASTER_ID or not masters_only
        )

    def _drop_offline_brokers(self) -> None:
        in_use = self.addresses_in_use()
        for address in self._addresses - in_use:
            log.info("broker dropped address=%s reason=no route names it", address)
            self._pool.drop(address)
        self._addresses = in_use

    async def cluster_info(self) -> ClusterInfo:
        reply = await self.ask_namesrv(request(RequestCode.GET_BROKER_CLUSTER_INFO))
        return decode_body(ClusterInfo, reply.body_bytes)

    # --- brokers --------------------------------------------------------------------------------------------------

    async def brokers(self, cluster: str | None = None) -> list[Broker]:
        """Every broker process of one cluster or of all, masters and slaves."""
        info = await self.cluster_info()
        if cluster is not None and cluster not in info.cluster_addr_table:
            known = ", ".join(sorted(info.cluster_addr_table)) or "none"
            raise ClusterNotFound(
                Text(
                    "no cluster {cluster}; clusters known to name server {namesrv}: {known}",
                    cluster=cluster,
                    namesrv=self.namesrv,
                    known=known,
                )
            )
        return [
            Broker(address, data.broker_name, data.cluster, broker_id)
            for data in sorted(info.broker_addr_table.values(), key=lambda data: (data.cluster, data.broker_name))
            if cluster is None or data.broker_name in info.cluster_addr_table[cluster]
            for broker_id, address in sorted(data.broker_addrs.items())
        ]

    async def masters(self, cluster: str | None = None) -> list[Broker]:
        """The master of every broker name. A master that is down has no address, and asking it fails."""
        return masters_of(await self.brokers(cluster))

    async def masters_of_topic(self, topic: str) -> list[Broker]:
        return [master_of(data) for data in sorted_brokers(await self.look_up_route(topic))]

    async def broker(self, name_or_address: str) -> Broker:
        """A broker by address, or the master of a broker name."""
        if ":" in name_or_address:
            return Broker(name_or_address)
        masters = await self.masters()
        for broker in masters:
            if broker.name == name_or_address:
                return reachable(broker)
        known = ", ".join(broker.name for broker in masters) or "none"
        raise BrokerNotFound(
            Text(
                "no broker {name_or_address}; brokers known to name server {namesrv}: {known}",
                name_or_address=name_or_address,
                namesrv=self.namesrv,
                known=known,
            )
        )


def _addresses_of(route: TopicRouteData) -> set[str]:
    return {address for data in route.broker_datas for address in data.broker_addrs.values()}


def accepted(reply: Command, accept: Collection[int]) -> Command:
    """The reply; raises the BrokerError of its code. Reply codes become errors here and nowhere else."""
    if reply.code not in accept:
        raise broker_error(reply.code, reply.remark)
    return reply


def new_client_id() -> str:
    """`<ip>@<pid>#<n>`: two clients with one id would take each other's queues."""
    return f"{own_address()}@{os.getpid()}#{time.monotonic_ns()}"
