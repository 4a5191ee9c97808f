"""A broker with everything transactions need, on a small store and a clock that stands still, without sockets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from downrange.broker.clients import Client
from downrange.broker.config import BrokerConfig
from downrange.broker.services.transactions import TransactionService
from downrange.clock import ManualClock
from downrange.model.message import StoredMessage
from downrange.model.message_id import parse_offset_message_id
from downrange.protocol.bodies.send import SendMessageRequest, SendMessageResponse
from downrange.protocol.bodies.transactions import CheckTransactionStateRequest, EndTransactionRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from tests.unit.broker.wired import BROKER, FakeConnection, WiredBroker, wire
from tests.unit.store.small_store import read_all

COMMIT, ROLLBACK, UNKNOWN = 8, 12, 0
GROUP = "payers"


class Half(NamedTuple):
    """What a producer knows of its half message."""

    key: str
    state_table_offset: int
    commit_log_offset: int


class TransactionalBroker:
    """Half messages go in by `send`, their ends by `end`; `restart` is a crash unless told otherwise."""

    def __init__(self, root: Path, *, broker: Mapping[str, Any] | None = None, **store: Any) -> None:
        self._root = root
        self._store = store
        self._config: BrokerConfig = replace(BROKER, **(broker or {}))
        self.clock: ManualClock | None = None
        self.sent = 0
        self._open()

    def _open(self) -> None:
        self.parts: WiredBroker = wire(self._root, broker=self._config, clock=self.clock, **self._store)
        self.clock = self.parts.clock
        parts = self.parts
        self.half_messages = parts.half_messages
        self.service = TransactionService(
            parts.config, self.half_messages, parts.producers, parts.topics, parts.writer, parts.clock
        )

    def restart(self, *, save: bool = True) -> None:
        """Start anew on the same files; what was not saved is forgotten, as after a crash."""
        if save:
            self.parts.offsets.save()
        self.close()
        self._open()

    def close(self) -> None:
        self.parts.close()

    def handle(self, command: Command) -> Command | None:
        return self.parts.handle(command)

    def ask(self, command: Command) -> Command:
        return self.parts.ask(command)

    # --- producers ----------------------------------------------------------------------------------------------

    def try_to_send(
        self,
        body: bytes = b"pay",
        topic: str = "orders",
        queue_id: int = 1,
        born_in_seconds: int = 0,
        **properties: str,
    ) -> Command:
        self.sent += 1
        own = {"UNIQ_KEY": f"key{self.sent}", "WAIT": "true", "TRAN_MSG": "true", "PGROUP": GROUP, **properties}
        header = SendMessageRequest(
            producer_group=own["PGROUP"],
            topic=topic,
            queue_id=queue_id,
            sys_flag=4,
            flag=7,
            born_timestamp=self.parts.clock.now() + 1000 * born_in_seconds,
            properties="".join(f"{name}\x01{value}\x02" for name, value in own.items()),
        )
        return self.ask(request(RequestCode.SEND_MESSAGE_V2, header, body=body))

    def send(self, body: bytes = b"pay", **options: Any) -> Half:
        reply = self.try_to_send(body, **options)
        assert reply.code == 0, reply.remark
        stored = reply.header(SendMessageResponse)
        offset = parse_offset_message_id(stored.msg_id).physical_offset
        return Half(f"key{self.sent}", stored.queue_offset, offset)

    def end_command(self, half: Half, state: int, **changes: Any) -> Command:
        fields: dict[str, Any] = {
            "producer_group": GROUP,
            "tran_state_table_offset": half.state_table_offset,
            "commit_log_offset": half.commit_log_offset,
            "commit_or_rollback": state,
            "msg_id": half.key,
        }
        return request(RequestCode.END_TRANSACTION, EndTransactionRequest(**(fields | changes)))

    def end(self, half: Half, state: int, **changes: Any) -> Command:
        return self.ask(self.end_command(half, state, **changes))

    def producer(self, group: str = GROUP, peer: str = "10.0.0.9:50000") -> FakeConnection:
        """A producer of the group that is connected; what it is asked is kept in `told`."""
        connection = FakeConnection(peer)
        self.parts.producers.heartbeat(group, Client(connection, peer, 0, 0, self.parts.clock.now()))
        return connection

    # --- looking ------------------------------------------------------------------------------------------------

    def bodies(self, topic: str = "orders", queue_id: int = 1) -> list[bytes]:
        return [message.body for message in self.records(topic, queue_id)]

    def records(self, topic: str, queue_id: int = 0) -> list[StoredMessage]:
        return read_all(self.parts.store, topic, queue_id)

    @property
    def waiting(self) -> dict[str, int]:
        return dict(self.half_messages.waiting)

    def flush(self) -> None:
        self.parts.store.flush_commit_log()

    def offset_of(self, topic: str) -> int | None:
        return self.parts.offsets.get(topic, "CID_RMQ_SYS_TRANS", 0)

    async def check_after(self, seconds: float) -> None:
        """Let the time pass and make a round."""
        self.parts.clock.tick(seconds)
        await self.service.check()


def asked(connection: FakeConnection) -> list[Half]:
    """The half messages a producer was asked about since the last time."""
    questions = [command.header(CheckTransactionStateRequest) for command in connection.told]
    connection.told.clear()
    return [Half(each.msg_id or "", each.tran_state_table_offset, each.commit_log_offset) for each in questions]
