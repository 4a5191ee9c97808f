"""Plans: what an operator is about to change, with the state it was made from. Applying one checks that state again.

A plan holds plain values, so that it can be shown, kept and sent. `drift` compares two plans of one request; a plan
that drifted is refused, and nothing is changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from downrange.client.errors import ClientError
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue
from downrange.model.text import Text, as_is, said_by

Value: TypeAlias = str | int | None


class PlanKind(StrEnum):
    """What a plan changes."""

    RESET = "reset offsets"
    SKIP = "skip what waits"
    CLONE = "clone offsets"
    QUEUE = "move one queue"
    DELETE_TOPIC = "delete topic"
    DELETE_GROUP = "delete group"
    BROKER_SETTINGS = "broker settings"
    TOPIC_SETTINGS = "topic settings"
    GROUP_SETTINGS = "group settings"


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What was asked for; which fields count depends on the kind.

    `name` is the group whose offsets move, or the topic, group or broker that changes; `settings` are under
    RocketMQ's names.
    """

    kind: PlanKind
    name: str
    topic: str | None = None
    timestamp: int | None = None
    force: bool = True
    source: str | None = None
    queue: MessageQueue | None = None
    offset: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    cluster: str | None = None
    broker: str | None = None
    remove_offsets: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that changes on one server. `before` is what applying compares; `context` is shown only."""

    server: str
    subject: str
    before: Value
    after: Value
    context: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a request would change, and the servers that could not be asked: they would be left out.

    `destroys`: messages are skipped or something is deleted, so the operator should confirm by typing `request.name`.
    """

    request: PlanRequest
    made: int
    changes: tuple[Change, ...]
    destroys: bool = False
    notes: tuple[str, ...] = ()
    failed: Mapping[str, MQError] = field(default_factory=dict)


class PlanDrifted(ClientError):
    """The state has changed since the plan was made. `differences` are sentences."""

    def __init__(self, differences: Sequence[Text]) -> None:
        self.differences = tuple(differences)
        super().__init__(f"{'; '.join(self.differences)}; nothing was changed, look again")


def drift(seen: Plan, now: Plan) -> list[Text]:
    """How the state that `now` was made from differs from the one `seen` was made from, in sentences."""
    before = {(change.server, change.subject): change for change in seen.changes}
    after = {(change.server, change.subject): change for change in now.changes}
    found: list[Text] = []
    for key, change in before.items():
        server, subject = key
        if key not in after:
            found.append(Text("{subject} of {server} is gone", subject=subject, server=server))
        elif after[key].before != change.before:
            found.append(
                Text(
                    "{subject} of {server} moved from {before} to {now} meanwhile",
                    subject=subject, server=server, before=_text(change.before), now=_text(after[key].before),
                )
            )  # fmt: skip
    found += [
        Text("{subject} of {server} is new", subject=subject, server=server)
        for server, subject in after
        if (server, subject) not in before
    ]
    found += [
        Text("{name} does not answer: {error}", name=server, error=said_by(error))
        for server, error in now.failed.items()
        if server not in seen.failed
    ]
    found += [as_is(note) for note in now.notes if note not in seen.notes]
    return found


def _text(value: Value) -> Text:
    return Text("nothing") if value is None else as_is(str(value))


def skipped(change: Change) -> int:
    """How many messages a move of offsets skips; not known, and 0, where nothing was committed."""
    return max(0, _forward(change))


def consumed_again(change: Change) -> int:
    """How many messages a move of offsets lets a group consume again."""
    return max(0, -_forward(change))


def _forward(change: Change) -> int:
    before, after = change.before, change.after
    return after - before if isinstance(before, int) and isinstance(after, int) else 0
