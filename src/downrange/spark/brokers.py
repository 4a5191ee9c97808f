"""Sends requests to a broker: to its master, else to its slaves, repeatedly for a limited time."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, NamedTuple, cast

import msgspec

from downrange.client.errors import BrokerNotFound, ClientError
from downrange.client.session import Session, accepted
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue
from downrange.model.subscription import SUB_ALL, Subscription
from downrange.protocol.bodies.fields import encode_fields
from downrange.protocol.bodies.pull import PullMessageRequest, PullMessageResponse, PullSysFlag
from downrange.protocol.bodies.routes import MASTER_ID, TopicRouteData
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command, request
from downrange.protocol.errors import BrokerError, FlowControl, InternalError, ServiceNotAvailable
from downrange.spark.pull_connection import PullConnections
from downrange.transport.errors import TransportError

log = logging.getLogger(__name__)

_PAUSE_SECONDS: Final = 0.1
_MOST_PAUSE_SECONDS: Final = 2.0
_PULL_SECONDS: Final = 15.0
STAND_IN_SECONDS: Final = 10.0
"""So long a slave stands in for its master. Then the master is asked first again: the slave may not follow it."""
_BULK_KEY: Final = "maxTransferBytesOnBulkPull"
_PULL: Final = int(RequestCode.PULL_MESSAGE)
_ANSWERS: Final = frozenset(
    {
        int(ResponseCode.SUCCESS),
        int(ResponseCode.PULL_NOT_FOUND),
        int(ResponseCode.PULL_RETRY_IMMEDIATELY),
        int(ResponseCode.PULL_OFFSET_MOVED),
    }
)


@dataclass(frozen=True, slots=True)
class Pulled:
    """The answer to one pull: records as they are in the log, and the offset for the next pull."""

    code: int
    body: bytes | bytearray
    next_offset: int
    min_offset: int
    max_offset: int
    offset_delta: int
    is_of_slave: bool = False


class StandIn(NamedTuple):
    """A slave that is asked in place of its master."""

    broker_id: int
    until: float
    """By the monotonic clock."""


class BrokerAway(ClientError):
    """No process of a broker answered within the time limit."""

    retriable = True


class Brokers:
    """The brokers of the queues of a read. Remembers the slaves that stand in for a master; used on one event loop.

    If connections for pulls are given, pulls use them.
    """

    def __init__(
        self,
        session: Session,
        *,
        group: str,
        retry_seconds: float = 0.0,
        pull_connections: PullConnections | None = None,
    ) -> None:
        self.session = session
        self._pull_connections = pull_connections
        self._group = group
        self._retry_seconds = retry_seconds
        self._stand_ins: dict[str, StandIn] = {}
        self._pull_fields: dict[tuple[MessageQueue, str | None, bool], bytes] = {}

    async def ask(self, queue: MessageQueue, command: Command, accept: Collection[int] | None = None) -> Command:
        """The reply of the broker of `queue`. Any answer of a process, also a refusal, is taken as its reply."""
        reply, _ = await self.ask_any(queue, command, accept)
        return reply

    async def ask_any(
        self, queue: MessageQueue, command: Command, accept: Collection[int] | None = None
    ) -> tuple[Command, bool]:
        """As `ask`, and whether a slave has answered."""
        begun = self.session.clock.monotonic()
        pause = _PAUSE_SECONDS
        while True:
            try:
                return await self._ask_each(queue, command, accept)
            except MQError as error:
                waited = self.session.clock.monotonic() - begun
                if not _may_pass(error):
                    raise
                if waited + pause > self._retry_seconds:
                    raise BrokerAway(
                        f"broker {queue.broker_name} of topic {queue.topic} does not answer"
                        + (f" for {waited:.0f} s" if waited >= 1 else "")
                        + f": {error}"
                    ) from None
                log.warning("broker does not answer broker=%s reason=%s", queue.broker_name, error)
            await self.session.clock.sleep(pause)
            pause = min(2 * pause, _MOST_PAUSE_SECONDS)
            await self._look_up(queue.topic)

    async def _ask_each(
        self, queue: MessageQueue, command: Command, accept: Collection[int] | None
    ) -> tuple[Command, bool]:
        """Ask the slave that stands in for the master, if one does, then the others, the master first."""
        problem: MQError | None = None
        for broker_id, address in self._processes(await self._route(queue.topic), queue.broker_name):
            try:
                if accept is None:
                    reply = await self.session.invoke(address, command)
                elif self._pull_connections is None:
                    reply = await self.session.invoke(address, command, _PULL_SECONDS, accept)
                else:
                    signed = self.session.signed(command)
                    reply = accepted(await self._pull_connections.request(address, signed, _PULL_SECONDS), accept)
            except (TransportError, ServiceNotAvailable) as error:
                problem = error
                self._stand_ins.pop(queue.broker_name, None)
                continue
            self._answered(queue.broker_name, broker_id)
            return reply, broker_id != MASTER_ID
        raise problem or BrokerNotFound(f"the route of {queue.topic} names no broker {queue.broker_name} at the moment")

    def _answered(self, broker_name: str, broker_id: int) -> None:
        if broker_id == MASTER_ID:
            self._stand_ins.pop(broker_name, None)
        elif self._first(broker_name) == MASTER_ID:
            self._stand_ins[broker_name] = StandIn(broker_id, self.session.clock.monotonic() + STAND_IN_SECONDS)

    def _first(self, broker_name: str) -> int:
        """The id of the process to ask first."""
        stand_in = self._stand_ins.get(broker_name)
        return MASTER_ID if stand_in is None or self.session.clock.monotonic() >= stand_in.until else stand_in.broker_id

    async def _route(self, topic: str) -> TopicRouteData:
        known = self.session.known_route(topic)
        return known if known is not None else await self.session.follow(topic)

    async def _look_up(self, topic: str) -> None:
        try:
            await self.session.follow(topic)
        except MQError as error:  # the last known route is better than none
            log.warning("route not refreshed topic=%s reason=%s", topic, error)

    def _processes(self, route: TopicRouteData, broker_name: str) -> list[tuple[int, str]]:
        first = self._first(broker_name)
        return sorted(
            (
                (broker_id, address)
                for data in route.broker_datas
                if data.broker_name == broker_name
                for broker_id, address in data.broker_addrs.items()
            ),
            key=lambda process: (process[0] != first, process[0]),
        )

    async def takes_bulk_pulls(self, queue: MessageQueue) -> bool:
        """Whether the broker of `queue` is a Downrange broker that takes bulk pulls."""
        # Imported here: tasks do not need it, and importing the admin client takes time.
        from downrange.client.admin.cluster import properties_table

        reply = await self.ask(queue, request(RequestCode.GET_BROKER_CONFIG))
        return properties_table(reply.body_bytes).get(_BULK_KEY, "0") != "0"

    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        max_messages: int,
        subscription: Subscription | None = None,
        *,
        is_bulk: bool = False,
    ) -> Pulled:
        """Messages from `offset` on, without waiting for new ones. `is_bulk` only if the broker takes bulk pulls."""
        key = queue, None if subscription is None else subscription.expression, is_bulk
        rest = self._pull_fields.get(key)
        if rest is None:
            rest = self._pull_fields[key] = _pull_fields(self._group, queue, subscription, is_bulk=is_bulk)
        fields = b'{"queueOffset":"%d","maxMsgNums":"%d",' % (offset, max_messages) + rest
        reply, is_of_slave = await self.ask_any(queue, Command(_PULL, raw_ext=msgspec.Raw(fields)), _ANSWERS)
        answer = reply.header(PullMessageResponse)
        return Pulled(
            reply.code,
            cast(bytes | bytearray, reply.body) if reply.code == ResponseCode.SUCCESS else b"",
            answer.next_begin_offset,
            answer.min_offset,
            answer.max_offset,
            answer.offset_delta or 0,
            is_of_slave,
        )


def _pull_fields(group: str, queue: MessageQueue, subscription: Subscription | None, *, is_bulk: bool) -> bytes:
    """The ext fields that all pulls of a queue share, as the end of their JSON text."""
    header = PullMessageRequest(
        consumer_group=group,
        topic=queue.topic,
        queue_id=queue.queue_id,
        queue_offset=0,
        max_msg_nums=0,
        sys_flag=int(PullSysFlag.SUBSCRIPTION),
        commit_offset=0,
        suspend_timeout_millis=0,
        subscription=SUB_ALL if subscription is None else subscription.expression,
        sub_version=0,
        expression_type=None if subscription is None else subscription.expression_type,
        bname=queue.broker_name,
        bulk=is_bulk or None,
    )
    fields = encode_fields(header)
    del fields["queueOffset"], fields["maxMsgNums"]
    return msgspec.json.encode(fields)[1:]


def _may_pass(error: MQError) -> bool:
    """Whether it is useful to ask again: not if the broker refused, since it would refuse again."""
    if isinstance(error, BrokerError):
        return isinstance(error, FlowControl | ServiceNotAvailable | InternalError)
    return error.retriable or isinstance(error, TransportError)
