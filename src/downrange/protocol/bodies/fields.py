"""Converts between ext fields, whose values travel as strings, and typed headers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec.structs import astuple

from downrange.model.errors import MQError

Int32 = Annotated[int, msgspec.Meta(ge=-0x8000_0000, le=0x7FFF_FFFF)]
"""Java's int: a value outside its range could not be stored."""
Int64 = Annotated[int, msgspec.Meta(ge=-0x8000_0000_0000_0000, le=0x7FFF_FFFF_FFFF_FFFF)]
"""Java's long."""

HeaderType = TypeVar("HeaderType", bound=msgspec.Struct)

_MISSING_FIELD: Final = re.compile(r"missing required field `([^`]+)`")
_WRONG_FIELD: Final = re.compile(r"Expected `(\w+)[^`]*`.* - at `\$\.([^`]+)`")
_KINDS: Final = {"int": "a number", "float": "a number", "bool": "true or false", "str": "a text"}


class Header(msgspec.Struct, frozen=True, rename="camel"):
    """The ext fields of one kind of request or response. A field that is None does not travel."""


class FieldError(MQError):
    """A header lacks a field or has one that cannot be read; `field` is its name on the wire."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(problem)
        self.field = field


def decode_fields(header_type: type[HeaderType], ext_fields: Mapping[str, str]) -> HeaderType:
    """The typed header; raises a FieldError that names the wrong field."""
    try:
        return msgspec.convert(ext_fields, header_type, strict=False)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), ext_fields) from None


def encode_fields(header: msgspec.Struct) -> dict[str, str]:
    """The header as ext fields, in the order of declaration."""
    return {
        name: value if (kind := type(value)) is str else str(value) if kind is int else _text(value)
        for name, value in zip(header.__struct_encode_fields__, astuple(header), strict=True)
        if value is not None
    }


def _text(value: Any) -> str:
    if value is True or value is False:
        return "true" if value else "false"
    return str(value)


def _field_error(message: str, ext_fields: Mapping[str, str]) -> FieldError:
    if found := _MISSING_FIELD.search(message):
        return FieldError(found[1], f"missing required field '{found[1]}'")
    if found := _WRONG_FIELD.search(message):
        kind, field = found.groups()
        value = ext_fields[field]
        if "=" in message:  # Expected `int` <= 2147483647
            return FieldError(field, f"field '{field}' is out of range: {value!r}")
        return FieldError(field, f"field '{field}' is not {_KINDS.get(kind, kind)}: {value!r}")
    return FieldError("", message)
