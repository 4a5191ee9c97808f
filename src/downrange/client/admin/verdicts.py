"""Why a group has not consumed a message, or that it has: decided from evidence alone, in a fixed order.

A message that a group gave up or retries was committed by the group, too. Hence dead letters and retries are looked for
before the committed offset is compared. [MessageTrack of mqadmin lacks both]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from downrange.client.trace_reader import TracedDelivery
from downrange.model.message import MessageQueue
from downrange.model.subscription import Subscription
from downrange.model.text import Text, as_is, joined, plural

STUCK_MILLIS: Final = 60_000
"""A member that has had no message of a queue for so long, while some wait, is stuck."""


class VerdictKind(StrEnum):
    """What became of a message in one group."""

    NOT_VISIBLE = "not visible yet"
    FILTERED = "filtered out"
    GIVEN_UP = "given up"
    RETRIED = "being retried"
    CONSUMED = "consumed"
    NOBODY = "nobody there"
    STUCK = "stuck"
    WAITING = "waiting"
    UNKNOWN = "unknown"


class Hidden(StrEnum):
    """Why no consumer can see a message."""

    DELAYED = "delayed"
    HALF = "half message"
    ROLLED_BACK = "rolled back"


@dataclass(frozen=True, slots=True)
class NotVisible:
    """A message in a waiting room: until when, or how often its producer was asked."""

    why: Hidden
    due: int | None = None
    checks: int = 0


@dataclass(frozen=True, slots=True)
class Retry:
    """The last copy of a message for its group: number of the retry, when it is due, whether it was committed since."""

    times: int
    stored: int
    due: int | None = None
    is_committed: bool = False


@dataclass(frozen=True, slots=True)
class Member:
    """The member that has the queue of a message, and since when it has had no message of the queue.

    That is the time of its last message, of its start or of the arrival of this message, whichever is latest.
    """

    client_id: str
    idle_since: int


@dataclass(frozen=True, slots=True)
class GroupEvidence:
    """Everything that is known about one message and one group. None stands for "not known" unless said otherwise."""

    group: str
    queue: MessageQueue
    queue_offset: int
    now: int
    members: int | None = None
    is_broadcasting: bool = False
    subscription: Subscription | None = None
    """Of the running members to the topic; None: they do not subscribe to it, or nobody runs."""
    matches: bool = True
    """Whether the subscription matches the message."""
    dead_since: int | None = None
    """When the group gave the message up; None: it did not."""
    retry: Retry | None = None
    """None: there is no copy of the message for the group."""
    committed: int | None = None
    """Where the group goes on in the queue of the message."""
    owner: Member | None = None
    """None: no member has the queue, or `owner_is_known` is False."""
    owner_is_known: bool = False
    messages_per_second: float = 0.0
    """How fast the group consumes this queue."""
    deliveries: tuple[TracedDelivery, ...] = ()
    unanswered: Mapping[str, str] = field(default_factory=dict)
    """Brokers that did not answer, and why."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of the message in one group, why that is known, and what an operator may do next.

    `at` is the time that belongs to the verdict: due, given up, consumed. `ahead` are the messages before it.
    """

    group: str
    kind: VerdictKind
    reason: Text
    action: Text = Text("")
    at: int | None = None
    ahead: int | None = None
    seconds: float | None = None
    member: str | None = None


def verdict(evidence: GroupEvidence, hidden: NotVisible | None = None) -> Verdict:
    """The first verdict that the evidence supports, in the order of `_IN_ORDER`."""
    if hidden is not None:
        return _not_visible(evidence.group, hidden)
    for look in _IN_ORDER:
        found = look(evidence)
        if found is not None:
            return found
    raise AssertionError("waiting or unknown always fits")


def _not_visible(group: str, hidden: NotVisible) -> Verdict:
    kind = VerdictKind.NOT_VISIBLE
    match hidden.why:
        case Hidden.DELAYED:
            return Verdict(
                group, kind, Text("it is delayed and not due yet"), Text("wait until it is due"), at=hidden.due
            )
        case Hidden.HALF:
            return Verdict(
                group,
                kind,
                plural(
                    hidden.checks,
                    "its transaction is open; its producer was asked {count} time",
                    "its transaction is open; its producer was asked {count} times",
                ),
                Text("look at the producer: it has to commit or to roll back"),
            )
        case Hidden.ROLLED_BACK:
            return Verdict(group, kind, Text("its transaction was rolled back: no consumer will see it"))


def _filtered(known: GroupEvidence) -> Verdict | None:
    if not known.members:
        return None
    topic = known.queue.topic
    if known.subscription is None:
        reason = Text("its running members do not subscribe to {topic}", topic=topic)
        return Verdict(known.group, VerdictKind.FILTERED, reason, Text("let them subscribe to {topic}", topic=topic))
    if known.matches:
        return None
    kind = Text("tag") if known.subscription.is_tag_type else known.subscription.expression_type
    reason = Text(
        "it subscribes to {topic} with {kind} '{expression}', which does not match",
        topic=topic,
        kind=kind,
        expression=known.subscription.expression,
    )
    return Verdict(
        known.group, VerdictKind.FILTERED, reason, Text("change the subscription, or send to a topic it reads")
    )


def _given_up(known: GroupEvidence) -> Verdict | None:
    if known.dead_since is None or (known.retry is not None and known.retry.stored > known.dead_since):
        return None  # a copy that is younger than the dead letter: it was sent again
    action = Text("{command}, when the cause is mended", command=f"downrange dlq resend {known.group}")
    return Verdict(
        known.group, VerdictKind.GIVEN_UP, Text("it is a dead letter of the group"), action, at=known.dead_since
    )


def _retried(known: GroupEvidence) -> Verdict | None:
    if known.retry is None or known.retry.is_committed:
        return None
    if known.retry.due is None:
        reason = Text("retry {times} lies in the retry topic and was not consumed yet", times=known.retry.times)
    else:
        reason = Text("retry {times} waits until it is due", times=known.retry.times)
    return Verdict(known.group, VerdictKind.RETRIED, reason, Text("look at the log of the members"), at=known.retry.due)


def _consumed(known: GroupEvidence) -> Verdict | None:
    done = [one for one in known.deliveries if one.success]
    if done:
        last = done[-1]
        reason = Text(
            "by {client_host} in {cost_millis} ms, says its trace",
            client_host=last.client_host,
            cost_millis=last.cost_millis,
        )
        return Verdict(known.group, VerdictKind.CONSUMED, reason, at=last.timestamp + (last.cost_millis or 0))
    if known.is_broadcasting or known.unanswered:  # a broker that is silent may have the dead letter or a retry
        return None
    if known.retry is not None and known.retry.is_committed:
        return Verdict(
            known.group, VerdictKind.CONSUMED, plural(known.retry.times, "after {count} retry", "after {count} retries")
        )
    if known.committed is None or known.committed <= known.queue_offset:
        return None
    reason = Text("the group has committed up to {committed}, beyond it", committed=known.committed)
    if not known.members:
        beside = Text("or its filter left it out, which is not known while nobody runs")
        reason = joined("; ", (reason, beside))
    return Verdict(known.group, VerdictKind.CONSUMED, reason)


def _unanswered(known: GroupEvidence) -> Verdict | None:
    if known.unanswered:
        silent = [
            Text("{name} did not answer: {error}", name=name, error=error) for name, error in known.unanswered.items()
        ]
        return Verdict(known.group, VerdictKind.UNKNOWN, joined("; ", silent), Text("ask again when it answers"))
    if known.is_broadcasting:
        reason = Text("its members broadcast: each keeps its offsets to itself")
        return Verdict(known.group, VerdictKind.UNKNOWN, reason, Text("look at the members"))
    return None


def _nobody(known: GroupEvidence) -> Verdict | None:
    if known.members != 0:
        return None
    ahead = _ahead(known)
    return Verdict(known.group, VerdictKind.NOBODY, Text("no member of the group runs"), Text("start one"), ahead=ahead)


def _stuck(known: GroupEvidence) -> Verdict | None:
    if not known.owner_is_known:
        return None
    ahead = _ahead(known)
    if known.owner is None:
        reason = Text(
            "queue {queue_id} of {broker_name} has no member",
            queue_id=known.queue.queue_id,
            broker_name=known.queue.broker_name,
        )
        return Verdict(known.group, VerdictKind.STUCK, reason, Text("start more members, or restart them"), ahead=ahead)
    idle = known.now - known.owner.idle_since
    if idle < STUCK_MILLIS:
        return None
    reason = Text(
        "{client_id} has had no message of its queue for {seconds} s",
        client_id=known.owner.client_id,
        seconds=idle // 1000,
    )
    action = as_is(f"downrange group status {known.group} --client {known.owner.client_id} --stack")
    return Verdict(
        known.group, VerdictKind.STUCK, reason, action, known.owner.idle_since, ahead, None,
        known.owner.client_id,
    )  # fmt: skip


def _waiting(known: GroupEvidence) -> Verdict:
    ahead = _ahead(known)
    owner = known.owner.client_id if known.owner is not None else None
    if ahead is None:
        reason = Text("the group has committed nothing of this queue yet")
        return Verdict(known.group, VerdictKind.WAITING, reason, member=owner)
    speed = known.messages_per_second
    seconds = (ahead + 1) / speed if speed > 0 else None
    reason = Text("{ahead} before it", ahead=ahead)
    if seconds is not None:
        reason = Text("{ahead} before it, about {seconds:.0f} s at the present rate", ahead=ahead, seconds=seconds)
    return Verdict(
        known.group,
        VerdictKind.WAITING,
        reason,
        ahead=ahead,
        seconds=seconds,
        member=owner,
    )


def _ahead(known: GroupEvidence) -> int | None:
    """The messages of its queue that the group has to consume before this one."""
    return None if known.committed is None else max(0, known.queue_offset - known.committed)


# "Unknown" stands behind what the evidence proves in any case, and before what needs the answer of every broker.
_IN_ORDER: Final = (_filtered, _given_up, _retried, _consumed, _unanswered, _nobody, _stuck, _waiting)
