"""Requests of several threads over one connection: whoever waits takes its turn at writing and reading for all."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from time import monotonic
from typing import Final

from downrange.client.producer.blocking.direct_connection import DirectConnection
from downrange.client.producer.send_result import SendResult
from downrange.client.producer.stored_reply import Expected, take_stored
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


class Turn:
    """One request, and the thread that waits for its reply.

    Holds always: the thread is woken once at most: for an answer, to lead, or because the request was not sent.
    """

    __slots__ = ("_answered", "_woken", "answer", "frame", "is_given_up", "is_gone", "is_woken", "leads")

    def __init__(self, frame: bytes, answered: deque[Turn]) -> None:
        """Once answered it is put into `answered`, for somebody to wake its thread."""
        self.frame = frame
        self.answer: Command | SendResult | MQError | None = None
        self.leads = False
        self.is_woken = False
        self.is_given_up = False
        self.is_gone = False
        """Its thread has left, for whatever reason."""
        self._answered = answered
        self._woken = threading.Lock()
        self._woken.acquire()

    def wait(self, seconds: float) -> None:
        self._woken.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))

    def wake(self) -> None:
        self.is_woken = True
        self._woken.release()

    # --- as who waits for a reply; see transport/outstanding.py --------------------------------------------------

    def done(self) -> bool:
        return self.answer is not None or self.is_given_up or self.is_gone

    def set_result(self, reply: Command | SendResult, /) -> None:
        self.answer = reply
        if not self.leads:
            self._answered.append(self)

    def set_exception(self, error: BaseException, /) -> None:
        assert isinstance(error, MQError), error
        self.answer = error
        if not self.leads:
            self._answered.append(self)


class Turns:
    """The requests on one connection, which any number of threads ask.

    Of the threads that wait one leads: it writes in one go what all of them asked, reads, and wakes those whose reply
    has come. What is asked meanwhile waits for its next write. When its own reply has come it makes another one the
    leader. So there is no thread but those that wait. Each that wakes wakes the next: all at once would only wait
    again, for the interpreter's lock.
    Waiting for the next write pays only when it comes soon. Over a network that is not the case: all but the leader are
    sent away at once. When a reply takes long, those that were not written yet are sent away after a while.
    Ctrl-C may take a thread away between any two steps. Those that wait for long do what it has left undone.
    Holds always: there is a leader while anybody waits, or one that has gone; only the leader uses the connection and
    `requests`. Once broken, nothing is asked any more, and the connection is closed.
    """

    def __init__(self, connection: DirectConnection) -> None:
        self.requests: dict[int, Asked] = {}
        """What was written and is not answered, by opaque."""
        self.is_broken = False
        self.next_opaque = connection.next_opaque
        self._connection = connection
        self._unsent: list[tuple[int, Asked]] = []
        self._answered: deque[Turn] = deque()
        self._lock = threading.Lock()
        self._leader: Turn | None = None
        self._is_far = connection.round_trip > _FAR_SECONDS

    def __repr__(self) -> str:
        state = "broken" if self.is_broken else "led" if self._leader is not None else "idle"
        return f"<Turns {self._connection.address} {state} asked={len(self.requests)} unsent={len(self._unsent)}>"

    @property
    def is_led(self) -> bool:
        """Whether a thread is at it: who asks now waits for it first."""
        return self._leader is not None

    def ask(
        self, opaque: int, frame: bytes, code: int, seconds: float, expected: Expected
    ) -> Command | SendResult | None:
        """The reply; None when nothing was sent. Raises ConnectionLost, RequestTimedOut."""
        until = monotonic() + seconds
        turn = Turn(frame, self._answered)
        try:
            with self._lock:
                is_first = self._leader is None
                if self.is_broken or (self._is_far and not is_first):
                    return None
                self._unsent.append((opaque, (turn, until, code, seconds, expected)))
                if is_first:
                    turn.leads = True
                    self._leader = turn
            if is_first:
                self._lead(turn, until, was_idle=True)
            else:
                if not self._wait(turn, seconds):
                    return None
                if turn.leads:
                    self._lead(turn, until, was_idle=False)
        finally:
            turn.is_gone = True
        answer = turn.answer
        if answer is None and turn.is_given_up:
            raise RequestTimedOut(f"{self._connection.address} did not answer request {code} within {seconds:.3g} s")
        if isinstance(answer, MQError):
            raise answer
        return answer

    def cut(self) -> None:
        """Let nobody wait any longer."""
        self._connection.cut()

    def close(self) -> None:
        """When nobody waits: or in the child of a fork, our copy of its parent's."""
        self.is_broken = True
        self._connection.close()

    # --- for threads that wait ------------------------------------------------------------------------------------

    def _wait(self, turn: Turn, seconds: float) -> bool:
        """Until it is woken, or gives up; False when it should not have waited, as nobody writes."""
        try:
            turn.wait(min(seconds, _PATIENCE_SECONDS))
            left = seconds - _PATIENCE_SECONDS
            if not turn.is_woken and left > 0:
                self._make_up()
                if self._withdraw(turn):
                    return False
                while left > 0 and not turn.is_woken and not turn.leads and turn.answer is None:
                    turn.wait(min(left, _LOOK_SECONDS))
                    left -= _LOOK_SECONDS
                    self._make_up()
                    if self.is_broken and not turn.is_woken and turn.answer is None:
                        # All who are known were told; its reply was in the hands of the thread that was interrupted.
                        turn.answer = ConnectionLost(f"connection to {self._connection.address} {_INTERRUPTED}")
        except BaseException:  # Ctrl-C
            with self._lock:
                turn.is_given_up = True
            if turn.leads:
                self._hand_over()
            elif turn.is_woken:
                self._wake_next()
            raise
        with self._lock:
            turn.is_given_up = not turn.is_woken and not turn.leads
        if turn.is_woken:
            self._wake_next()
        return True

    def _make_up(self) -> None:
        """For threads that were interrupted: for a leader that has gone, and whoever was to wake the next."""
        with self._lock:
            is_left_alone = self._leader is not None and self._leader.is_gone
        if is_left_alone:
            self._break(_INTERRUPTED)
        else:
            self._wake_next()

    def _withdraw(self, turn: Turn) -> bool:
        """Whether it was not written yet, and will not be."""
        with self._lock:
            before = len(self._unsent)
            if not turn.is_woken:
                self._unsent = [each for each in self._unsent if each[1][0] is not turn]
            return len(self._unsent) < before

    def _wake_next(self) -> None:
        if self._answered:
            with self._lock:
                while self._answered:
                    turn = self._answered[0]
                    is_waiting = not (turn.is_given_up or turn.is_gone or turn.is_woken)
                    if is_waiting:
                        turn.wake()
                    self._answered.popleft()  # not before: nobody else would wake it
                    if is_waiting:
                        return

    # --- for the leader -------------------------------------------------------------------------------------------

    def _lead(self, turn: Turn, until: float, *, was_idle: bool) -> None:
        connection = self._connection
        try:
            if was_idle and not connection.is_quiet():
                self._break("was lost")
                return
            while turn.answer is None:
                left = until - monotonic()
                if left <= 0:
                    turn.is_given_up = True
                    break
                self._take(connection.exchange(self._frames(), left))
                self._wake_next()
        except OSError as error:
            self._break(f"was lost: {error.strerror or error}")
        except MQError as error:
            self._break(f"was closed: {error}")
        except BaseException:  # Ctrl-C, and what was read is lost
            self._break(_INTERRUPTED)
            raise
        else:
            self._hand_over()

    def _frames(self) -> bytes:
        """What is to be written."""
        if not self._unsent:
            return b""
        with self._lock:
            unsent = self._unsent
            self.requests.update(unsent)  # first: at no time may they be nowhere
            self._unsent = []
        return b"".join([turn.frame for turn in turns_of(unsent)])

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
        """As of a connection of the event loop; there is always room here."""

    def _hand_over(self) -> None:
        with self._lock:
            for turn in turns_of(chain(self.requests.items(), self._unsent)):
                if not turn.done():
                    turn.leads = True
                    self._leader = turn
                    turn.wake()
                    return
            self._leader = None
            self.is_broken = bool(self.requests)  # which nobody waits for any more: the broker does not answer
        if self.is_broken:
            self._connection.close()

    def _break(self, how: str) -> None:
        """Tell all who wait. Those whose request was not written go another way."""
        with self._lock:
            self.is_broken = True
            self._connection.close()
            for turn in turns_of(self.requests.items()):
                if not turn.done():
                    turn.set_exception(ConnectionLost(f"connection to {self._connection.address} {how}"))
            self.requests.clear()
            self._answered.extend(turn for turn in turns_of(self._unsent) if not turn.leads and not turn.done())
            self._unsent.clear()
            self._leader = None
        self._wake_next()


def turns_of(requests: Iterable[tuple[int, Asked]]) -> Iterator[Turn]:
    for _, asked in requests:
        assert isinstance(asked[0], Turn)
        yield asked[0]
