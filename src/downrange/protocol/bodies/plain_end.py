"""The end of a transaction (37) from header to values in one step: every transaction has one."""

from __future__ import annotations

from typing import Final

import msgspec

from downrange.protocol import header_binary
from downrange.protocol.bodies.fields import FieldError, Int32, decode_fields
from downrange.protocol.bodies.transactions import EndTransactionRequest
from downrange.protocol.codes import RequestCode, SerializeType
from downrange.protocol.errors import RemoteProtocolError
from downrange.protocol.framing import Frame

_JSON: Final = int(SerializeType.JSON)
_BINARY: Final = int(SerializeType.ROCKETMQ)
_CODE: Final = int(RequestCode.END_TRANSACTION)
_JSON_START: Final = b'{"code":%d,' % _CODE  # clients that write the members in another order take the general way
_BINARY_START: Final = _CODE.to_bytes(2, "big")
_UNREADABLE: Final = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class _JsonEnd(msgspec.Struct, gc=False, rename={"ext": "extFields"}):
    ext: EndTransactionRequest
    opaque: Int32 = 0
    flag: Int32 = 0


_decode_json = msgspec.json.Decoder(_JsonEnd, strict=False).decode


def parse_end(frame: Frame) -> tuple[int, int, EndTransactionRequest] | None:
    """Opaque, flag and header of a request 37; None when the frame is something else, or takes the lenient way."""
    kind, header, _ = frame
    if kind == _JSON:
        if not header.startswith(_JSON_START):
            return None
        try:
            end = _decode_json(header)
        except _UNREADABLE:
            return None
        return end.opaque, end.flag, end.ext
    if kind != _BINARY or not header.startswith(_BINARY_START):
        return None
    try:
        command = header_binary.decode(header)
        fields = header_binary.decode_ext_fields(command.ext)
        return command.opaque, command.flag, decode_fields(EndTransactionRequest, fields)
    except (RemoteProtocolError, FieldError):
        return None
