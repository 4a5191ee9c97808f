"""Transactional messages against a broker process: sent and committed, 64 on their way; plain sends beside them.

128-byte bodies, one connection. A transaction stores three records: the half message, the message, and the note that it
ended. *Bare* is a connection without a producer around it, so the rate is nearer to what the broker can do. The commit
wants no answer, as RocketMQ's clients send it; the last of each round does, so that all of them are counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from bench.report import QUICK, Figure, cpu_seconds, table
from bench.served import served
from downrange.client.producer.transaction_producer import AsyncTransactionProducer, HalfSent, LocalTransactionState
from downrange.model.message import Message
from downrange.model.message_id import parse_offset_message_id
from downrange.protocol.bodies.send import SendMessageRequest, SendMessageResponse
from downrange.protocol.bodies.transactions import EndTransactionRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request
from downrange.transport.loop import run as run_loop
from downrange.transport.pool import connect
from tests.support.standalone_process import Standalone

TOPIC: Final = "bench"
GROUP: Final = "payers"
BODY: Final = b"x" * 128
CONCURRENT: Final = 64
COUNT: Final = 5_000 if QUICK else 20_000
ROUNDS: Final = 1 if QUICK else 3
HALF_PROPERTIES: Final = f"UNIQ_KEY\x01key\x02WAIT\x01true\x02TRAN_MSG\x01true\x02PGROUP\x01{GROUP}\x02"
PLAIN_PROPERTIES: Final = "UNIQ_KEY\x01key\x02WAIT\x01true\x02"
Work = Callable[[], Awaitable[None]]


class Measured:
    """The best round: how many a second, and the broker's CPU for each."""

    def __init__(self) -> None:
        self.rate = 0.0
        self.cpu_micros = float("inf")


async def concurrently(pid: int, one: Work, last: Work, measured: Measured) -> None:
    """`CONCURRENT` coroutines that each do one after the other; `last` ends when the broker has done all of it."""

    async def worker(first: int) -> None:
        for _ in range(first, COUNT, CONCURRENT):
            await one()

    start, cpu = time.perf_counter(), cpu_seconds(pid)
    await asyncio.gather(*map(worker, range(CONCURRENT)))
    await last()
    measured.rate = max(measured.rate, COUNT / (time.perf_counter() - start))
    measured.cpu_micros = min(measured.cpu_micros, (cpu_seconds(pid) - cpu) / COUNT * 1e6)


async def through_the_client(running: Standalone, plain: Measured, transactions: Measured) -> None:
    def unknown(message: object) -> LocalTransactionState:
        return LocalTransactionState.UNKNOWN

    async with AsyncTransactionProducer(GROUP, running.namesrv, check=unknown) as producer:

        async def send() -> None:
            await producer.send(Message(TOPIC, BODY))

        async def commit(half: HalfSent) -> LocalTransactionState:
            return LocalTransactionState.COMMIT

        async def transact() -> None:
            await producer.send_in_transaction(Message(TOPIC, BODY), commit)

        async def last() -> None:
            half = await producer.send_half(Message(TOPIC, BODY))
            await producer.end(half, LocalTransactionState.COMMIT, confirm=True)

        await send()
        for _ in range(ROUNDS):
            await concurrently(running.process.pid, send, send, plain)
            await concurrently(running.process.pid, transact, last, transactions)


async def bare(running: Standalone, plain: Measured, transactions: Measured) -> None:
    connection = await connect(running.broker)

    def message(properties: str, sys_flag: int) -> SendMessageRequest:
        return SendMessageRequest(
            producer_group=GROUP,
            topic=TOPIC,
            queue_id=0,
            sys_flag=sys_flag,
            born_timestamp=int(time.time() * 1000),
            properties=properties,
        )

    sending = request(RequestCode.SEND_MESSAGE_V2, message(PLAIN_PROPERTIES, 0), body=BODY)
    preparing = request(RequestCode.SEND_MESSAGE_V2, message(HALF_PROPERTIES, 4), body=BODY)

    async def send() -> None:
        reply = await connection.request(sending, 30)
        assert reply.code == 0, reply.remark

    async def half() -> EndTransactionRequest:
        reply = await connection.request(preparing, 30)
        assert reply.code == 0, reply.remark
        stored = reply.header(SendMessageResponse)
        return EndTransactionRequest(
            producer_group=GROUP,
            tran_state_table_offset=stored.queue_offset,
            commit_log_offset=parse_offset_message_id(stored.msg_id).physical_offset,
            commit_or_rollback=int(LocalTransactionState.COMMIT),
            msg_id="key",
        )

    async def transact() -> None:
        connection.oneway(request(RequestCode.END_TRANSACTION, await half(), oneway=True))

    async def last() -> None:
        reply = await connection.request(request(RequestCode.END_TRANSACTION, await half()), 30)
        assert reply.code == 0, reply.remark

    for _ in range(ROUNDS):
        await concurrently(running.process.pid, send, send, plain)
        await concurrently(running.process.pid, transact, last, transactions)
    await connection.drain(1)


def run() -> list[Figure]:
    figures = []
    with served({"waitTimeMillsInTransactionQueue": 10_000}) as running:
        for name, measure in (("client", through_the_client), ("bare", bare)):
            plain, transactions = Measured(), Measured()
            run_loop(measure(running, plain, transactions))
            figures += [
                Figure(f"{name}: plain sends", plain.rate, "messages/s"),
                Figure(
                    f"{name}: half messages sent and committed",
                    transactions.rate,
                    "transactions/s",
                    transactions.rate / plain.rate,
                    "plain sends",
                ),
                Figure(
                    f"{name}: CPU of the broker",
                    transactions.cpu_micros,
                    "µs/transaction",
                    transactions.cpu_micros / plain.cpu_micros,
                    "a plain send",
                ),
            ]
    return figures


if __name__ == "__main__":
    print(table(run()))
