"""`downrange produce`: send lines, or many messages for load."""

from __future__ import annotations

import asyncio
import json as json_text
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from downrange.cli.account import client_config
from downrange.cli.options import Namesrv, Topic, UsageError, key_values
from downrange.cli.output import one_line
from downrange.cli.times import is_number, parse_span, parse_time

if TYPE_CHECKING:
    from downrange.cli.progress import Progress
    from downrange.cli.until_signal import StopRequest
    from downrange.client.producer.producer import AsyncProducer
    from downrange.client.producer.send_result import SendResult
    from downrange.model.errors import MQError
    from downrange.model.message import Message

PRODUCER_GROUP = "downrange_produce"


@dataclass(slots=True)
class Outcome:
    """The result of a run. After the first failure nothing more is sent."""

    latencies: list[float] = field(default_factory=list)
    byte_count: int = 0
    failed: tuple[int, MQError] | None = None
    """The number of the message that could not be sent, counted from 1, and the reason."""


def run(
    topic: Topic,
    file: Annotated[
        Path, typer.Option("--file", "-f", help="Send each line of this file that is not empty; - is standard input.")
    ] = Path("-"),
    tag: Annotated[str | None, typer.Option("--tag", help="Tag.")] = None,
    key: Annotated[str | None, typer.Option("--key", help="Keys, separated by spaces.")] = None,
    properties: Annotated[list[str] | None, typer.Option("--property", help="name=value, any number of them.")] = None,
    delay: Annotated[
        str, typer.Option("--delay", help="Deliver after this time, such as 90s or 1500ms; a number is a delay level.")
    ] = "0",
    deliver_at: Annotated[
        str | None, typer.Option("--deliver-at", help="Deliver at this time: 2026-11-15 08:00:00, or milliseconds.")
    ] = None,
    shard: Annotated[
        str | None, typer.Option("--shard", help="Sharding key: all messages go to one queue, in order.")
    ] = None,
    count: Annotated[int | None, typer.Option("--count", min=1, help="Send this many generated messages.")] = None,
    size: Annotated[int | None, typer.Option("--size", min=1, help="Bytes of a generated message. [128]")] = None,
    from_json: Annotated[
        bool,
        typer.Option("--from-json", help="Each line is a message as `consume --json` wrote it."),
    ] = False,
    in_flight: Annotated[
        int, typer.Option("--in-flight", min=1, max=10_000, help="Most sends at the same time; 1 with --shard.")
    ] = 64,
    group: Annotated[str, typer.Option("--group", "-g", help="Producer group.")] = PRODUCER_GROUP,
    namesrv: Namesrv = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each message sent.")] = False,
) -> None:
    """Send each line of standard input or a file as a message, or generate messages for load."""
    from downrange.client.message_document import message_of
    from downrange.model.message import Message
    from downrange.model.topics import check_topic_name
    from downrange.transport.loop import run as run_loop

    check_topic_name(topic)
    if count is not None and str(file) != "-":
        raise UsageError("--count generates messages and --file reads them: give only one of them")
    if size is not None and count is None:
        raise UsageError("--size is the size of generated messages: give --count as well")
    pattern = Message(
        topic,
        b"",
        tag,
        key,
        properties=key_values(properties or []),
        delay_level=int(delay) if is_number(delay) else 0,
        sharding_key=shard,
        deliver_at=None if deliver_at is None else parse_time(deliver_at),
        deliver_after=None if is_number(delay) else parse_span(delay),
    )
    if pattern.deliver_at is not None and delay != "0":
        raise UsageError("--delay and --deliver-at both say when messages are delivered: give only one of them")
    at_once = 1 if shard is not None else in_flight

    def bodies(stop: StopRequest) -> AsyncIterator[bytes]:
        return _lines(file, stop) if count is None else _made_up(count, size or 128)

    def message(body: bytes) -> Message:
        return message_of(body, pattern) if from_json else replace(pattern, body=body)

    interrupted, outcome, seconds = run_loop(_produce(namesrv, group, message, bodies, count, at_once, json))
    _print_summary(topic, outcome, seconds, as_json=json)
    if outcome.failed is not None:
        number, error = outcome.failed
        typer.echo(f"downrange: message {number}: {one_line(error)}", err=True)
        raise typer.Exit(1)
    if interrupted and (count is not None or str(file) != "-"):
        typer.echo("downrange: interrupted before everything was sent", err=True)
        raise typer.Exit(130)


async def _lines(file: Path, stop: StopRequest) -> AsyncIterator[bytes]:
    from downrange.cli.lines import lines

    async for line in lines(file, stop):
        if line:
            yield line


async def _made_up(count: int, size: int) -> AsyncIterator[bytes]:
    for number in range(count):
        yield (b"%d " % number).ljust(size, b"x")[:size]


async def _produce(
    namesrv: str | None,
    group: str,
    message: Callable[[bytes], Message],
    bodies: Callable[[StopRequest], AsyncIterator[bytes]],
    count: int | None,
    at_once: int,
    as_json: bool,
) -> tuple[bool, Outcome, float]:
    from downrange.cli.progress import progress
    from downrange.cli.until_signal import stop_on_signal
    from downrange.client.producer.producer import AsyncProducer

    outcome = Outcome()
    with stop_on_signal() as stop, progress("sent", count, shares_terminal=as_json) as shown:
        async with AsyncProducer(group, client_config(namesrv)) as producer:
            source = _Source(bodies(stop), stop)
            senders = [
                asyncio.create_task(_send(producer, message, source, outcome, shown, as_json)) for _ in range(at_once)
            ]
            try:
                await asyncio.gather(*senders)
            finally:
                for sender in senders:
                    sender.cancel()
            seconds = shown.seconds
    return stop.is_made, outcome, seconds


class _Source:
    """Hands out message bodies, one for each call, until there are no more or a stop is requested."""

    def __init__(self, bodies: AsyncIterator[bytes], stop: StopRequest) -> None:
        self._bodies = bodies
        self._stop = stop
        self._turn = asyncio.Lock()
        self._number = 0
        self.is_ended = False

    async def next(self) -> tuple[int, bytes] | None:
        async with self._turn:
            if self.is_ended or self._stop.is_made:
                return None
            body = await anext(self._bodies, None)
            if body is None:
                self.is_ended = True
                return None
            self._number += 1
            return self._number, body


async def _send(
    producer: AsyncProducer,
    message: Callable[[bytes], Message],
    source: _Source,
    outcome: Outcome,
    shown: Progress,
    as_json: bool,
) -> None:
    """Send one message after another; several of these tasks run at the same time."""
    from downrange.model.errors import MQError

    while (found := await source.next()) is not None:
        number, body = found
        begun = time.perf_counter()
        try:
            result = await producer.send(message(body))
        except MQError as error:
            source.is_ended = True
            if outcome.failed is None or number < outcome.failed[0]:
                outcome.failed = (number, error)
            return
        outcome.latencies.append(time.perf_counter() - begun)
        outcome.byte_count += len(body)
        shown.add()
        if as_json:
            print(_line(result))


def _line(result: SendResult) -> str:
    line: dict[str, str | int] = {
        "msgId": result.message_id,
        "offsetMsgId": result.offset_message_id,
        "sendStatus": result.status.value,
        "brokerName": result.queue.broker_name,
        "queueId": result.queue.queue_id,
        "queueOffset": result.queue_offset,
    }
    if result.recall_handle is not None:
        line["recallHandle"] = result.recall_handle
    return json_text.dumps(line)


def _print_summary(topic: str, outcome: Outcome, seconds: float, *, as_json: bool) -> None:
    count = len(outcome.latencies)
    text = f"sent {count:,} {'message' if count == 1 else 'messages'} to {topic}"
    if count > 1:
        ordered = sorted(outcome.latencies)
        middle, slow = (ordered[int(share * (count - 1))] * 1000 for share in (0.5, 0.99))
        text += (
            f" in {seconds:.2f} s: {count / seconds:,.0f}/s, {outcome.byte_count / seconds / 1e6:,.1f} MB/s, "
            f"p50 {middle:.1f} ms, p99 {slow:.1f} ms"
        )
    typer.echo(text, err=as_json)
