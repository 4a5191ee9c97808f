"""`downrange consume`: read a topic from a terminal."""

from __future__ import annotations

import asyncio
import json as json_text
import logging
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from downrange.cli.account import client_config
from downrange.cli.cluster_actions import naming_the_nearest_topic
from downrange.cli.message_format import Charset, body_of, decoder, message_format
from downrange.cli.options import Namesrv, Topic, UsageError
from downrange.cli.output import visible
from downrange.cli.times import parse_time, time_text
from downrange.model.errors import MQError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from downrange.cli.progress import Progress
    from downrange.cli.until_signal import StopRequest
    from downrange.client.consumer.lite_pull import AsyncLitePullConsumer
    from downrange.client.consumer.messages import ReceivedMessage
    from downrange.model.message import MessageQueue

log = logging.getLogger(__name__)

BATCH = 32


def run(
    topic: Topic,
    group: Annotated[
        str | None,
        typer.Option("--group", "-g", help="Read as a member of this group; without a group no offset is committed."),
    ] = None,
    tag: Annotated[str | None, typer.Option("--tag", help="Only these tags: 'A || B'.")] = None,
    sql: Annotated[str | None, typer.Option("--sql", help="Only messages that this SQL92 expression matches.")] = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="first, last or a time. With a group: where the group begins if it has committed nothing. "
            "[first; last with --follow and no group]",
        ),
    ] = None,
    queue: Annotated[
        list[str] | None,
        typer.Option("--queue", "-q", help="Only this queue: NUMBER or BROKER:NUMBER; may be given several times."),
    ] = None,
    offset: Annotated[
        int | None, typer.Option("--offset", "-o", min=0, help="Begin with this offset in every queue that is read.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for new messages, until Ctrl-C.")] = False,
    to: Annotated[
        str | None, typer.Option("--to", help="Without a group: only messages stored before this time.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Stop after this many messages.")] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show time, place, tag and keys before the body.")
    ] = False,
    layout: Annotated[
        str | None,
        typer.Option(
            "--format",
            "-f",
            help=r"Form of a line, as in kcat: %t topic, %p queue, %o offset, %k keys, %s body, %h properties; \n.",
        ),
    ] = None,
    charset: Charset = None,
    count_tags: Annotated[
        bool, typer.Option("--count-tags/--no-count-tags", help="At the end, say how many messages each tag has.")
    ] = False,
    pop: Annotated[
        bool,
        typer.Option("--pop", help="With a group: lease messages and acknowledge them one by one; no queue is owned."),
    ] = False,
    invisible: Annotated[
        float,
        typer.Option(
            "--invisible", min=1, help="--pop: seconds after which a message that was not acknowledged comes again."
        ),
    ] = 30.0,
    namesrv: Namesrv = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object for each message.")] = False,
) -> None:
    """Print the messages of a topic, each on a line. With --follow, wait for new messages."""
    from downrange.transport.loop import run as run_loop

    if tag is not None and sql is not None:
        raise UsageError("--tag and --sql cannot be combined; SQL92 knows the tag as TAGS")
    if start is None:
        start = "last" if follow and group is None else "first"
    timestamp = None if start in ("first", "last") else parse_time(start)
    if layout is not None and (json or verbose):
        raise UsageError("--format says all about the form: leave out --json and --verbose")
    if charset is not None and (json or layout is not None):
        raise UsageError("--charset is for lines of text: --json and --format have bodies as they are")
    if to is not None and (group is not None or follow):
        raise UsageError("--to is for reading without --group and --follow")
    decode = decoder(charset)
    line = _json_line if json else partial(_verbose_line if verbose else _body_line, decode=decode)
    show = message_format(layout) if layout is not None else lambda message: f"{line(message)}\n".encode()
    if group is not None and (queue or offset is not None):
        raise UsageError("--queue and --offset are for reading without --group: members of a group share the queues")
    end = None if to is None else parse_time(to)
    wanted = Wanted(topic, tag or "*", sql, tuple(queue or ()), offset, end)
    reading = Reading(wanted, start, timestamp, follow, limit, show)
    if pop:
        if group is None or timestamp is not None:
            raise UsageError(
                "--pop needs --group" if group is None else "--pop begins with first or last, not at a time"
            )
        run_loop(reading.pop(namesrv, group, invisible))
    else:
        run_loop(reading.run(namesrv, group))
    if not reading.count and not reading.is_cut_off and not follow:
        typer.echo("downrange: no messages", err=True)
    if count_tags:
        for name, count in reading.tags.most_common():
            typer.echo(f"Tag: {visible(name or '-'):<20} Count: {count}", err=True)


class Wanted(NamedTuple):
    """The messages to read: all of a topic, or those with a tag, or those that an SQL92 expression matches."""

    topic: str
    tags: str
    sql: str | None
    queues: tuple[str, ...] = ()
    offset: int | None = None
    end: int | None = None
    """The store time at which the first message is not wanted any more."""

    def chosen(self, queues: Sequence[MessageQueue]) -> list[MessageQueue]:
        """Those of the topic's queues that are wanted; raises UsageError when one that is named does not exist."""
        if not self.queues:
            return list(queues)
        chosen = []
        for text in self.queues:
            name, _, number = text.rpartition(":")
            found = [one for one in queues if str(one.queue_id) == number and name in ("", one.broker_name)]
            if not found:
                known = ", ".join(f"{one.broker_name}:{one.queue_id}" for one in queues)
                raise UsageError(f"--queue {text}: the topic {self.topic} has the queues {known}")
            chosen += found
        return list(dict.fromkeys(chosen))


@dataclass
class Reading:
    """One run of the command: it ends with the last message, at the limit, or with Ctrl-C."""

    wanted: Wanted
    start: str
    timestamp: int | None
    follow: bool
    limit: int | None
    show: Callable[[ReceivedMessage], bytes]
    tags: Counter[str | None] = field(init=False, default_factory=Counter)
    count: int = field(init=False, default=0)
    is_cut_off: bool = field(init=False, default=False)
    """Whether the reader of our output went away."""

    async def run(self, namesrv: str | None, group: str | None) -> None:
        from downrange.cli.progress import progress
        from downrange.cli.until_signal import stop_on_signal
        from downrange.client.consumer.lite_pull import AsyncLitePullConsumer
        from downrange.client.consumer.lite_pull_config import ConsumeFromWhere, LitePullConfig
        from downrange.model.topics import TOOLS_GROUP

        where = {"first": ConsumeFromWhere.FIRST_OFFSET, "last": ConsumeFromWhere.LAST_OFFSET}
        config = LitePullConfig(
            auto_commit=group is not None,
            consume_from_where=where.get(self.start, ConsumeFromWhere.TIMESTAMP),
            consume_timestamp=self.timestamp,
            pull_batch_size=BATCH,
        )
        consumer = AsyncLitePullConsumer(group or TOOLS_GROUP, client_config(namesrv), config)
        with stop_on_signal() as stop, progress("read", self.limit, shares_terminal=True) as shown:
            async with consumer, naming_the_nearest_topic(consumer.session):
                try:
                    await stop.or_result(self._begin(consumer, is_member=group is not None))
                    await self._read(consumer, stop, shown)
                except BrokenPipeError:
                    # The reader of our output is gone, as after `| head`: messages it did not get are not committed.
                    self._cut_off()
                    await consumer.close(last_are_done=False)

    def _cut_off(self) -> None:
        self.is_cut_off = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    async def pop(self, namesrv: str | None, group: str, invisible_seconds: float) -> None:
        from downrange.cli.progress import progress
        from downrange.cli.until_signal import stop_on_signal
        from downrange.client.consumer.simple import AsyncSimpleConsumer
        from downrange.client.consumer.simple_config import ConsumeFromWhere, SimpleConsumerConfig

        where = ConsumeFromWhere.FIRST_OFFSET if self.start == "first" else ConsumeFromWhere.LAST_OFFSET
        topic, tags, sql, *_ = self.wanted
        consumer = AsyncSimpleConsumer(group, client_config(namesrv), SimpleConsumerConfig(consume_from_where=where))
        with stop_on_signal() as stop, progress("read", self.limit, shares_terminal=True) as shown:
            async with consumer, naming_the_nearest_topic(consumer.session):
                if not self.follow:
                    await consumer.session.route(topic)  # raises if there is no such topic: subscribing would only warn
                await stop.or_result(consumer.subscribe(topic, tags, sql=sql))
                while not stop.is_made and self.count != self.limit:
                    most = BATCH if self.limit is None else min(BATCH, self.limit - self.count)
                    try:
                        messages = await stop.or_result(
                            consumer.receive(most, invisible_seconds, 5 if self.follow else 0)
                        )
                    except MQError as error:
                        if not self.follow or not error.retriable:
                            raise
                        log.warning("%s; waiting", error)
                        continue
                    if messages:
                        try:
                            await self._print(messages, shown)
                        except BrokenPipeError:
                            self._cut_off()  # what the reader did not get is not acknowledged
                            break
                        await consumer.ack_many(messages)
                    elif not self.follow:
                        break

    async def _print(self, messages: Sequence[ReceivedMessage], shown: Progress) -> None:
        end = self.wanted.end
        if end is not None:
            messages = [message for message in messages if message.store_timestamp < end]
        self.tags.update(message.tags for message in messages)
        # In a thread: a terminal that blocks must not keep us from sending heartbeats.
        await asyncio.to_thread(_write, [self.show(message) for message in messages])
        self.count += len(messages)
        shown.add(len(messages))

    async def _begin(self, consumer: AsyncLitePullConsumer, *, is_member: bool) -> None:
        topic, tags, sql, *_ = self.wanted
        if is_member:
            if not self.follow:
                await consumer.queues(topic)  # raises if there is no such topic: polling would wait for it
            await consumer.subscribe(topic, tags, sql=sql)
            return
        queues = self.wanted.chosen(await consumer.queues(topic))
        await consumer.assign(queues, tags, sql=sql)
        for queue in queues:
            if self.wanted.offset is not None:
                await consumer.seek(queue, self.wanted.offset)
            elif self.timestamp is not None:
                await consumer.seek_to_time(queue, self.timestamp)
            elif self.start == "first":
                await consumer.seek_to_begin(queue)
            else:
                await consumer.seek_to_end(queue)

    async def _read(self, consumer: AsyncLitePullConsumer, stop: StopRequest, shown: Progress) -> None:
        ends: dict[MessageQueue, int] = {}
        while not stop.is_made and self.count != self.limit:
            if not self.follow and await self._is_at_end(consumer, ends):
                return
            most = BATCH if self.limit is None else min(BATCH, self.limit - self.count)
            # Short waits without --follow: the last messages may not match our filter, then none arrives.
            messages = await stop.or_result(consumer.poll(5.0 if self.follow else 0.05, most))
            if messages:
                await self._print(messages, shown)

    async def _is_at_end(self, consumer: AsyncLitePullConsumer, ends: dict[MessageQueue, int]) -> bool:
        """Whether every message was read that was in its queue when we got the queue."""
        for queue in consumer.assignment:
            if queue not in ends:
                ends[queue] = await consumer.max_offset(queue)
        return all(consumer.position(queue) >= ends[queue] for queue in consumer.assignment)


def _write(parts: Sequence[bytes]) -> None:
    sys.stdout.buffer.write(b"".join(parts))
    sys.stdout.buffer.flush()


def _json_line(message: ReceivedMessage) -> str:
    from downrange.client.message_document import message_document

    return json_text.dumps(message_document(message), ensure_ascii=False)


def _body_line(message: ReceivedMessage, decode: Callable[[bytes], str]) -> str:
    return visible(decode(body_of(message)))


def _verbose_line(message: ReceivedMessage, decode: Callable[[bytes], str]) -> str:
    place = f"{message.broker_name}:{message.queue_id}@{message.queue_offset}"
    words = [time_text(message.store_timestamp), place]
    if message.tags:
        words.append(f"tag={message.tags}")
    if message.keys:
        words.append(f"keys={','.join(message.keys)}")
    if message.reconsume_times:
        words.append(f"times={message.reconsume_times}")
    return visible(" ".join(words)) + "  " + _body_line(message, decode)
