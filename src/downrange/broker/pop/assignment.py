"""How the queues of a topic are shared out among the consumers of a group by the broker (400), and by which mode.

The modes are set by request 401 and kept in config/messageRequestMode.json. [QueryAssignmentProcessor]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from downrange.broker.json_file import JsonFile, SavedTable
from downrange.model.errors import MessageError
from downrange.protocol.bodies.pop import ANY_QUEUE, MessageRequestMode, MessageRequestModes

AVERAGE: Final = "AVG"
BY_CIRCLE: Final = "AVG_BY_CIRCLE"


class RequestModes(SavedTable):
    """(topic, group) -> how the group consumes the topic, where an operator said so."""

    def __init__(self, file: JsonFile) -> None:
        super().__init__(file)
        self._table = _copied(file.load(MessageRequestModes) or MessageRequestModes())
        self.on_put: Callable[[MessageRequestMode], None] = lambda _: None
        """Called with each mode that an operator set."""

    def get(self, topic: str, group: str) -> MessageRequestMode | None:
        return self._table.get(topic, {}).get(group)

    def put(self, mode: MessageRequestMode) -> None:
        self.follow(mode)
        self.on_put(mode)

    def follow(self, mode: MessageRequestMode) -> None:
        """Take over one mode of a master."""
        self._table.setdefault(mode.topic, {})[mode.consumer_group] = mode
        self.mark_unsaved()

    def replace_all(self, table: MessageRequestModes) -> None:
        """Take over the table of a master."""
        if table != self.table():
            self._table = _copied(table)
            self.mark_unsaved()

    def table(self) -> MessageRequestModes:
        return MessageRequestModes(
            message_request_mode_map={topic: dict(groups) for topic, groups in self._table.items()}
        )


def _copied(table: MessageRequestModes) -> dict[str, dict[str, MessageRequestMode]]:
    return {topic: dict(groups) for topic, groups in table.message_request_mode_map.items()}


def shared_out(queues: int, clients: Sequence[str], client: str, strategy: str) -> list[int]:
    """The queues that a client gets when each queue goes to one client. Raises MessageError for other strategies."""
    if strategy not in (AVERAGE, BY_CIRCLE):
        raise MessageError(f"unsupported strategy {strategy!r}: expected {AVERAGE} or {BY_CIRCLE}")
    members = sorted(clients)
    if client not in members:
        return []
    at, number = members.index(client), len(members)
    if strategy == BY_CIRCLE:
        return list(range(at, queues, number))
    size, more = divmod(queues, number)
    start = at * size + min(at, more)
    return list(range(start, start + size + (at < more)))


def popped_by(queues: int, clients: Sequence[str], client: str, strategy: str, share: int) -> list[int]:
    """The queues that a client pops from; it shares them with `share` others, with all when that is 0 or less."""
    members = sorted(clients)
    if share <= 0 or share >= len(members) - 1:
        return [ANY_QUEUE]
    if client not in members:
        return []
    at = members.index(client)
    if len(members) > queues:
        return [at % queues] if queues else []
    found: list[int] = []
    for number in range(share + 1):
        found += shared_out(queues, members, members[(at + number) % len(members)], strategy)
    return sorted(set(found))
