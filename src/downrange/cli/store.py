"""`downrange store …`: look into a store directory, whether a broker runs on it or not, without changing it."""

from __future__ import annotations

import base64
import json as json_text
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from downrange.cli.options import Json, UsageError, command_family
from downrange.cli.output import one_line
from downrange.cli.times import is_number, parse_time, time_text
from downrange.settings import camel_case, read_properties

if TYPE_CHECKING:
    from downrange.model.message import StoredMessage
    from downrange.store.check.directory import StoreDirectory
    from downrange.store.check.store_check import StoreReport

app = command_family("Look into a store directory, whether a broker runs on it or not. These commands change nothing.")

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The store: storePathRootDir of the broker.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="broker.conf of this store, for sizes and paths.")
]

_PREVIEW_CHARACTERS = 60


class BodyForm(Enum):
    """How `cat` prints bodies."""

    text = "text"
    hex = "hex"
    base64 = "base64"


@app.command("check")
def check(
    directory: Directory,
    config_file: ConfigFile = None,
    json: Json = False,
) -> None:
    """Verify every file of a store against the others.

    Exit code 0: everything is in order; 1: there are problems; 2: this is not a store, or it cannot be read.
    """
    from downrange.store.check import store_check as store_check

    store = _open(directory, config_file)
    with _progress() as progress:
        try:
            report = store_check.check(store, progress)
        except OSError as error:
            _cannot_read(f"{error.filename or directory}: {error.strerror or error}")
    if json:
        print(json_text.dumps(_document(report), indent=2, ensure_ascii=False))
    else:
        _print_report(report)
    if not report.is_clean:
        raise typer.Exit(1)


@app.command("cat")
def cat(
    directory: Directory,
    topic: Annotated[str | None, typer.Option("--topic", "-t", help="Only messages of this topic.")] = None,
    queue: Annotated[int | None, typer.Option("--queue", "-i", min=0, help="Only this queue of the topic.")] = None,
    start: Annotated[
        str | None,
        typer.Option("--from", help="Begin at this offset in the log (with --queue: in the queue), or at this time."),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="At most this many messages.")] = None,
    key: Annotated[str | None, typer.Option("--key", "-k", help="Only messages with this key or unique id.")] = None,
    body: Annotated[BodyForm | None, typer.Option("--body", help="Print whole bodies, in this form.")] = None,
    config_file: ConfigFile = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document a line, with every field.")] = False,
) -> None:
    """Print messages in the order of the log, or the messages of one queue."""
    from downrange.store.check.message_source import MessageSource

    if queue is not None and topic is None:
        raise UsageError("--queue needs --topic")
    source = MessageSource(_open(directory, config_file), topic, queue, key)
    start = start or "0"
    found = source.from_offset(int(start)) if is_number(start) else source.from_time(parse_time(start))
    show = _json_line if json else _text_line
    message = None
    try:
        for message in islice(found, limit):
            print(show(message, body))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if message is None:
        print("downrange: no messages", file=sys.stderr)
    for problem in source.damage:
        print(f"downrange: {problem}", file=sys.stderr)
    if source.damage:
        raise typer.Exit(1)


def _open(directory: Path, config_file: Path | None) -> StoreDirectory:
    from downrange.store.check.directory import NotAStore, StoreDirectory

    properties = read_properties(config_file) if config_file is not None else None
    try:
        return StoreDirectory(directory, properties=properties)
    except NotAStore as error:
        _cannot_read(one_line(error))
    except OSError as error:
        _cannot_read(f"{error.filename or directory}: {error.strerror or error}")


def _cannot_read(why: str) -> NoReturn:
    print(f"downrange: {why}", file=sys.stderr)
    raise typer.Exit(2)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show progress bars on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        tasks = {what: bars.add_task(what, total=None) for what in ("log", "queues")}
        yield lambda what, done, total: bars.update(tasks[what], completed=done, total=total)


def _print_report(report: StoreReport) -> None:
    owner = f" by process {report.owner}" if report.owner else ""
    print(f"{report.root}: {report.state.value}{owner}")
    print(
        f"commit log    {report.log_files} files, {report.log_bytes:,} bytes, offsets {report.min_offset} to "
        f"{report.max_offset}, {report.records:,} records"
    )
    if report.records:
        print(f"store times   {time_text(report.first_timestamp)} to {time_text(report.last_timestamp)}")
    print(
        f"queues        {report.queues:,} queues, {report.queue_files:,} files, {report.queue_bytes:,} bytes, "
        f"{report.queue_entries:,} entries"
    )
    print(f"index         {report.index_files} files, {report.index_bytes:,} bytes, {report.index_keys:,} keys")
    for note in report.notes:
        print(f"note          {note}")
    for problem in report.problems:
        print(f"problem       {problem}")
    print(f"problems      {len(report.problems) or 'none'}")


def _document(report: StoreReport) -> dict[str, Any]:
    document = {camel_case(name): value for name, value in asdict(report).items()}
    return document | {"state": report.state.name, "clean": report.is_clean}


def _text_line(message: StoredMessage, form: BodyForm | None) -> str:
    place = f"{message.topic}/{message.queue_id}/{message.queue_offset}"
    body = _preview(_plain_body(message)) if form is None else _encoded(_plain_body(message), form)
    return (
        f"{message.physical_offset} {time_text(message.store_timestamp)} {place} tags={message.tags or '-'} "
        f"keys={','.join(message.keys) or '-'} {body}"
    )


def _preview(body: bytes) -> str:
    """The beginning of a body on one line, as text if the body is text."""
    shown = body.decode() if _is_text(body) else f"hex:{body[:_PREVIEW_CHARACTERS].hex()}"
    shown = "".join(one if one.isprintable() else " " for one in shown[: _PREVIEW_CHARACTERS + 1])
    return f"{shown[:_PREVIEW_CHARACTERS]}…" if len(shown) > _PREVIEW_CHARACTERS else shown


def _encoded(body: bytes, form: BodyForm) -> str:
    match form:
        case BodyForm.hex:
            return body.hex()
        case BodyForm.base64:
            return base64.b64encode(body).decode("ascii")
        case BodyForm.text:
            return body.decode("utf-8", "backslashreplace")


def _plain_body(message: StoredMessage) -> bytes:
    """The body as it was sent; as it is stored if its compression is unknown here."""
    from downrange.client.compression import plain_body
    from downrange.model.errors import MessageError

    try:
        return plain_body(message)
    except MessageError:
        return message.body


def _json_line(message: StoredMessage, form: BodyForm | None) -> str:
    body = _plain_body(message)
    if form is None:
        form = BodyForm.text if _is_text(body) else BodyForm.base64
    return json_text.dumps(
        {
            "topic": message.topic,
            "queueId": message.queue_id,
            "queueOffset": message.queue_offset,
            "physicalOffset": message.physical_offset,
            "storeSize": message.store_size,
            "msgId": message.message_id,
            "offsetMsgId": message.offset_message_id,
            "flag": message.flag,
            "sysFlag": message.sys_flag,
            "bodyCRC": message.body_crc,
            "bornTimestamp": message.born_timestamp,
            "bornHost": str(message.born_host),
            "storeTimestamp": message.store_timestamp,
            "storeHost": str(message.store_host),
            "reconsumeTimes": message.reconsume_times,
            "preparedTransactionOffset": message.prepared_transaction_offset,
            "properties": message.properties,
            "bodyForm": form.value,
            "body": _encoded(body, form),
        },
        ensure_ascii=False,
    )


def _is_text(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True
