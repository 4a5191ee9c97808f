"""Sends of threads that wait: straight to the broker's socket, without the event loop, while all goes well."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from downrange.client.producer.blocking.direct_connection import MOST_BYTES, DirectConnection
from downrange.client.producer.blocking.turns import Turns
from downrange.client.producer.delivery import Delivery
from downrange.client.producer.fault import Outcome
from downrange.client.producer.first_attempt import FirstAttempt
from downrange.client.producer.send_result import SendResult
from downrange.client.session import Session
from downrange.model.errors import MQError
from downrange.transport.errors import ConnectFailed

_FEW: Final = 2


class DirectSends:
    """The sends of all threads of one blocking producer, and connections of their own to each broker.

    They take turns at one connection. Two threads are faster with one each, as neither has to wake the other; from
    three on, what is saved by writing and reading for all is more.
    A connection is made while the event loop has one to the same broker, and is unknown to it otherwise: heartbeats,
    and so whatever a broker asks its clients, stay with the loop's. So do signed sends, those with hooks, and large
    ones.
    Holds always: what a thread sends is on its way until it has a result, here or after going on with the event loop.
    Any thread may call; `forget` is for the child of a fork.
    """

    def __init__(self, session: Session, delivery: Delivery) -> None:
        self._session = session
        self._delivery = delivery
        self._turns: dict[tuple[str, int], Turns] = {}
        self._connecting: set[tuple[str, int]] = set()
        self._shared: set[str] = set()
        """Brokers that did not take a second connection: they are not asked again."""
        self._lock = threading.Lock()
        self._on_their_way = 0
        self._is_open = True
        self._is_closed = False
        self._all_done = threading.Event()

    def __repr__(self) -> str:
        return f"<DirectSends {sorted(self._turns)} on_their_way={self._on_their_way}>"

    def send(self, first: FirstAttempt, go_on: Callable[[], SendResult]) -> SendResult:
        """Make the first attempt; `go_on` does the rest on the event loop, as `first` tells."""
        with self._lock:
            is_open = self._is_open
            self._on_their_way += 1
        try:
            if is_open:
                result = self._attempt(first)
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

    def _attempt(self, first: FirstAttempt) -> SendResult | None:
        """None when it takes the event loop to go on, whether or not there was an attempt."""
        ready, queue = first.ready, first.queue
        try:
            for _ in range(2):  # the broker may have closed a connection that was not used for some time
                turns = self._turns_with(first.address)
                if turns is None:
                    return None
                opaque = turns.next_opaque()
                frame = self._delivery.exchange.frame(ready, queue, opaque)
                if len(frame) > MOST_BYTES:
                    return None
                expected = ready.message_ids[0], ready.messages[0].topic, queue
                reply = turns.ask(opaque, frame, ready.code, first.seconds, expected)
                if isinstance(reply, SendResult):  # nearly always
                    self._delivery.ended(first)
                    return reply
                if reply is not None:
                    first.ended = reply
                    return None
        except MQError as error:
            first.ended = error
        except BaseException:  # Ctrl-C
            self._delivery.ended(first, Outcome.INTERRUPTED)
            raise
        return None

    # --- connections ----------------------------------------------------------------------------------------------

    def _turns_with(self, address: str | None) -> Turns | None:
        """The connection to use for a broker, made if need be; None when the event loop should see what is wrong."""
        if address is None:
            return None
        turns = self._turns.get((address, 0))
        if turns is None or turns.is_broken:
            return self._connected(address, 0)
        if turns.is_led and self._on_their_way <= _FEW and address not in self._shared:
            other = self._turns.get((address, 1))
            if other is None or other.is_broken:
                other = self._connected(address, 1)
            if other is not None and not other.is_led:
                return other
        return turns

    def _connected(self, address: str, number: int) -> Turns | None:
        if self._session.connection(address) is None:
            return None
        key = address, number
        with self._lock:
            if key in self._connecting:  # the others need not wait for it
                return None
            self._connecting.add(key)
        try:
            turns = Turns(DirectConnection(address, self._session.config.connect_timeout_seconds))
        except ConnectFailed:
            if number:
                self._shared.add(address)
            return None
        else:
            with self._lock:
                if self._is_closed:
                    turns.close()
                self._turns[key] = turns
            return turns
        finally:
            with self._lock:
                self._connecting.discard(key)

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
            for turns in tuple(self._turns.values()):
                turns.cut()  # the last send closes them

    def forget(self) -> None:
        """Close all connections that nobody uses: in the child of a fork, our copies of its parent's."""
        while self._turns:
            self._turns.popitem()[1].close()
