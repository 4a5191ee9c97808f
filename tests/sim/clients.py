"""The clients of a simulated cluster. What they do goes into the history."""

from __future__ import annotations

import random
from itertools import count
from typing import Any

from downrange.client.config import ClientConfig
from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.pop.messages import PoppedMessage
from downrange.client.consumer.push import AsyncPushConsumer
from downrange.client.consumer.retry import Later
from downrange.client.consumer.simple import AsyncSimpleConsumer
from downrange.client.consumer.simple_config import SimpleConsumerConfig
from downrange.client.producer.producer import AsyncProducer
from downrange.client.producer.send_result import SendStatus
from downrange.client.producer.transaction_producer import AsyncTransactionProducer
from downrange.client.producer.transactions import HalfSent, LocalTransactionState
from downrange.client.session import Session
from downrange.model.errors import MQError
from downrange.model.message import Message
from downrange.protocol.bodies.groups import ConsumeFromWhere
from tests.sim.process import Process, State
from tests.sim.servers import Shape
from tests.sim.world import World, checksum

DELAYS = {1: 1.0, 2: 5.0}
"""The delay levels that producers use, in seconds."""
EVENTS, ORDERS, PAYMENTS = "events", "orders", "payments"
WORKERS, ORDERLY, AUDITORS, POPPERS = "workers", "orderly", "auditors", "poppers"
INVISIBLE_SECONDS = 8.0
MESSAGES_IN_A_SECOND = 2.0


class Client:
    """A program that is started again after it was killed."""

    def __init__(self, world: World, name: str, namesrv: tuple[str, ...]) -> None:
        self.world = world
        self.name = name
        self.namesrv = namesrv
        self.machine = world.machine(name)
        self.process: Process | None = None
        self._runs = count(1)
        self.chance = random.Random(f"{world.seed} {name}")
        self.is_wanted = True
        """False: the program ends as soon as it can."""

    @property
    def is_busy(self) -> bool:
        """Whether a producer that is not wanted any more has messages under way."""
        return self.is_alive

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.state is not State.DEAD

    def start(self) -> None:
        if not self.is_alive:
            self.machine.is_up = True
            name = f"{self.name}.{next(self._runs)}"
            self.process = self.world.process(name, self.machine)
            self.process.start(self._run(self.process))

    async def _run(self, process: Process) -> None:
        try:
            await self.main()
        except MQError as error:  # an ordinary program would end with it, and be started again
            self.world.record("client", "ended", outcome=type(error).__name__)
        if process.state is not State.DEAD:
            process.kill()
            self.world.network.killed(process)
            self.world.record("process", "died", process=process.name)

    def kill(self, *, with_machine: bool = False) -> None:
        if self.process is not None and self.process.state is not State.DEAD:
            self.world.record("process", "died", process=self.process.name)
            self.process.kill()
            self.machine.is_up = not with_machine
            self.world.network.killed(self.process, silently=with_machine)

    def session(self) -> Session:
        return Session(ClientConfig(self.namesrv), clock=self.machine.clock)

    async def main(self) -> None:
        raise NotImplementedError


class Producer(Client):
    """Sends events, some of them delayed, and orders, each order to the queue of its key."""

    numbers = count(1)

    def __init__(
        self, world: World, name: str, namesrv: tuple[str, ...], shape: Shape, rate: float = MESSAGES_IN_A_SECOND
    ) -> None:
        super().__init__(world, name, namesrv)
        self._has_timers = shape.has_timers
        self._rate = rate

    async def main(self) -> None:
        async with self.session() as session, AsyncProducer(f"group-{self.name}", session=session) as producer:
            while self.is_wanted:
                await self.machine.clock.sleep(self.chance.expovariate(self._rate))
                topic = self.chance.choice((EVENTS, ORDERS))
                message_id = f"m{next(self.numbers)}"
                body = f"{message_id} ".encode() * self.chance.choice((1, 5, 200))
                level = self.chance.choice((0, 0, 0, 1, 2)) if topic == EVENTS else 0
                key = f"k{self.chance.randrange(4)}" if topic == ORDERS else None
                message = Message(topic, body, keys=message_id, delay_level=level, sharding_key=key)
                delay = DELAYS.get(level, 0.0)
                if level and self._has_timers and self.chance.random() < 0.5:
                    delay = self.chance.choice((1.5, 4.0, 15.0))
                    message = Message(topic, body, keys=message_id, deliver_after=delay)
                await self._send(producer, message, message_id, int(delay * 1e9))

    async def _send(self, producer: AsyncProducer, message: Message, message_id: str, delay: int) -> None:
        known: dict[str, Any] = {"topic": message.topic, "id": message_id, "crc": checksum(message.body)}
        self.world.record("send", "invoke", **known, delay_nanos=delay)
        try:
            result = await producer.send(message)
        except MQError:
            self.world.record("send", "info", **known)
            return
        queue = f"{result.queue.broker_name}/{result.queue.queue_id}"
        phase = "ok" if result.status is SendStatus.SEND_OK else "info"
        self.world.record("send", phase, **known, queue=queue, offset=result.queue_offset)


class Payer(Client):
    """Sends payments in transactions. What the owner decided is remembered outside of the process."""

    decisions: dict[str, LocalTransactionState]

    def __init__(self, world: World, name: str, namesrv: tuple[str, ...]) -> None:
        super().__init__(world, name, namesrv)
        self.decisions = {}
        self._has_ended = False

    async def main(self) -> None:
        async with (
            self.session() as session,
            AsyncTransactionProducer("payers", check=self._check, topics=[PAYMENTS], session=session) as producer,
        ):
            self._has_ended = False
            while self.is_wanted:
                await self.machine.clock.sleep(self.chance.expovariate(1.0))
                await self._pay(producer, f"t{next(Producer.numbers)}")
            self._has_ended = True
            while True:  # to be asked about what has not ended yet
                await self.machine.clock.sleep(10)

    @property
    def is_busy(self) -> bool:
        return not self._has_ended

    async def _pay(self, producer: AsyncTransactionProducer, message_id: str) -> None:
        body = f"{message_id} ".encode() * 5
        known: dict[str, Any] = {"topic": PAYMENTS, "id": message_id, "crc": checksum(body)}
        self.world.record("half", "invoke", **known)

        async def execute(half: HalfSent) -> LocalTransactionState | None:
            if half.is_safe:
                queue = f"{half.result.queue.broker_name}/{half.result.queue.queue_id}"
                self.world.record("half", "ok", **known, queue=queue, offset=half.result.queue_offset)
            await self.machine.clock.sleep(self.chance.expovariate(5.0))
            state = self._decide(message_id) if half.is_safe else LocalTransactionState.ROLLBACK
            return None if self.chance.random() < 0.2 else state

        try:
            await producer.send_in_transaction(Message(PAYMENTS, body, keys=message_id), execute)
        except MQError:
            self.world.record("half", "info", **known)

    def _decide(self, message_id: str) -> LocalTransactionState:
        if message_id not in self.decisions:
            commits = self.chance.random() < 0.6
            self.decisions[message_id] = LocalTransactionState.COMMIT if commits else LocalTransactionState.ROLLBACK
            self.world.record("decide", "invoke", id=message_id, outcome="commit" if commits else "rollback")
        return self.decisions[message_id]

    async def _check(self, message: ReceivedMessage) -> LocalTransactionState | None:
        if self.chance.random() < 0.2:
            return LocalTransactionState.UNKNOWN
        return self._decide(message.keys[0])


class Consumer(Client):
    """A member of a group. Callbacks take their time, and fail now and then."""

    def __init__(self, world: World, name: str, namesrv: tuple[str, ...], group: str, topics: tuple[str, ...]) -> None:
        super().__init__(world, name, namesrv)
        self.group = group
        self.topics = topics
        self.fails = True

    @property
    def is_orderly(self) -> bool:
        return self.group == ORDERLY

    async def main(self) -> None:
        config = ConsumerConfig(
            orderly=self.is_orderly,
            consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
            consume_threads=2,
        )
        async with self.session() as session:
            consumer = AsyncPushConsumer(self.group, config=config, session=session, on_message=self._consume)
            for topic in self.topics:
                await consumer.subscribe(topic)
            async with consumer:
                while self.is_wanted:
                    await self.machine.clock.sleep(1)

    async def _consume(self, message: ReceivedMessage) -> Later | None:
        place = message.queue
        is_again = place.topic != message.topic
        queue = (
            f"{place.broker_name}/{place.queue_id}"
            if not is_again
            else f"{place.broker_name}/{place.topic}/{place.queue_id}"
        )
        where: dict[str, Any] = {
            "group": self.group,
            "topic": message.topic,
            "queue": queue,
            "offset": message.queue_offset,
        }
        if self.is_orderly:
            self.world.record("consume", "begin", **where)
        self.world.record("read", "ok", **where, id=message.keys[0], crc=checksum(message.body))
        if self.chance.random() < 0.3:
            await self.machine.clock.sleep(self.chance.expovariate(10.0))
        if self.is_orderly:
            self.world.record("consume", "end", **where)
        return Later(delay_level=1) if self.fails and self.chance.random() < 0.03 else None


class Popper(Client):
    """A member of a group that leases its messages, and forgets to acknowledge some of them."""

    def __init__(self, world: World, name: str, namesrv: tuple[str, ...]) -> None:
        super().__init__(world, name, namesrv)
        self.fails = True

    async def main(self) -> None:
        config = SimpleConsumerConfig(await_duration=5.0, consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
        async with (
            self.session() as session,
            AsyncSimpleConsumer(POPPERS, config=config, session=session) as consumer,
        ):
            await consumer.subscribe(EVENTS)
            while self.is_wanted:
                try:
                    for message in await consumer.receive(8, INVISIBLE_SECONDS):
                        self._record(message)
                        await self.machine.clock.sleep(self.chance.expovariate(20.0))
                        if not self.fails or self.chance.random() < 0.95:
                            await consumer.ack(message)
                except MQError:
                    await self.machine.clock.sleep(1)

    def _record(self, message: PoppedMessage) -> None:
        place = message.queue
        queue = f"{place.broker_name}/{place.queue_id}"
        if place.topic != message.topic:
            queue = f"{place.broker_name}/{place.topic}/{place.queue_id}"
        where: dict[str, Any] = {"topic": message.topic, "queue": queue, "offset": message.queue_offset}
        self.world.record("read", "ok", group=POPPERS, **where, id=message.keys[0], crc=checksum(message.body))
