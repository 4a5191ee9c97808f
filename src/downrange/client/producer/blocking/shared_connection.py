"""One connection that several threads share: one of the threads that wait writes and reads for all of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from time import monotonic
from typing import Final

from downrange.client.background_loop import WaitingThread
from downrange.client.producer.blocking.direct_connection import DirectConnection
from downrange.client.producer.send_result import Expected, SendResult
from downrange.client.producer.stored_reply import take_stored
from downrange.model.errors import MQError
from downrange.protocol.command import Command
from downrange.protocol.errors import RemoteProtocolError
from downrange.protocol.framing import Frame, decode_frame
from downrange.transport.errors import ConnectionLost, RequestTimedOut
from downrange.transport.outstanding import Asked

_FAR_SECONDS: Final = 0.000_2
_PATIENCE_SECONDS: Final = 0.003
_LOOK_SECONDS: Final = 0.1
_INTERRUPTED: Final = "was closed: the thread that read from it was interrupted"


class SharedRequest(WaitingThread[Command | SendResult]):
    """One request over a shared connection, and the thread that waits for its reply.

    Holds always: the thread is woken for an answer, to lead, or because the request was not sent.
    """

    __slots__ = ("_answered", "frame", "is_given_up", "is_gone", "leads")

    def __init__(self, frame: bytes, answered: deque[SharedRequest]) -> None:
        """Once answered it is put into `answered`, for another thread to wake its own."""
        super().__init__()
        self.frame = frame
        self.leads = False
        self.is_given_up = False
        self.is_gone = False
        """Its thread has left, for whatever reason."""
        self._answered = answered

    def done(self) -> bool:
        return self.is_answered or self.is_given_up or self.is_gone

    def set_result(self, reply: Command | SendResult, /) -> None:
        self.result = reply
        self.is_answered = True
        if not self.leads:
            self._answered.append(self)

    def set_exception(self, error: BaseException, /) -> None:
        assert isinstance(error, MQError), error
        self.error = error
        self.is_answered = True
        if not self.leads:
            self._answered.append(self)


class SharedConnection:
    """The requests of any number of threads over one connection.

    One of the threads that wait leads: it writes all requests that are there in one go, reads, and wakes the threads
    whose replies have come. A request that comes meanwhile waits for the leader's next write. When the leader has its
    own reply, another waiting thread becomes the leader. A thread that is woken wakes the next one: if all were woken
    at once, they would only wait again, for the interpreter's lock.
    Waiting for the next write pays only when it comes soon. Over a network it does not, so there `ask` refuses all
    threads but the leader. When a reply takes long, requests that were not written are withdrawn after a while.
    Ctrl-C may end a thread between any two steps. Threads that wait for long then do the steps that are missing.
    Holds always: while a thread waits there is a leader, or one whose thread has gone; only the leader uses the
    connection and `requests`. Once broken, the connection is closed and `ask` refuses.
    """

    def __init__(self, connection: DirectConnection) -> None:
        self.requests: dict[int, Asked] = {}
        """The requests that were written and are not answered, by opaque."""
        self.is_broken = False
        self.next_opaque = connection.next_opaque
        self._connection = connection
        self._unsent: list[tuple[int, Asked]] = []
        self._answered: deque[SharedRequest] = deque()
        self._lock = threading.Lock()
        self._leader: SharedRequest | None = None
        self._is_far = connection.round_trip > _FAR_SECONDS

    def __repr__(self) -> str:
        state = "broken" if self.is_broken else "led" if self._leader is not None else "idle"
        waiting = f"asked={len(self.requests)} unsent={len(self._unsent)}"
        return f"<SharedConnection {self._connection.address} {state} {waiting}>"

    @property
    def is_led(self) -> bool:
        """Whether a thread uses the connection: a request made now waits for its next write."""
        return self._leader is not None

    def ask(
        self, opaque: int, frame: bytes, code: int, seconds: float, expected: Expected
    ) -> Command | SendResult | None:
        """The reply; None when the request was not sent. Raises ConnectionLost, RequestTimedOut."""
        until = monotonic() + seconds
        request = SharedRequest(frame, self._answered)
        try:
            with self._lock:
                is_first = self._leader is None
                if self.is_broken or (self._is_far and not is_first):
                    return None
                self._unsent.append((opaque, (request, until, code, seconds, expected)))
                if is_first:
                    request.leads = True
                    self._leader = request
            if is_first:
                self._lead(request, until, was_idle=True)
            else:
                if not self._wait(request, seconds):
                    return None
                if request.leads:
                    self._lead(request, until, was_idle=False)
        finally:
            request.is_gone = True
        if request.is_answered:
            return request.answer()
        if request.is_given_up:
            raise RequestTimedOut(f"{self._connection.address} did not answer request {code} within {seconds:.3g} s")
        return None

    def abort(self) -> None:
        """Make the leader lose its connection, and so all threads that wait for replies."""
        self._connection.cut()

    def close(self) -> None:
        """Close the connection. Only while no thread waits, or in the child of a fork, where it is a copy."""
        self.is_broken = True
        self._connection.close()

    # --- for threads that wait ------------------------------------------------------------------------------------

    def _wait(self, request: SharedRequest, seconds: float) -> bool:
        """Wait until woken, or until the time is up; False when the request was withdrawn before it was written."""
        try:
            request.wait(min(seconds, _PATIENCE_SECONDS))
            left = seconds - _PATIENCE_SECONDS
            if not request.is_woken and left > 0:
                self._make_up()
                if self._withdraw(request):
                    return False
                while left > 0 and not request.is_woken and not request.leads and not request.is_answered:
                    request.wait(min(left, _LOOK_SECONDS))
                    left -= _LOOK_SECONDS
                    self._make_up()
                    if self.is_broken and not request.is_woken and not request.is_answered:
                        # It is in neither list: the leader was interrupted while it had the reply in its hands.
                        request.error = ConnectionLost(f"connection to {self._connection.address} {_INTERRUPTED}")
                        request.is_answered = True
        except BaseException:  # Ctrl-C
            with self._lock:
                request.is_given_up = True
            if request.leads:
                self._hand_over()
            elif request.is_woken:
                self._wake_next()
            raise
        with self._lock:
            request.is_given_up = not request.is_woken and not request.leads
        if request.is_woken:
            self._wake_next()
        return True

    def _make_up(self) -> None:
        """Do the steps that an interrupted thread has left: as the leader, or as the one to wake the next."""
        with self._lock:
            is_left_alone = self._leader is not None and self._leader.is_gone
        if is_left_alone:
            self._break(_INTERRUPTED)
        else:
            self._wake_next()

    def _withdraw(self, request: SharedRequest) -> bool:
        """Take back a request that was not written yet; whether it was so."""
        with self._lock:
            before = len(self._unsent)
            if not request.is_woken:
                self._unsent = [each for each in self._unsent if each[1][0] is not request]
            return len(self._unsent) < before

    def _wake_next(self) -> None:
        if self._answered:
            with self._lock:
                while self._answered:
                    request = self._answered[0]
                    is_waiting = not (request.is_given_up or request.is_gone or request.is_woken)
                    if is_waiting:
                        request.wake()
                    self._answered.popleft()  # after the wake: an interrupt in between must not lose it
                    if is_waiting:
                        return

    # --- for the leader -------------------------------------------------------------------------------------------

    def _lead(self, request: SharedRequest, until: float, *, was_idle: bool) -> None:
        connection = self._connection
        try:
            if was_idle and not connection.is_quiet():
                self._break("was lost")
                return
            while not request.is_answered:
                left = until - monotonic()
                if left <= 0:
                    request.is_given_up = True
                    break
                self._take(connection.write_and_read(self._frames(), left))
                self._wake_next()
        except OSError as error:
            self._break(f"was lost: {error.strerror or error}")
        except MQError as error:
            self._break(f"was closed: {error}")
        except BaseException:  # Ctrl-C: bytes that were read may be lost
            self._break(_INTERRUPTED)
            raise
        else:
            self._hand_over()

    def _frames(self) -> bytes:
        """Take the requests that are not written yet, and return their frames."""
        if not self._unsent:
            return b""
        with self._lock:
            unsent = self._unsent
            self.requests.update(unsent)  # first: at any time they must be in one of the two
            self._unsent = []
        return b"".join([request.frame for request in requests_of(unsent)])

    def _take(self, frames: list[Frame]) -> None:
        at = take_stored(frames, 0, self)
        while at < len(frames):
            reply = decode_frame(frames[at])
            if not reply.is_response:
                raise RemoteProtocolError(f"request {reply.code} where a reply should be")
            asked = self.requests.pop(reply.opaque, None)  # None: a late answer
            if asked is not None and not asked[0].done():
                asked[0].set_result(reply)
            at = take_stored(frames, at + 1, self)

    def room_made(self, replies: int) -> None:
        """Called by `take_stored`. There is always room here."""

    def _hand_over(self) -> None:
        with self._lock:
            for request in requests_of(chain(self.requests.items(), self._unsent)):
                if not request.done():
                    request.leads = True
                    self._leader = request
                    request.wake()
                    return
            self._leader = None
            self.is_broken = bool(self.requests)  # all given up: the broker does not answer
        if self.is_broken:
            self._connection.close()

    def _break(self, how: str) -> None:
        """Fail the requests that were written; the others are told that they were not sent."""
        with self._lock:
            self.is_broken = True
            self._connection.close()
            for request in requests_of(self.requests.items()):
                if not request.done():
                    request.set_exception(ConnectionLost(f"connection to {self._connection.address} {how}"))
            self.requests.clear()
            self._answered.extend(
                request for request in requests_of(self._unsent) if not request.leads and not request.done()
            )
            self._unsent.clear()
            self._leader = None
        self._wake_next()


def requests_of(requests: Iterable[tuple[int, Asked]]) -> Iterator[SharedRequest]:
    for _, asked in requests:
        assert isinstance(asked[0], SharedRequest)
        yield asked[0]
