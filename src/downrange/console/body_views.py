"""Bytes as people can read them: JSON, text, fields of Protobuf, hexadecimal; unpacked first if they are packed.

Pure, and safe for any bytes: unpacking is capped, nesting is capped, and nothing is executed.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from downrange.console.formats import size
from downrange.model.text import Text

MOST_SHOWN: Final = 64 << 10
MOST_UNPACKED: Final = 4 << 20
_DEEPEST: Final = 8
_MOST_FIELDS: Final = 2000
MASKED: Final = "•••"


@dataclass(frozen=True, slots=True)
class View:
    """One way to read a body. `is_cut`: there is more than is shown."""

    name: str
    text: str
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class BodyLook:
    """All ways to read a body, the best one first, and what was done to it."""

    bytes: int
    views: list[View] = field(default_factory=list)
    notes: list[Text] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [view.name for view in self.views]

    def view(self, name: str) -> View | None:
        return next((view for view in self.views if view.name == name), self.views[0] if self.views else None)


def look(body: bytes, mask: re.Pattern[str] | None = None) -> BodyLook:
    """The views of a body. With a mask only JSON is shown, without the values of the fields it names."""
    notes: list[Text] = []
    plain = body
    if packed := _packing(body):
        unpacked, is_whole = _unpack(body)
        if unpacked is None:
            notes.append(Text("looks like {packing}, but cannot be unpacked", packing=packed))
        elif not is_whole:
            notes.append(
                Text(
                    "{packing}: unpacked it is larger than {most} and is not shown",
                    packing=packed,
                    most=size(MOST_UNPACKED),
                )
            )
        else:
            whole = size(len(unpacked))
            notes.append(Text("{packing}: {size}, unpacked {whole}", packing=packed, size=size(len(body)), whole=whole))
            plain = unpacked
    if mask is not None:
        return _masked(body, plain, mask, notes)
    views = [view for make in (_json, _text, _protobuf, _hex) if (view := make(plain)) is not None]
    if plain is not body:
        views.append(View("packed", _hex_dump(body[: MOST_SHOWN // 5]), len(body) > MOST_SHOWN // 5))
    return BodyLook(len(body), views, notes)


def _masked(body: bytes, plain: bytes, mask: re.Pattern[str], notes: list[Text]) -> BodyLook:
    document = _document(plain)
    if document is None:
        notes.append(Text("values are masked for your role, and only JSON can be masked: this body is not shown"))
        return BodyLook(len(body), [], notes)
    notes.append(Text("some values are masked for your role"))
    return BodyLook(len(body), [_cut("JSON", _pretty(masked(document[0], mask)))], notes)


def masked(value: Any, mask: re.Pattern[str]) -> Any:
    """A JSON document with other values for the fields that the mask names."""
    if isinstance(value, dict):
        return {key: MASKED if mask.search(key) else masked(one, mask) for key, one in value.items()}
    if isinstance(value, list):
        return [masked(one, mask) for one in value]
    return value


def masked_properties(properties: dict[str, str], mask: re.Pattern[str] | None) -> dict[str, str]:
    if mask is None:
        return properties
    return {name: MASKED if mask.search(name) else value for name, value in properties.items()}


def summary(body: bytes, most: int = 200) -> str:
    """The beginning of a body on one line, for lists."""
    packed = _packing(body)
    if packed:
        unpacked, _ = _unpack(body, 4 * most)
        if unpacked is not None:
            body = unpacked
    piece = body[: 4 * most]
    try:
        text = piece.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start > len(piece) - 4 and len(body) > len(piece):
            text = piece[: error.start].decode("utf-8")
        else:
            return piece[: most // 3].hex(" ") + (" …" if len(body) > most // 3 else "")
    text = " ".join(text.split())
    return text[:most] + (" …" if len(text) > most or len(body) > len(piece) else "")


# --- unpacking --------------------------------------------------------------------------------------------------------


def _packing(body: bytes) -> str | None:
    if body[:3] == b"\x1f\x8b\x08":
        return "gzip"
    if len(body) > 6 and body[0] == 0x78 and body[1] in (0x01, 0x5E, 0x9C, 0xDA):
        return "zlib"
    return None


def _unpack(body: bytes, most: int = MOST_UNPACKED) -> tuple[bytes | None, bool]:
    """What is inside, up to `most` bytes, and whether that is all; None: it is damaged."""
    inflating = zlib.decompressobj(wbits=47)
    try:
        found = inflating.decompress(body, most + 1)
    except zlib.error:
        return None, False
    return found[:most], len(found) <= most and inflating.eof


# --- views ------------------------------------------------------------------------------------------------------------


def _document(body: bytes) -> tuple[Any] | None:
    if body[:1] not in (b"{", b"[", b'"', b" ", b"\n", b"\t", b"\r") or len(body) > MOST_UNPACKED:
        return None
    try:
        return (json.loads(body),)
    except (ValueError, RecursionError):
        return None


def _json(body: bytes) -> View | None:
    found = _document(body)
    return None if found is None else _cut("JSON", _pretty(found[0]))


def _pretty(document: Any) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False)


def _text(body: bytes) -> View | None:
    if not body:
        return View("text", "")
    piece = body[: MOST_SHOWN + 4]
    try:
        text = piece.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start >= len(piece) - 4 and len(body) > len(piece):
            text = piece[: error.start].decode("utf-8")
        else:
            return _latin(body)
    if _share_of_controls(text) > 0.1:
        return None
    return View("text", text[:MOST_SHOWN], len(body) > MOST_SHOWN)


def _latin(body: bytes) -> View | None:
    text = body[:MOST_SHOWN].decode("latin-1")
    return None if _share_of_controls(text) > 0.02 else View("Latin-1", text, len(body) > MOST_SHOWN)


def _share_of_controls(text: str) -> float:
    odd = sum(1 for one in text if (one < " " and one not in "\t\r\n") or "\x7f" <= one < "\xa0")
    return odd / max(1, len(text))


def _hex(body: bytes) -> View:
    shown = MOST_SHOWN // 5
    return View("hex", _hex_dump(body[:shown]), len(body) > shown)


def _hex_dump(body: bytes) -> str:
    lines = []
    for at in range(0, len(body), 16):
        piece = body[at : at + 16]
        letters = "".join(chr(one) if 0x20 <= one < 0x7F else "." for one in piece)
        lines.append(f"{at:08x}  {piece[:8].hex(' '):<23}  {piece[8:].hex(' '):<23}  {letters}")
    return "\n".join(lines)


def _cut(name: str, text: str) -> View:
    return View(name, text[:MOST_SHOWN], len(text) > MOST_SHOWN)


# --- Protobuf without a schema: numbers of fields, and what their bytes can mean ------------------------------------


class _NotProtobuf(Exception):
    """The bytes are no message of Protobuf."""


def _protobuf(body: bytes) -> View | None:
    if not body or len(body) > MOST_UNPACKED or _is_plain_text(body):
        return None
    budget = [_MOST_FIELDS]
    try:
        lines = _fields(body, 0, budget)
    except _NotProtobuf:
        return None
    return _cut("Protobuf", "\n".join(lines))


def _is_plain_text(body: bytes) -> bool:
    try:
        return _share_of_controls(body[:4096].decode("utf-8", "strict" if len(body) <= 4096 else "ignore")) == 0
    except UnicodeDecodeError:
        return False


def _fields(body: bytes, depth: int, budget: list[int]) -> list[str]:
    at = 0
    lines: list[str] = []
    indent = "  " * depth
    while at < len(body):
        budget[0] -= 1
        if budget[0] < 0:
            raise _NotProtobuf
        key, at = _varint(body, at)
        number, kind = key >> 3, key & 7
        if not 0 < number < 1 << 29 or kind not in _READERS:
            raise _NotProtobuf
        said, at = _READERS[kind](body, at)
        if kind == 2:
            lines += _piece(number, body[at - said : at], depth, budget)
        else:
            lines.append(f"{indent}{number}: {said}")
    return lines


def _piece(number: int, piece: bytes, depth: int, budget: list[int]) -> list[str]:
    """A field with a length: a text, a message within the message, or bytes."""
    indent = "  " * depth
    try:
        text = piece.decode("utf-8")
        if _share_of_controls(text) == 0:
            return [f"{indent}{number}: {json.dumps(text, ensure_ascii=False)}"]
    except UnicodeDecodeError:
        pass
    if depth < _DEEPEST and piece:
        try:
            return [f"{indent}{number}: {{", *_fields(piece, depth + 1, budget), f"{indent}}}"]
        except _NotProtobuf:
            pass
    return [f"{indent}{number}: {len(piece)} bytes {piece[:32].hex(' ')}{' …' if len(piece) > 32 else ''}"]


def _varint(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(body) or shift > 63:
            raise _NotProtobuf
        value |= (body[at] & 0x7F) << shift
        shift += 7
        at += 1
        if not body[at - 1] & 0x80:
            return value, at


def _fixed(width: int) -> Callable[[bytes, int], tuple[int, int]]:
    def read(body: bytes, at: int) -> tuple[int, int]:
        if at + width > len(body):
            raise _NotProtobuf
        return int.from_bytes(body[at : at + width], "little"), at + width

    return read


def _length(body: bytes, at: int) -> tuple[int, int]:
    length, at = _varint(body, at)
    if at + length > len(body):
        raise _NotProtobuf
    return length, at + length


_READERS: Final[dict[int, Callable[[bytes, int], tuple[int, int]]]] = {
    0: _varint,
    1: _fixed(8),
    2: _length,
    5: _fixed(4),
}
