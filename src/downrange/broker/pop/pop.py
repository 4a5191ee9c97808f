"""POP: consumers get messages for a time, and acknowledge them; nobody owns a queue.

A pop reads from the offset of the group, writes a checkpoint for each queue that gave messages to the revive topic
(`records.py`), moves the offset and answers (`receiving.py`); an acknowledgement writes a record, too
(`acknowledging.py`), and so does a change of the invisible time (`changing.py`). Records of requests that came together
are stored together. So at any moment the log and consumerOffset.json together tell which messages are held, and a
broker that was killed goes on where it was (`revival.py`). What is not acknowledged in time is copied to the retry
topic of the group, and waiting pops (`waiting.py`) are woken. Ordered pops (`orders.py`) move the offset when messages
are acknowledged, and never use a retry topic.
"""

from __future__ import annotations

from downrange.broker.pop.acknowledging import Acknowledging
from downrange.broker.pop.changing import Changing
from downrange.broker.pop.looking import Looking
from downrange.broker.pop.receiving import Receiving
from downrange.broker.pop.state import PopState


class Pop:
    """The parts of POP, for those who need several of them."""

    def __init__(self, state: PopState) -> None:
        self.state = state
        self.looking = Looking(state)
        self.receiving = Receiving(state, self.looking)
        self.acknowledging = Acknowledging(state)
        self.changing = Changing(state)

    def __repr__(self) -> str:
        return f"<Pop {self.state!r}>"
