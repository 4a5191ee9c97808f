"""The JSON header: {"code":105,"extFields":{"topic":"TopicA"},"flag":0,"language":"JAVA","opaque":1,"version":409}.

Written as standard JSON with members in alphabetical order, as Java does. Read as leniently as Java reads it: unknown
members are ignored, `language` may be a name or a number, ext values that are not strings become strings, null means
absent.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from downrange.protocol.codes import LanguageCode
from downrange.protocol.errors import RemoteProtocolError

if TYPE_CHECKING:
    from downrange.protocol.command import Command

H = TypeVar("H", bound=msgspec.Struct)

Int32 = Annotated[int, msgspec.Meta(ge=-0x80000000, le=0x7FFFFFFF)]

NO_EXT = msgspec.Raw(b"null")
_LANGUAGE_NAMES = {int(language): language.name for language in LanguageCode}
_LANGUAGE_BYTES = {number: name.encode() for number, name in _LANGUAGE_NAMES.items()}
_READY_FIELDS = (
    b'{"code":%d,"extFields":%b,"flag":%d,"language":"%b","opaque":%d,"serializeTypeCurrentRPC":"JSON","version":%d}'
)
_LANGUAGE_CODES: dict[str | int | None, int] = {
    **{language.name: int(language) for language in LanguageCode},
    **{int(language): int(language) for language in LanguageCode},
}
_OTHER = int(LanguageCode.OTHER)
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class JsonHeader(msgspec.Struct, gc=False, rename={"ext": "extFields"}):
    code: Int32
    opaque: Int32 = 0
    flag: Int32 = 0
    language: str | int | None = "JAVA"
    version: Int32 = 0
    remark: str | None = None
    ext: msgspec.Raw = NO_EXT


def language_code(language: str | int | None) -> int:
    """The number of a language given by name or number; OTHER for an unknown language."""
    return _LANGUAGE_CODES.get(language, _OTHER)


_decode_header = msgspec.json.Decoder(JsonHeader).decode
_decode_string_map = msgspec.json.Decoder(dict[str, str]).decode
_decode_any_map = msgspec.json.Decoder(dict[str, Any] | None).decode
_encode = msgspec.json.Encoder().encode


def decode(header: bytes) -> JsonHeader:
    try:
        return _decode_header(header)
    except _UNREADABLE as error:
        raise RemoteProtocolError(f"JSON header cannot be read: {error}") from None


def decode_ext_fields(raw: msgspec.Raw) -> dict[str, str]:
    try:
        return _decode_string_map(raw)
    except _UNREADABLE:
        pass  # a peer that sends numbers, booleans or nulls: read it the slow way
    try:
        fields = _decode_any_map(raw) or {}
    except _UNREADABLE as error:
        raise RemoteProtocolError(f"extFields cannot be read: {error}") from None
    return {name: _text(value) for name, value in fields.items() if value is not None}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _encode(value).decode()


@cache
def _typed_decoder(header_type: type[H]) -> msgspec.json.Decoder[H]:
    return msgspec.json.Decoder(header_type, strict=False)


def decode_typed(raw: msgspec.Raw, header_type: type[H]) -> H | None:
    """The typed header, directly from the text; None when it has to be read leniently, or is wrong."""
    decoder: msgspec.json.Decoder[H] = _typed_decoder(header_type)
    try:
        return decoder.decode(raw)
    except _UNREADABLE:
        return None


def encode(command: Command, opaque: int) -> bytes:
    code, flag, version, raw_ext = command.code, command.flag, command.version, command.raw_ext
    # Ext fields that are JSON text already are not encoded again: senders of many requests make it themselves.
    is_ready = isinstance(raw_ext, msgspec.Raw)
    if command.remark is None and is_ready:  # nearly all sends and their replies
        return _READY_FIELDS % (code, raw_ext, flag, _LANGUAGE_BYTES.get(command.language, b"OTHER"), opaque, version)
    header: dict[str, Any] = {"code": code}
    if raw_ext is not None:
        header["extFields"] = raw_ext if is_ready else command.ext_fields
    header["flag"] = flag
    header["language"] = _LANGUAGE_NAMES.get(command.language, "OTHER")
    header["opaque"] = opaque
    if command.remark is not None:
        header["remark"] = command.remark
    header["serializeTypeCurrentRPC"] = "JSON"
    header["version"] = version
    return _encode(header)
