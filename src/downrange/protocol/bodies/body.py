"""Converts between JSON bodies and typed values.

A body is a frozen struct. Its members, the items of its lists and the keys and values of its maps may be values of the
model, which have another form on the wire:

    MessageQueue             {"brokerName":"broker-a","queueId":0,"topic":"TopicA"}
    as the key of a map      this object as a string; Java writes it without quotes
    Subscription, TopicConfig, SubscriptionGroupConfig     objects with Java's member names

We write standard JSON: members in alphabetical order, None left out, numbers and objects in key position quoted. We
read that and what Java writes (see java_json.py); a member that is null counts as absent.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Final, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from downrange.model.errors import MQError
from downrange.model.message import MessageQueue
from downrange.model.subscription import Subscription
from downrange.model.topics import (
    CustomizedRetryPolicy,
    ExponentialRetryPolicy,
    GroupRetryPolicy,
    SubscriptionGroupConfig,
    TopicConfig,
)
from downrange.protocol import java_json
from downrange.protocol.bodies.fields import Int32

BodyType = TypeVar("BodyType")
Reshape = Callable[[Any], Any]

_encode = msgspec.json.Encoder().encode


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _java_names(model: type[Any]) -> dict[str, str]:
    return {field.name: _camel(field.name) for field in dataclasses.fields(model)}


# Python name -> name on the wire, for the types of the model that occur in bodies.
_MODEL_NAMES: Final[Mapping[type[Any], Mapping[str, str]]] = {
    MessageQueue: {"broker_name": "brokerName", "queue_id": "queueId", "topic": "topic"},
    Subscription: {
        "topic": "topic",
        "expression": "subString",
        "expression_type": "expressionType",
        "tags": "tagsSet",
        "codes": "codeSet",
        "version": "subVersion",
        "class_filter_mode": "classFilterMode",
    },
    TopicConfig: _java_names(TopicConfig),
    SubscriptionGroupConfig: _java_names(SubscriptionGroupConfig),
    GroupRetryPolicy: _java_names(GroupRetryPolicy),
    ExponentialRetryPolicy: _java_names(ExponentialRetryPolicy),
    CustomizedRetryPolicy: _java_names(CustomizedRetryPolicy),
}


class Body(msgspec.Struct, frozen=True, rename="camel"):
    """A JSON object as the body of a command, or a part of one.

    A body with values of the model may have a static `from_wire(members)`, which converts the forms of other clients.
    """


class BodyError(MQError):
    """A body is not the JSON that its request needs; the text names the place."""


def decode_body(body_type: type[BodyType], data: bytes) -> BodyType:
    """The typed body; raises BodyError when `data` is not JSON or not of this shape."""
    decoder, reshape = _reading(cast(Any, body_type))
    if decoder is not None:
        try:
            return cast(BodyType, decoder.decode(data))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            pass  # Java's JSON, or an error: the slow way below finds out
    try:
        value = java_json.loads(data)
    except java_json.JavaJsonError as error:
        raise BodyError(f"{body_type.__name__}: {error}") from None
    try:
        return _convert(value, body_type, reshape)
    except msgspec.ValidationError:
        pass
    try:
        return _convert(_without_nulls(value), body_type, reshape)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BodyError(f"{body_type.__name__}: {error}") from None


def encode_body(body: msgspec.Struct | TopicConfig | SubscriptionGroupConfig | tuple[msgspec.Struct, ...]) -> bytes:
    """The body as standard JSON, which every peer reads."""
    return _encode(_plain(body, bare_keys=False))


def encode_java_body(body: msgspec.Struct) -> bytes:
    """The body as Java writes it, with unquoted numbers and objects as keys: for peers older than 4.9.4."""
    return _encode(_plain(body, bare_keys=True))


# --- writing


@cache
def _members(kind: Any) -> tuple[tuple[str, str], ...] | None:
    """Pairs (attribute, name on the wire) in the order of writing; None when `kind` is not an object on the wire."""
    if kind in _MODEL_NAMES:
        names = list(_MODEL_NAMES[kind].items())
    elif issubclass(kind, msgspec.Struct):
        names = list(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
    else:
        return None
    return tuple(sorted(names, key=lambda name: name[1]))


_ATOMS: Final = frozenset({str, int, float, bool, types.NoneType})


def _plain(value: Any, bare_keys: bool) -> Any:
    kind: Any = type(value)
    if kind in _ATOMS:
        return value
    if (members := _members(kind)) is not None:
        return {
            name: member if type(member) in _ATOMS else _plain(member, bare_keys)
            for attribute, name in members
            if (member := getattr(value, attribute)) is not None
        }
    if isinstance(value, dict):
        return _plain_map(value, bare_keys)
    if isinstance(value, list | tuple):
        return [_plain(item, bare_keys) for item in value]
    if isinstance(value, frozenset | set):
        return [_plain(item, bare_keys) for item in sorted(value)]
    return value


def _plain_map(value: dict[Any, Any], bare_keys: bool) -> Any:
    # All keys of a map have the type of the first.
    key_type = type(next(iter(value), ""))
    if key_type is str:
        return {key: item if type(item) in _ATOMS else _plain(item, bare_keys) for key, item in value.items()}
    if bare_keys:
        pairs = (_encode(_plain(key, True)) + b":" + _encode(_plain(item, True)) for key, item in value.items())
        return msgspec.Raw(b"{" + b",".join(pairs) + b"}")
    if key_type is MessageQueue:
        return {_encode(_plain(key, False)).decode(): _plain(item, False) for key, item in value.items()}
    return {key: _plain(item, False) for key, item in value.items()}


# --- reading


def _convert(value: Any, body_type: type[BodyType], reshape: Reshape | None) -> BodyType:
    if reshape is not None:
        value = reshape(value)
    return msgspec.convert(value, body_type, strict=False, str_keys=True)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(member) for key, member in value.items() if member is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


@cache
def _reading(body_type: Any) -> tuple[msgspec.json.Decoder[Any] | None, Reshape | None]:
    """How to read a body: a decoder for the text if it has no values of the model, else a function that reshapes it."""
    reshape = _reshape(body_type)
    return (msgspec.json.Decoder(body_type, strict=False), None) if reshape is None else (None, reshape)


@cache
def _reshape(kind: Any) -> Reshape | None:
    """A function from JSON as on the wire to JSON in the form of `kind`; None when both forms are equal.

    It leaves unexpected values unchanged: the conversion that follows reports the error and its place.
    """
    if kind is MessageQueue:
        return _message_queue
    if kind in _MODEL_NAMES:
        return _reshape_model(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _reshape(arguments[0])
    if origin in (Union, types.UnionType):
        return next((found for item in arguments if (found := _reshape(item)) is not None), None)
    if origin is dict:
        return _reshape_map(*arguments)
    if origin in (list, tuple, frozenset, set):
        item = _reshape(arguments[0])
        return item and (lambda value: [item(each) for each in value] if isinstance(value, list) else value)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _reshape_struct(kind)
    return None


def _reshape_model(kind: type[Any]) -> Reshape:
    types_of = get_type_hints(kind)
    members = {wire: (name, _reshape(types_of[name])) for name, wire in _MODEL_NAMES[kind].items()}

    def reshape(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        reshaped = {}
        for key, member in value.items():
            if key in members:
                name, convert = members[key]
                reshaped[name] = member if convert is None else convert(member)
        return reshaped

    return reshape


def _reshape_map(key_type: Any, value_type: Any) -> Reshape | None:
    key: Reshape | None = _message_queue_key if key_type is MessageQueue else None
    item = _reshape(value_type)
    if key is None and item is None:
        return None
    key = key or _same
    item = item or _same
    return lambda value: (
        {key(name): item(member) for name, member in value.items()} if isinstance(value, dict) else value
    )


def _reshape_struct(kind: type[msgspec.Struct]) -> Reshape | None:
    inner = {
        field.encode_name: found
        for field in msgspec.structs.fields(kind)
        if (found := _reshape(field.type)) is not None
    }
    if not inner:
        return None
    from_wire: Reshape = getattr(kind, "from_wire", _same)
    return lambda value: (
        {name: inner[name](member) if name in inner else member for name, member in from_wire(value).items()}
        if isinstance(value, dict)
        else value
    )


def _same(value: Any) -> Any:
    return value


def _message_queue(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    try:
        return value["topic"], value["brokerName"], value["queueId"]
    except KeyError as missing:
        raise msgspec.ValidationError(f"a message queue without {missing}") from None


class _QueueKey(Body, frozen=True):
    topic: str
    broker_name: str
    queue_id: Int32


_decode_key = msgspec.json.Decoder(_QueueKey, strict=False).decode


def _message_queue_key(name: str) -> MessageQueue:
    try:
        key = _decode_key(name)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise msgspec.ValidationError(f"the key {name!r} is not a message queue") from None
    return MessageQueue(key.topic, key.broker_name, key.queue_id)
