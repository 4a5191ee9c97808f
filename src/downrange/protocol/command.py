"""Commands: a request or a reply, in either header encoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from downrange.protocol import header_binary, header_json
from downrange.protocol.bodies.fields import decode_fields, encode_fields
from downrange.protocol.codes import VERSION_4_9_8, LanguageCode, ResponseCode, SerializeType

H = TypeVar("H", bound=msgspec.Struct)

Buffer = bytes | bytearray | memoryview
Body = Buffer | Sequence[Buffer]

RESPONSE_FLAG: Final = 1
ONEWAY_FLAG: Final = 2


class Command(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One request or reply, as a value.

    `raw_ext` is the ext-field block as it arrived (JSON text or binary pairs, by `serialize_type`), or a dict that we
    made. It is read only when needed: `header(Type)` turns the text directly into a typed header, at half the cost of
    the way over a dict, and the fields of a request that is refused early are never read.
    """

    code: int
    opaque: int = 0
    flag: int = 0
    raw_ext: bytes | msgspec.Raw | Mapping[str, str] | None = None
    body: Body = b""
    remark: str | None = None
    # Numbers, not enum members: writing a frame looks up the language, and hashing an enum member is slow.
    language: int = int(LanguageCode.PYTHON)
    version: int = VERSION_4_9_8
    serialize_type: int = int(SerializeType.JSON)

    @property
    def is_response(self) -> bool:
        return bool(self.flag & RESPONSE_FLAG)

    @property
    def is_oneway(self) -> bool:
        return bool(self.flag & ONEWAY_FLAG)

    @property
    def ext_fields(self) -> Mapping[str, str]:
        """All ext fields by name. Raises RemoteProtocolError when they cannot be read."""
        raw = self.raw_ext
        if raw is None:
            return {}
        if isinstance(raw, msgspec.Raw):
            return header_json.decode_ext_fields(raw)
        if isinstance(raw, bytes):
            return header_binary.decode_ext_fields(raw)
        return raw

    def header(self, header_type: type[H]) -> H:
        """The ext fields as a typed header. Raises a FieldError that names a missing or wrong field."""
        if isinstance(self.raw_ext, msgspec.Raw):
            typed = header_json.decode_typed(self.raw_ext, header_type)
            if typed is not None:
                return typed
        return decode_fields(header_type, self.ext_fields)

    @property
    def body_bytes(self) -> bytes:
        body = self.body
        if isinstance(body, bytes):
            return body
        return bytes(body) if isinstance(body, bytearray | memoryview) else b"".join(body)

    def reply(
        self,
        code: int = ResponseCode.SUCCESS,
        remark: str | None = None,
        *,
        header: msgspec.Struct | None = None,
        ext_fields: Mapping[str, str] | msgspec.Raw | None = None,
        body: Body = b"",
    ) -> Command:
        """The answer to this request, with its opaque and header encoding. `ext_fields` may be JSON text already."""
        return Command(
            code=code,
            opaque=self.opaque,
            flag=RESPONSE_FLAG,
            raw_ext=ext_fields if isinstance(ext_fields, msgspec.Raw) else _ext_fields(header, ext_fields),
            body=body,
            remark=remark,
            serialize_type=self.serialize_type,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Command):
            return NotImplemented
        return (
            self.code == other.code
            and self.opaque == other.opaque
            and self.flag == other.flag
            and self.ext_fields == other.ext_fields
            and self.body_bytes == other.body_bytes
            and (self.remark or "") == (other.remark or "")
            and self.language == other.language
            and self.version == other.version
            and self.serialize_type == other.serialize_type
        )

    __hash__ = None  # type: ignore[assignment]  # equal commands may hold their ext fields in different forms


def _ext_fields(header: msgspec.Struct | None, more: Mapping[str, str] | None) -> Mapping[str, str] | None:
    if header is None:
        return more
    fields = encode_fields(header)
    return {**fields, **more} if more else fields


def request(
    code: int,
    header: msgspec.Struct | None = None,
    *,
    ext_fields: Mapping[str, str] | None = None,
    body: Body = b"",
    oneway: bool = False,
    remark: str | None = None,
    serialize_type: int = SerializeType.JSON,
) -> Command:
    """Make a request; the connection that sends it sets the opaque."""
    return Command(
        code=code,
        flag=ONEWAY_FLAG if oneway else 0,
        raw_ext=_ext_fields(header, ext_fields),
        body=body,
        remark=remark,
        serialize_type=serialize_type,
    )
