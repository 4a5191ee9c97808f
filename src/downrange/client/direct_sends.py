"""Sends of threads that wait: straight to the broker's socket while one thread sends, through the event loop else."""

from __future__ import annotations

import threading
from collections.abc import Callable

from downrange.client.delivery import Delivery, FirstAttempt
from downrange.client.direct_connection import MOST_BYTES, DirectConnection
from downrange.client.fault import Outcome
from downrange.client.messages import Outgoing
from downrange.client.send_result import SendResult
from downrange.client.session import Session
from downrange.client.stored_reply import read_stored
from downrange.model.errors import MQError
from downrange.protocol.framing import decode_frame
from downrange.transport.errors import ConnectFailed, ConnectionLost


class DirectSends:
    """The sends of all threads of one blocking producer, and a connection of their own to each broker.

    A thread that sends alone has the connections to itself. When several send at once, the event loop serves them
    better, because it writes and reads for all in one go. A connection is made while the loop has one to the same
    broker, and is unknown to it otherwise: heartbeats, and so whatever a broker asks its clients, stay with the loop's.
    So do signed sends, those with hooks, and large ones.
    Holds always: one thread at most uses the connections; none is used again after a request that was not answered.
    Any thread may call; `forget` is for the child of a fork.
    """

    def __init__(self, session: Session, delivery: Delivery) -> None:
        self._session = session
        self._delivery = delivery
        self._connections: dict[str, DirectConnection] = {}
        self._lock = threading.Lock()
        self._on_their_way = 0
        self._is_open = True
        self._is_closed = False
        self._all_done = threading.Event()

    def __repr__(self) -> str:
        return f"<DirectSends {sorted(self._connections)} on_their_way={self._on_their_way}>"

    def send(self, ready: Outgoing, first: FirstAttempt, go_on: Callable[[], SendResult]) -> SendResult:
        """Make the first attempt if we are alone; `go_on` does the rest on the event loop, as `first` tells."""
        with self._lock:
            is_alone = not self._on_their_way and self._is_open
            self._on_their_way += 1
        try:
            if is_alone:
                result = self._attempt(ready, first)
                if result is not None:
                    return result
            return go_on()
        finally:
            with self._lock:
                self._on_their_way -= 1
                if not self._on_their_way and not self._is_open:
                    self._all_done.set()
                    if self._is_closed:
                        self.forget()

    def _attempt(self, ready: Outgoing, first: FirstAttempt) -> SendResult | None:
        """None when it takes the event loop to go on, whether or not there was an attempt."""
        connection = self._connection(first.address)
        if connection is None:
            return None
        opaque = connection.next_opaque()
        is_answered = False
        try:
            frame = self._delivery.exchange.frame(ready, first.queue, opaque)
            if len(frame) > MOST_BYTES:
                is_answered = True
                return None
            answer = connection.ask(frame, ready.code, first.seconds)
            stored = read_stored(answer)
            if stored is not None and stored.opaque == opaque:
                is_answered = True
                self._delivery.ended(first)
                return stored.result((ready.message_ids[0], ready.messages[0].topic, first.queue))
            reply = decode_frame(answer)
            if reply.opaque != opaque or not reply.is_response:
                raise ConnectionLost(f"connection to {connection.address} was closed: it answers what was not asked")
            is_answered = True
            first.ended = reply
        except MQError as error:
            first.ended = error
        except BaseException:  # Ctrl-C
            self._delivery.ended(first, Outcome.INTERRUPTED)
            raise
        finally:
            if not is_answered:
                self._drop(connection)
        return None

    # --- connections: for the thread that is alone ----------------------------------------------------------------

    def _connection(self, address: str | None) -> DirectConnection | None:
        """The connection to a broker, made if need be; None when the event loop should see what is wrong."""
        if address is None:
            return None
        connection = self._connections.get(address)
        if connection is not None:
            if connection.is_quiet():
                return connection
            self._drop(connection)
        if self._session.connection(address) is None:
            return None
        try:
            connection = DirectConnection(address, self._session.config.connect_timeout_seconds)
        except ConnectFailed:
            return None
        self._connections[address] = connection
        return connection

    def _drop(self, connection: DirectConnection) -> None:
        del self._connections[connection.address]
        connection.close()

    # --- life -----------------------------------------------------------------------------------------------------

    def drain(self, seconds: float) -> bool:
        """Begin no further attempts here and wait for the sends on their way; whether all ended in time."""
        with self._lock:
            self._is_open = False
            if not self._on_their_way:
                return True
        return self._all_done.wait(seconds)

    def close(self) -> None:
        """Close all connections, after `drain`. A send still on its way loses its connection."""
        with self._lock:
            self._is_open = False
            self._is_closed = True
            if not self._on_their_way:
                self.forget()
                return
            for connection in tuple(self._connections.values()):
                connection.cut()  # the last send closes them

    def forget(self) -> None:
        """Close all connections that nobody uses: in the child of a fork, our copies of its parent's."""
        while self._connections:
            self._connections.popitem()[1].close()
