"""The producer against our own broker: what is sent is stored, in order, and can be read by everybody."""

from __future__ import annotations

import asyncio
import itertools
import re
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from downrange import AsyncProducer, Message, MessageQueue, Producer, ProducerConfig, SendFailed, SendStatus
from downrange.broker.app import RunningBroker
from downrange.client.admin import Admin
from downrange.client.compression import plain_body
from downrange.client.config import ClientConfig
from downrange.client.errors import NoRoute
from downrange.client.producer.fault import StrategyName
from downrange.client.producer.outgoing import BodyTooLarge
from downrange.model.message import StoredMessage
from downrange.model.record import decode_records
from downrange.protocol.bodies.pull import PullMessageResponse
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.transport.pool import connect
from tests.support.broker_client import BrokerClient, client_of, standalone
from tests.support.lasting_port import lasting_port
from tests.support.processes import Running, namesrv, running
from tests.support.standalone_process import standalone_process

TOPIC = "orders"


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[RunningBroker]:
    async with standalone(tmp_path) as started:
        yield started


@pytest.fixture
def namesrv_address(broker: RunningBroker) -> str:
    return broker.config.broker.namesrv_addresses[0]


async def everything_in(broker: RunningBroker, topic: str, queues: int = 4) -> list[StoredMessage]:
    async with client_of(broker) as client:
        return await read_all(client, topic, queues)


async def read_all(client: BrokerClient, topic: str, queues: int = 4) -> list[StoredMessage]:
    """All messages of a topic, queue after queue."""
    found: list[StoredMessage] = []
    for queue_id in range(queues):
        offset = 0
        while True:
            pull = client.pull_command(topic, queue_id=queue_id, offset=offset)
            reply = await client.connection.request(pull, timeout=10)
            if reply.code != ResponseCode.SUCCESS:
                break
            found += decode_records(reply.body_bytes)
            offset = reply.header(PullMessageResponse).next_begin_offset
    return found


async def test_a_message_arrives_with_everything_it_had(broker: RunningBroker, namesrv_address: str) -> None:
    async with AsyncProducer("producers", namesrv_address) as producer:
        result = await producer.send(
            Message(TOPIC, "grün".encode(), tags="A", keys="k1 k2", flag=5, properties={"colour": "grün"})
        )
    (message,) = await everything_in(broker, TOPIC)
    assert result.status is SendStatus.SEND_OK
    assert result.queue == MessageQueue(TOPIC, "broker-a", message.queue_id)
    assert result.queue_offset == message.queue_offset == 0
    assert result.message_id == message.message_id
    assert result.offset_message_id == message.offset_message_id
    assert (message.body.decode(), message.tags, message.keys, message.flag) == ("grün", "A", ["k1", "k2"], 5)
    assert message.properties["colour"] == "grün"


async def test_a_large_body_is_compressed_on_the_way_and_plain_again_at_the_end(
    broker: RunningBroker, namesrv_address: str
) -> None:
    body = b"all work and no play " * 1000
    async with AsyncProducer("producers", namesrv_address) as producer:
        await producer.send(Message(TOPIC, body))
    (message,) = await everything_in(broker, TOPIC)
    assert len(message.body) < 1000
    assert plain_body(message) == body


async def test_ordered_messages_lie_in_one_queue_in_order(broker: RunningBroker, namesrv_address: str) -> None:
    async with AsyncProducer("producers", namesrv_address) as producer:
        await producer.queues(TOPIC)
        # Not awaited one by one: the order of the calls is the order of the messages.
        sends = [
            producer.send_async(Message(TOPIC, f"{key}/{step}".encode(), sharding_key=key))
            for step in range(50)
            for key in ("one", "two", "three")
        ]
        await asyncio.gather(*sends)
    found = await everything_in(broker, TOPIC)
    for key in ("one", "two", "three"):
        mine = [message for message in found if message.body.startswith(f"{key}/".encode())]
        assert len({message.queue_id for message in mine}) == 1
        assert [message.body.decode() for message in mine] == [f"{key}/{step}" for step in range(50)]


async def test_a_batch_is_stored_in_order_and_every_result_tells_where(
    broker: RunningBroker, namesrv_address: str
) -> None:
    config = ProducerConfig(max_message_size=2000)
    async with AsyncProducer("producers", namesrv_address, config) as producer:
        messages = [Message(TOPIC, f"{number}".encode() * 50, keys=f"k{number}") for number in range(60)]
        queue = (await producer.queues(TOPIC))[1]
        results = await producer.send_batch(messages, queue=queue)
    found = await everything_in(broker, TOPIC)
    assert [message.body for message in found] == [message.body for message in messages]
    for message, result in zip(found, results, strict=True):
        assert (message.message_id, message.offset_message_id, message.queue_offset, message.queue_id) == (
            result.message_id,
            result.offset_message_id,
            result.queue_offset,
            queue.queue_id,
        )


async def test_a_delayed_message_comes_later(broker: RunningBroker, namesrv_address: str) -> None:
    async with AsyncProducer("producers", namesrv_address) as producer:
        result = await producer.send(Message(TOPIC, b"later", delay_level=1))
    assert await everything_in(broker, TOPIC) == []
    async with client_of(broker) as client:
        (message,), _ = await client.pull(TOPIC, queue_id=result.queue.queue_id, wait_millis=10_000)
    assert message.body == b"later"
    assert message.store_timestamp - message.born_timestamp >= 1000


async def test_oneway_messages_are_stored(broker: RunningBroker, namesrv_address: str) -> None:
    async with AsyncProducer("producers", namesrv_address) as producer:
        for number in range(500):
            await producer.send_oneway(Message(TOPIC, b"%d" % number))
        await producer.send(Message(TOPIC, b"end"))  # requests of one connection are handled in order
    assert len(await everything_in(broker, TOPIC)) == 501


async def test_a_new_topic_gets_its_queues_and_a_broker_that_makes_none_says_so(tmp_path: Path) -> None:
    (tmp_path / "yes").mkdir()
    (tmp_path / "no").mkdir()
    async with standalone(tmp_path / "yes") as broker:
        address = broker.config.broker.namesrv_addresses[0]
        async with AsyncProducer("producers", address) as producer, Admin(ClientConfig((address,))) as admin:
            await producer.send(Message("brand-new", b"x"))
            (data,) = (await admin.topics.route("brand-new")).queue_datas
            assert (data.write_queue_nums, data.perm) == (4, 6)
    async with standalone(tmp_path / "no", broker_options={"auto_create_topic_enable": False}) as broker:
        address = broker.config.broker.namesrv_addresses[0]
        async with AsyncProducer("producers", address) as producer:
            with pytest.raises(NoRoute, match="brand-new"):
                await producer.send(Message("brand-new", b"x"))


async def test_a_body_the_broker_finds_too_large_is_refused_with_its_code(tmp_path: Path) -> None:
    async with standalone(tmp_path, store_options={"max_message_size": 1000}) as broker:
        address = broker.config.broker.namesrv_addresses[0]
        async with AsyncProducer("producers", address, ProducerConfig(compress_over_bytes=10**9)) as producer:
            with pytest.raises(SendFailed) as caught:
                await producer.send(Message(TOPIC, b"x" * 2000))
            assert caught.value.code == ResponseCode.MESSAGE_ILLEGAL
            with pytest.raises(BodyTooLarge):
                await producer.send(Message(TOPIC, b"x" * (4 * 1024 * 1024 + 1)))


async def test_traces_are_found_by_message_id(tmp_path: Path) -> None:
    async with standalone(tmp_path) as broker:
        address = broker.config.broker.namesrv_addresses[0]
        async with AsyncProducer("producers", address, ProducerConfig(trace=True)) as producer:
            result = await producer.send(Message(TOPIC, b"x", keys="k"))
        async with Admin(ClientConfig((address,))) as admin:
            (sent,) = (await admin.messages.trace(result.message_id)).sends
    assert (sent.group, sent.topic, sent.success) == ("producers", TOPIC, True)


async def test_brokers_know_who_produces(broker: RunningBroker, namesrv_address: str) -> None:
    async with client_of(broker) as client:

        async def producers() -> bytes:
            fields = {"producerGroup": "producers"}
            command = client.call(RequestCode.GET_PRODUCER_CONNECTION_LIST, fields)
            return (await command).body_bytes

        async with AsyncProducer("producers", namesrv_address) as producer:
            await producer.send(Message(TOPIC, b"x"))
            await producer.session.heartbeats.beat()
            assert producer.session.client_id.encode() in await producers()
        fields = {"producerGroup": "producers"}
        await client.call(RequestCode.GET_PRODUCER_CONNECTION_LIST, fields, expect=ResponseCode.SYSTEM_ERROR)


async def test_nothing_is_left_after_close(tmp_path: Path) -> None:
    with standalone_process(tmp_path) as cluster:  # a process of its own: a broker in this one has threads
        tasks = asyncio.all_tasks()
        threads = set(threading.enumerate())
        config = ProducerConfig(trace=True, fault_strategy="adaptive")
        async with AsyncProducer("producers", cluster.namesrv, config) as producer:
            await asyncio.gather(*(producer.send(Message(TOPIC, b"x")) for _ in range(200)))
        assert asyncio.all_tasks() == tasks
        assert set(threading.enumerate()) <= threads  # threads of other tests may end any time


# --- processes --------------------------------------------------------------------------------------------------------


@contextmanager
def cluster(directory: Path, *names: str) -> Iterator[tuple[Running, str, dict[str, Running]]]:
    """A name server process and broker processes."""
    with ExitStack() as stack:
        names_process, address = stack.enter_context(namesrv(directory / "ns"))
        brokers = {}
        for name in names:
            arguments = (
                "-n",
                address,
                "--name",
                name,
                "-p",
                "0",
                "-d",
                str(directory / name),
                "--metrics-port",
                "-1",
                "--grpc-port",
                "-1",
            )
            brokers[name] = stack.enter_context(running("broker", *arguments, "--log-level", "ERROR"))
        for process in brokers.values():
            process.wait_for("ready on")
        yield names_process, address, brokers


@pytest.mark.parametrize("strategy", ["round_robin", "latency", "adaptive"])
def test_no_send_fails_when_a_broker_is_killed_and_the_name_server_too(tmp_path: Path, strategy: StrategyName) -> None:
    config = ProducerConfig(fault_strategy=strategy, send_timeout_seconds=10)
    with (
        cluster(tmp_path, "broker-a", "broker-b") as (names, address, brokers),
        Producer("producers", address, config) as producer,
    ):
        first = {producer.send(Message("TBW102", b"x")).queue.broker_name for _ in range(32)}
        assert first == {"broker-a", "broker-b"}
        brokers["broker-b"].signal(signal.SIGKILL)
        names.kill()
        after = [producer.send(Message("TBW102", b"x")) for _ in range(60)]
        # A message the dying broker acknowledged in its last moment counts as well.
        assert {result.queue.broker_name for result in after[10:]} == {"broker-a"}


def test_a_blocking_producer_goes_on_when_its_broker_is_back(tmp_path: Path) -> None:
    """What was acknowledged is stored, before the kill and after it. Once a send has succeeded again, all do."""
    acknowledged: list[bytes] = []
    numbers = itertools.count()

    def send_one(producer: Producer) -> None:
        body = b"%d" % next(numbers)
        producer.send(Message(TOPIC, body))
        acknowledged.append(body)

    def send_again(producer: Producer, deadline: float) -> None:
        """One of several threads: failures may not begin after any thread had a success."""
        while len(acknowledged) < 400:
            is_back = len(acknowledged) > 200
            try:
                send_one(producer)
            except SendFailed as error:
                is_busy = error.code == ResponseCode.SYSTEM_BUSY  # this machine
                assert is_busy or not is_back
                assert time.monotonic() < deadline
                time.sleep(0.02)  # connections are made again with growing pauses

    namesrv_port, broker_port = lasting_port(), lasting_port()
    with standalone_process(tmp_path, namesrv_port=namesrv_port, broker_port=broker_port) as first:
        producer = Producer("producers", first.namesrv).start()
        for _ in range(200):
            send_one(producer)
        first.process.kill()
        with pytest.raises(SendFailed, match=r"lost|cannot connect"):
            send_one(producer)
    with (
        standalone_process(tmp_path, namesrv_port=namesrv_port, broker_port=broker_port),
        ThreadPoolExecutor(4) as threads,
    ):
        deadline = time.monotonic() + 60
        for ended in [threads.submit(send_again, producer, deadline) for _ in range(4)]:
            ended.result()
        stored = asyncio.run(bodies_in(first.broker, TOPIC))
        producer.close()
    assert set(acknowledged) <= stored


async def bodies_in(address: str, topic: str) -> set[bytes]:
    connection = await connect(address)
    found = await read_all(BrokerClient(connection, "client@1"), topic)
    await connection.drain(1)
    return {message.body for message in found}


def test_the_examples_of_the_how_to_page_run(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs/how-to/send-messages.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 5
    with standalone_process(tmp_path) as cluster:
        for block in blocks:
            exec(compile(block.replace("127.0.0.1:9876", cluster.namesrv), str(page), "exec"), {})  # noqa: S102
