"""Which messages of a topic a consumer group wants: a tag expression or an SQL92 expression."""

from __future__ import annotations

from dataclasses import dataclass, field

from downrange.model.hashing import java_hash

SUB_ALL = "*"
TAG = "TAG"
SQL92 = "SQL92"


@dataclass(frozen=True, slots=True)
class Subscription:
    """One topic of a group's subscription: the broker compares the tag hashes, the client the texts of the tags."""

    topic: str
    expression: str = SUB_ALL
    expression_type: str = TAG
    tags: frozenset[str] = field(default_factory=frozenset)
    codes: frozenset[int] = field(default_factory=frozenset)
    version: int = 0
    class_filter_mode: bool = False

    @property
    def is_tag_type(self) -> bool:
        return not self.expression_type or self.expression_type == TAG


def parse_tags(expression: str | None) -> frozenset[str]:
    """`A || B` gives {A, B}; None, a text without tags or `*` gives the empty set."""
    if not expression or expression == SUB_ALL:
        return frozenset()
    return frozenset(part for piece in expression.split("||") if (part := piece.strip()))


def subscribe(topic: str, expression: str | None, expression_type: str = TAG, version: int = 0) -> Subscription:
    """The subscription a client announces for `expression`."""
    tags = parse_tags(expression) if expression_type == TAG else frozenset()
    return Subscription(
        topic=topic,
        expression=expression or SUB_ALL,
        expression_type=expression_type,
        tags=tags,
        codes=frozenset(java_hash(tag) for tag in tags),
        version=version,
    )
