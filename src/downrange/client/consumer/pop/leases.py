"""What a group asks of brokers: lease messages, acknowledge them, change how long they stay invisible."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from downrange.client.background_work import BackgroundWork
from downrange.client.consumer.addresses import address_of
from downrange.client.consumer.messages import wanted
from downrange.client.consumer.pop.messages import PoppedMessage, read_popped
from downrange.client.consumer.pop.requests import (
    ack_request,
    batch_ack_request,
    change_request,
    dead_letter_request,
    fits_a_batch,
)
from downrange.client.errors import BrokerNotFound, ClientError, PopNotSupported
from downrange.client.session import Session
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue
from downrange.model.subscription import Subscription
from downrange.protocol.bodies.groups import ConsumeFromWhere
from downrange.protocol.bodies.pop import (
    ANY_QUEUE,
    ChangeInvisibleTimeResponse,
    NotificationRequest,
    NotificationResponse,
    PopMessageRequest,
)
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command, request
from downrange.protocol.errors import RequestCodeNotSupported, ServiceNotAvailable, SystemBusy
from downrange.transport.errors import ConnectFailed, TransportError

INIT_MODES: Final = {ConsumeFromWhere.FIRST_OFFSET: 0, ConsumeFromWhere.LAST_OFFSET: 1}
"""Where a group begins that has popped nothing yet, as pops say it."""
_ANSWERS: Final = (
    ResponseCode.SUCCESS,
    ResponseCode.PULL_NOT_FOUND,
    ResponseCode.POLLING_FULL,
    ResponseCode.POLLING_TIMEOUT,
)
# A broker answers so long after the end of a wait at the latest. It takes the end from our clock: clocks may differ.
_ANSWER_SECONDS: Final = 10.0
# A pop is refused that was made more than half a second ago, by the broker's clock. Without a wait its time serves no
# other end, so that it may lie ahead of all clocks.
_AHEAD_MILLIS: Final = 3_600_000
_FIRST_PAUSE_SECONDS: Final = 0.05
_LONGEST_PAUSE_SECONDS: Final = 1.0
_AT_ONCE: Final = 64


class Wish(NamedTuple):
    """What to pop: how many messages of which queue (-1: of any), for how long, and whether in order."""

    subscription: Subscription
    most: int
    invisible_millis: int
    init_mode: int = 1
    queue_id: int = ANY_QUEUE
    attempt_id: str | None = None
    """Names an ordered pop: repeated with the id of one whose answer was lost, it gives the messages of that one."""

    @property
    def is_orderly(self) -> bool:
        return self.attempt_id is not None


class Leases:
    """The leases of one group. Used on one event loop.

    Acknowledgements, which do no harm when they arrive twice, are repeated for `retry_seconds` while a broker is away;
    a change of the invisible time is repeated only when it was certainly not sent.
    """

    def __init__(self, session: Session, group: str, namespace: str = "", retry_seconds: float = 10.0) -> None:
        self._session = session
        self._clock = session.clock
        self._group = group
        self._namespace = namespace
        self._retry_seconds = retry_seconds
        self._without_batches: set[str] = set()
        self._late = BackgroundWork()

    def __repr__(self) -> str:
        return f"<Leases {self._group}>"

    # --- lease ----------------------------------------------------------------------------------------------------

    async def pop(self, broker_name: str, wish: Wish, poll_seconds: float = 0.0) -> list[PoppedMessage]:
        """Lease messages of one broker, which may hold the request for `poll_seconds` until there is a message.

        Raises PopNotSupported if the broker is older than RocketMQ 5. A caller that gives up, by cancellation, leaves
        no messages behind: those that come all the same are visible to others at once.
        """
        popping = asyncio.ensure_future(self._pop(broker_name, wish, poll_seconds))
        try:
            return await asyncio.shield(popping)
        except asyncio.CancelledError:
            popping.add_done_callback(self._give_back_late)
            raise

    async def _pop(self, broker_name: str, wish: Wish, poll_seconds: float) -> list[PoppedMessage]:
        subscription = wish.subscription
        topic = subscription.topic
        header = PopMessageRequest(
            consumer_group=self._group,
            topic=topic,
            queue_id=wish.queue_id,
            max_msg_nums=wish.most,
            invisible_time=wish.invisible_millis,
            poll_time=round(poll_seconds * 1000),
            born_time=self._clock.now() + (0 if poll_seconds else _AHEAD_MILLIS),
            init_mode=wish.init_mode,
            exp_type=subscription.expression_type,
            exp=subscription.expression,
            order=wish.is_orderly,
            attempt_id=wish.attempt_id,
        )
        address = await self._master(topic, broker_name)
        seconds = poll_seconds + _ANSWER_SECONDS
        try:
            reply = await self._session.invoke(address, request(RequestCode.POP_MESSAGE, header), seconds, _ANSWERS)
        except RequestCodeNotSupported:
            raise PopNotSupported(
                f"broker {broker_name} at {address} does not know POP (request {RequestCode.POP_MESSAGE:d}): it needs "
                "RocketMQ 5 or Downrange; a LitePullConsumer works with older brokers"
            ) from None
        if reply.code != ResponseCode.SUCCESS:
            return []
        messages = read_popped(reply, topic, self._group, broker_name, self._namespace)
        kept = [message for message in wanted(messages, subscription) if isinstance(message, PoppedMessage)]
        if len(kept) < len(messages):  # their tags have the hash of a tag that is wanted, and no more
            await self.ack([message for message in messages if message not in set(kept)])
        return kept

    async def wait(self, broker_name: str, wish: Wish, seconds: float) -> bool:
        """Whether a pop might find messages at a broker, which holds the question until there are some."""
        topic = wish.subscription.topic
        header = NotificationRequest(
            consumer_group=self._group,
            topic=topic,
            queue_id=wish.queue_id,
            poll_time=round(seconds * 1000),
            born_time=self._clock.now(),
            order=wish.is_orderly,
        )
        address = await self._master(topic, broker_name)
        command = request(RequestCode.NOTIFICATION, header)
        timeout = seconds + _ANSWER_SECONDS
        reply = await self._session.invoke(address, command, timeout, _ANSWERS)
        return reply.header(NotificationResponse).has_msg

    # --- what becomes of messages ---------------------------------------------------------------------------------

    async def ack(
        self, messages: Sequence[PoppedMessage], retry_seconds: float | None = None
    ) -> Mapping[PoppedMessage, MQError]:
        """Acknowledge messages; returns those that no broker acknowledged, with the reasons."""
        failed: dict[PoppedMessage, MQError] = {}
        of_broker: dict[str, list[PoppedMessage]] = {}
        for message in messages:
            of_broker.setdefault(message.broker_name, []).append(message)
        patience = self._retry_seconds if retry_seconds is None else retry_seconds
        await asyncio.gather(*(self._ack_at(name, part, failed, patience) for name, part in of_broker.items()))
        return failed

    async def _ack_at(
        self, broker_name: str, messages: Sequence[PoppedMessage], failed: dict[PoppedMessage, MQError], patience: float
    ) -> None:
        together = [message for message in messages if fits_a_batch(message)]
        if len(together) > 1 and broker_name not in self._without_batches:
            command = batch_ack_request(together, self._group, broker_name)
            try:
                await self._ask(together[0], command, patience)
                messages = [message for message in messages if not fits_a_batch(message)]
            except RequestCodeNotSupported:
                self._without_batches.add(broker_name)
            except MQError as error:
                failed.update(dict.fromkeys(together, error))
                messages = [message for message in messages if not fits_a_batch(message)]

        async def ack(message: PoppedMessage) -> None:
            try:
                await self._ask(message, ack_request(message, self._group), patience)
            except MQError as error:
                failed[message] = error

        await _each(messages, ack)

    async def change_invisible_duration(self, message: PoppedMessage, seconds: float) -> None:
        """Let a message be invisible for so many seconds from now on; 0 gives it back at once.

        The handle of the message is replaced by the new one.
        """
        command = change_request(message, self._group, round(seconds * 1000))
        reply = await self._ask(message, command, self._retry_seconds, is_unsent)
        changed = message.receipt_handle.changed(reply.header(ChangeInvisibleTimeResponse))
        msgspec.structs.force_setattr(message, "receipt_handle", changed)

    async def make_dead_letter(self, message: PoppedMessage) -> None:
        """Have the broker copy a message to the dead letters of the group, and acknowledge it."""
        await self._ask(message, dead_letter_request(message, self._group), self._retry_seconds, is_unsent)
        await self._ask(message, ack_request(message, self._group), self._retry_seconds)

    async def give_back(self, messages: Iterable[PoppedMessage]) -> None:
        """Let other consumers have messages at once; those that cannot be given back are visible at their time."""

        async def give_back(message: PoppedMessage) -> None:
            try:
                command = change_request(message, self._group, 0)
                await self._session.invoke(await self._master(message.wire_topic, message.broker_name), command)
            except MQError:
                pass

        await _each(list(messages), give_back)

    async def close(self) -> None:
        await self._late.cancel()

    def _give_back_late(self, popping: asyncio.Future[list[PoppedMessage]]) -> None:
        if not popping.cancelled() and popping.exception() is None and popping.result():
            self._late.start(self.give_back(popping.result()), f"giving back messages of {self._group}")

    # --- asking ---------------------------------------------------------------------------------------------------

    async def _master(self, topic: str, broker_name: str) -> str:
        found = await address_of(self._session, MessageQueue(topic, broker_name, 0))
        if not found.is_master:
            raise BrokerNotFound(f"broker {broker_name} has no master at the moment, and only a master leases messages")
        return found.address

    async def _ask(
        self,
        message: PoppedMessage,
        command: Command,
        patience: float,
        may_repeat: Callable[[MQError], bool] | None = None,
    ) -> Command:
        """The answer of the broker of a message, which is asked again while it is away."""
        may_repeat = may_repeat or is_away
        deadline = self._clock.monotonic() + patience
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                address = await self._master(message.wire_topic, message.broker_name)
                return await self._session.invoke(address, command)
            except MQError as error:
                if not may_repeat(error) or self._clock.monotonic() + pause > deadline:
                    raise
            self._session.refresh_soon(message.wire_topic)
            await self._clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def is_away(error: MQError) -> bool:
    """Whether a broker could not be asked, or did not answer, or is starting or stopping."""
    is_client = isinstance(error, ClientError) and error.retriable
    return is_client or isinstance(error, TransportError | ServiceNotAvailable | SystemBusy)


def is_unsent(error: MQError) -> bool:
    """Whether the broker certainly did not do what it was asked."""
    is_client = isinstance(error, ClientError) and error.retriable
    return is_client or isinstance(error, ConnectFailed | ServiceNotAvailable | SystemBusy)


async def _each(messages: Sequence[PoppedMessage], do: Callable[[PoppedMessage], Awaitable[None]]) -> None:
    for start in range(0, len(messages), _AT_ONCE):
        await asyncio.gather(*(do(message) for message in messages[start : start + _AT_ONCE]))
