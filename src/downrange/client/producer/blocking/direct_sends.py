"""Blocking sends: the calling thread writes to the broker's socket itself, unless the event loop is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from downrange.client.producer.blocking.direct_connection import MOST_BYTES, DirectConnection
from downrange.client.producer.blocking.shared_connection import SharedConnection
from downrange.client.producer.delivery import Delivery
from downrange.client.producer.fault import Outcome
from downrange.client.producer.outgoing import SEND
from downrange.client.producer.send_result import SendResult
from downrange.client.producer.started_send import StartedSend
from downrange.client.session import Session
from downrange.model.errors import MessageError, MQError
from downrange.transport.errors import ConnectFailed

_FEW: Final = 2


class DirectSends:
    """The sends of all threads of one blocking producer, and the connections that the threads share.

    There is one shared connection for each broker, and a second one while two threads send: then neither has to wake
    the other. From three threads on, writing and reading for all of them in one go saves more than that.
    A connection is made only while the event loop has one to the same broker. Heartbeats, and so the requests of
    brokers to clients, stay with the loop's; so do signed sends, sends with hooks, and large messages.
    Holds always: a send counts as on its way until it has ended, here or on the event loop.
    Any thread may call; `forget` is also for the child of a fork.
    """

    def __init__(self, session: Session, delivery: Delivery) -> None:
        self._session = session
        self._delivery = delivery
        self._connections: dict[tuple[str, int], SharedConnection] = {}
        self._connecting: set[tuple[str, int]] = set()
        self._shared: set[str] = set()
        """Brokers that refused a second connection: they are not asked again."""
        self._lock = threading.Lock()
        self._on_their_way = 0
        self._is_open = True
        self._is_closed = False
        self._all_done = threading.Event()
        session.silent.add(self.links)

    def __repr__(self) -> str:
        return f"<DirectSends {sorted(self._connections)} on_their_way={self._on_their_way}>"

    def send(self, started: StartedSend, go_on: Callable[[], SendResult]) -> SendResult:
        """Make the first attempt; after any end but a result, `go_on` does the rest on the event loop."""
        with self._lock:
            is_open = self._is_open
            self._on_their_way += 1
        try:
            result = self._attempt(started) if is_open else None
            return go_on() if result is None else result
        finally:
            with self._lock:
                self._on_their_way -= 1
                if not self._on_their_way and not self._is_open:
                    self._all_done.set()
                    if self._is_closed:
                        self.forget()

    def _attempt(self, started: StartedSend) -> SendResult | None:
        """The result, if the message was stored. How another attempt ended is noted in `started`."""
        try:
            for _ in range(2):  # the broker may have closed a connection that was not used for a long time
                connection = self._connection_to(started.target.address)
                if connection is None:
                    return None
                opaque = connection.next_opaque()
                frame, expected = self._delivery.encode(started, opaque)
                if len(frame) > MOST_BYTES:
                    return None
                reply = connection.ask(opaque, frame, SEND, started.seconds, expected)
                if isinstance(reply, SendResult):  # nearly always
                    self._delivery.learn(started.target, started.begun)
                    return reply
                if reply is not None:
                    started.ended = reply
                    return None
        except MessageError:
            raise
        except MQError as error:
            started.ended = error
        except BaseException:  # Ctrl-C
            self._delivery.learn(started.target, started.begun, Outcome.INTERRUPTED)
            raise
        return None

    # --- connections ----------------------------------------------------------------------------------------------

    def _connection_to(self, address: str | None) -> SharedConnection | None:
        """The connection to use for a broker, made if need be; None when the send must go over the event loop."""
        if address is None:
            return None
        connection = self._connections.get((address, 0))
        if connection is None or connection.is_broken:
            return self._connected(address, 0)
        if connection.is_led and self._on_their_way <= _FEW and address not in self._shared:
            other = self._connections.get((address, 1))
            if other is None or other.is_broken:
                other = self._connected(address, 1)
            if other is not None and not other.is_led:
                return other
        return connection

    def _connected(self, address: str, number: int) -> SharedConnection | None:
        if self._session.connection(address) is None:
            return None
        key = address, number
        with self._lock:
            if key in self._connecting:  # other threads need not wait for it
                return None
            self._connecting.add(key)
        try:
            seconds = self._session.config.connect_timeout_seconds
            connection = SharedConnection(DirectConnection(address, seconds, self._session.tls))
        except ConnectFailed:
            if number:
                self._shared.add(address)
            return None
        else:
            with self._lock:
                if self._is_closed:
                    connection.close()
                self._connections[key] = connection
            return connection
        finally:
            with self._lock:
                self._connecting.discard(key)

    # --- life -----------------------------------------------------------------------------------------------------

    def links(self, address: str) -> list[SharedConnection]:
        """The open connections to a broker."""
        found = (self._connections.get((address, number)) for number in range(2))
        return [connection for connection in found if connection is not None and not connection.is_broken]

    def drain(self, seconds: float) -> bool:
        """Make no further attempts here and wait for the sends on their way; whether all ended in time."""
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
            self._session.silent.remove(self.links)
            if not self._on_their_way:
                self.forget()
                return
            for connection in tuple(self._connections.values()):
                connection.abort()  # the last send closes the connections

    def forget(self) -> None:
        """Close all connections, which no thread of this process uses."""
        while self._connections:
            self._connections.popitem()[1].close()
