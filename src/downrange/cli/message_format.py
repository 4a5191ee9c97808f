r"""Formats of `downrange consume --format`, as kcat has them.

    %t topic      %p queue      %o offset    %s body    %S length of the body    %k keys    %K length of the keys
    %T store time in milliseconds            %h properties, name=value,...
    %b broker     %g tag        %i unique id            %% a percent sign
    \n \t \r \\ \0 \xNN         as in C

Text is written as it is, without a line end that the format does not name. Bodies are bytes and stay so.
"""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING, Annotated

import typer

from downrange.cli.options import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from downrange.client.consumer.messages import ReceivedMessage

Charset = Annotated[str | None, typer.Option("--charset", help="Encoding of the bodies, for instance GBK. [UTF-8]")]


def decoder(charset: str | None) -> Callable[[bytes], str]:
    """A function that makes text of a body; bytes that are no text become question marks."""
    try:
        name = codecs.lookup(charset or "utf-8").name
    except LookupError:
        raise UsageError(f"--charset {charset}: no such encoding") from None
    return lambda body: body.decode(name, "replace")


_PIECE = re.compile(r"%(.?)|\\(x[0-9a-fA-F]{2}|.?)", re.DOTALL)
_ESCAPES = {"n": b"\n", "t": b"\t", "r": b"\r", "\\": b"\\", "0": b"\0"}


def message_format(text: str) -> Callable[[ReceivedMessage], bytes]:
    """A function that makes the bytes of a message; raises UsageError for a format that cannot be meant."""
    pieces: list[bytes | Callable[[ReceivedMessage], bytes]] = []
    at = 0
    for found in _PIECE.finditer(text):
        pieces.append(text[at : found.start()].encode())
        at = found.end()
        pieces.append(_field(found[1]) if found[1] is not None else _escape(found[2]))
    pieces.append(text[at:].encode())
    return lambda message: b"".join(piece if isinstance(piece, bytes) else piece(message) for piece in pieces)


def _escape(name: str) -> bytes:
    if name.startswith("x") and len(name) == 3:
        return bytes([int(name[1:], 16)])
    if name not in _ESCAPES:
        raise UsageError(rf"--format: \{name} is none of \n \t \r \\ \0 \xNN")
    return _ESCAPES[name]


def _field(letter: str) -> bytes | Callable[[ReceivedMessage], bytes]:
    if letter == "%":
        return b"%"
    if letter not in _FIELDS:
        raise UsageError(f"--format: %{letter} is none of {' '.join(f'%{one}' for one in _FIELDS)} %%")
    return _FIELDS[letter]


def body_of(message: ReceivedMessage) -> bytes:
    """The body as its producer gave it; one that cannot be decompressed as it is stored."""
    from downrange.model.errors import MessageError

    try:
        return message.body
    except MessageError:
        return message.stored_body


def _keys(message: ReceivedMessage) -> bytes:
    return " ".join(message.keys).encode()


def _properties(message: ReceivedMessage) -> bytes:
    return ",".join(f"{name}={value}" for name, value in message.properties.items()).encode()


_FIELDS: dict[str, Callable[[ReceivedMessage], bytes]] = {
    "t": lambda message: message.topic.encode(),
    "p": lambda message: b"%d" % message.queue_id,
    "o": lambda message: b"%d" % message.queue_offset,
    "s": body_of,
    "S": lambda message: b"%d" % len(body_of(message)),
    "k": _keys,
    "K": lambda message: b"%d" % len(_keys(message)),
    "T": lambda message: b"%d" % message.store_timestamp,
    "h": _properties,
    "b": lambda message: message.broker_name.encode(),
    "g": lambda message: (message.tags or "").encode(),
    "i": lambda message: message.message_id.encode(),
}
