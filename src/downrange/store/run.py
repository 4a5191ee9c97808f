"""Messages that are stored in one go, and what is needed to answer those who sent them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from downrange.compiled import steps

if TYPE_CHECKING:
    from downrange.store.queue.queues import QueueState

# One message of a run: its queue, body, properties as bytes and as text, born timestamp, flag, sysFlag, reconsume
# times. A tuple, because there are hundreds of thousands a second.
PlainMessage = tuple["QueueState", bytes, bytes, str, int, int, int, int]
# Where a message went: physical offset, size, queue offset.
Place = tuple[int, int, int]
# A send, which the store does not look at: serialize type, opaque, flag of the command, queue id, how many messages.
Sent = tuple[int, int, int, int, int]
_ONEWAY: Final = 2


class Run:
    """Messages of existing queues that are not special, in order; once they are stored, `places` has one for each.

    `_compiled/run.c` has a type with the same attributes, which makes them when somebody asks: as long as all steps are
    compiled, nobody does.
    """

    __slots__ = ("code", "messages", "places", "sends")

    def __init__(self, messages: list[PlainMessage], sends: list[Sent], code: int) -> None:
        self.messages = messages
        self.sends = sends
        """Whose messages they are, in the same order."""
        self.code = code
        """The request code that all sends have in common."""
        self.places: list[Place] = []

    def __repr__(self) -> str:
        return f"<Run messages={len(self.messages)} sends={len(self.sends)} code={self.code}>"

    def __len__(self) -> int:
        return len(self.messages)

    def __getitem__(self, number: int) -> PlainMessage:
        return self.messages[number]

    @property
    def requests(self) -> int:
        """How many sends."""
        return len(self.sends)

    @property
    def silent(self) -> list[int]:
        """Which of the sends want no answer."""
        return [number for number, sent in enumerate(self.sends) if sent[2] & _ONEWAY]

    @property
    def states(self) -> Sequence[QueueState]:
        """The queue of each message."""
        return [message[0] for message in self.messages]

    @property
    def largest(self) -> int:
        """The size of the largest record."""
        return max([place[1] for place in self.places])

    @property
    def end(self) -> int:
        """Where the last record ends in the log."""
        return self.places[-1][0] + self.places[-1][1]


def run_of(messages: list[PlainMessage], sends: list[Sent] | None = None, code: int = 0) -> Run:
    """A run of messages that did not come as frames."""
    if steps is not None:
        run = steps.run_of(messages, sends or [], code)
        if run is not None:
            return run
    return Run(messages, sends or [], code)
