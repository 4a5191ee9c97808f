"""Reads the headers of the most frequent requests in one step, without making a `Command`."""

from __future__ import annotations

from typing import Final, Generic, TypeVar

import msgspec

from downrange.protocol import header_binary
from downrange.protocol.bodies.fields import FieldError, Int32, decode_fields
from downrange.protocol.codes import RequestCode, SerializeType
from downrange.protocol.errors import RemoteProtocolError
from downrange.protocol.framing import Frame

E = TypeVar("E", bound=msgspec.Struct)

JSON: Final = int(SerializeType.JSON)
BINARY: Final = int(SerializeType.ROCKETMQ)
_UNREADABLE: Final = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class PlainRequest(msgspec.Struct, Generic[E], gc=False, rename={"ext": "extFields"}):
    """The values of a plain header."""

    ext: E
    opaque: Int32 = 0
    flag: Int32 = 0


class PlainHeader(Generic[E]):
    """Reads the header of one kind of request.

    Holds always: it gives what `Command.header` gives for the same bytes, or None. Headers that are not written in the
    form of nearly all clients are left to the general way.
    """

    __slots__ = ("_decode_json", "_fields", "_json_start", "binary_start", "starts")

    def __init__(self, code: RequestCode, fields: type[E]) -> None:
        self._json_start = b'{"code":%d,' % code
        self.binary_start = code.to_bytes(2, "big")
        self.starts = self._json_start, self.binary_start
        """Headers of this kind begin with one of these."""
        self._fields = fields
        self._decode_json = msgspec.json.Decoder(PlainRequest[fields], strict=False).decode  # type: ignore[valid-type]

    def read(self, frame: Frame) -> PlainRequest[E] | None:
        """The request in a frame; None when it is another request, or has to be read leniently, or is wrong."""
        kind, header, _ = frame
        if kind == JSON:
            return self.read_json(header)
        return self.read_binary(header) if kind == BINARY else None

    def read_json(self, header: bytes) -> PlainRequest[E] | None:
        if not header.startswith(self._json_start):
            return None
        try:
            return self._decode_json(header)
        except _UNREADABLE:
            return None

    def read_binary(self, header: bytes) -> PlainRequest[E] | None:
        if not header.startswith(self.binary_start):
            return None
        try:
            command = header_binary.decode(header)
            fields = decode_fields(self._fields, header_binary.decode_ext_fields(command.ext))
        except (RemoteProtocolError, FieldError):
            return None
        return PlainRequest(fields, command.opaque, command.flag)
