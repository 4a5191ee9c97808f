"""The choice of messages of a replay, and its position. Pure except for the state file in the lake."""

from __future__ import annotations

import hashlib
from typing import Final, NamedTuple

import msgspec
from pyspark.sql import Row

from downrange.model.message import Message
from downrange.model.properties import RESERVED, SHARDING_KEY
from downrange.spark.lake.layout import REPLAY, LakeError
from downrange.spark.lake.location import Location

REPLAY_OF: Final = "REPLAY_OF"
"""The property of a replayed message with the unique key of the message in the lake."""


class Position(NamedTuple):
    """The position of a message in a replay, which sorts by store time, then by broker, queue and offset."""

    date: str
    store_micros: int
    topic: str
    broker: str
    queue_id: int
    queue_offset: int


class Choice(msgspec.Struct, frozen=True):
    """The messages to replay and their target. Times are store times in milliseconds, ends included; `where` is SQL."""

    target: str | None
    """The topic to send to; None: each message goes to its own topic."""
    topics: tuple[str, ...] = ()
    begin_millis: int | None = None
    end_millis: int | None = None
    keys: tuple[str, ...] = ()
    where: str | None = None

    @property
    def name(self) -> str:
        """A name that depends only on the choice, so that a second run finds the position of the first."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:24]


class State(msgspec.Struct, frozen=True):
    """The progress of a replay: all messages up to `position` were acknowledged."""

    choice: Choice
    sent: int = 0
    position: Position | None = None
    is_done: bool = False


def read_state(lake: Location, choice: Choice) -> State:
    path = _path(choice)
    content = lake.read_whole(path)
    try:
        return State(choice) if content is None else msgspec.json.decode(content, type=State)
    except msgspec.DecodeError as error:
        raise LakeError(f"{lake}/{path} is damaged: {error}") from None


def write_state(lake: Location, state: State) -> None:
    lake.write_whole(_path(state.choice), msgspec.json.encode(state))


def _path(choice: Choice) -> str:
    return f"{REPLAY}/{choice.name}.json"


def message_of(row: Row, target: str | None) -> Message:
    """The message to send for a row of the lake, without properties that brokers and clients added."""
    properties: dict[str, str] = dict(row["properties"] or {})
    own = {name: value for name, value in properties.items() if name not in RESERVED}
    if origin := row["unique_key"] or row["msg_id"]:
        own[REPLAY_OF] = origin
    return Message(
        target or row["topic"],
        bytes(row["body"] or b""),
        row["tags"] or None,
        row["keys"] or None,
        properties=own,
        sharding_key=properties.get(SHARDING_KEY),
    )
