"""Threads that share one connection, which a script plays."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from queue import Empty, SimpleQueue
from random import Random
from typing import cast

import pytest

from downrange.client.producer.blocking import shared_connection
from downrange.client.producer.blocking.direct_connection import DirectConnection
from downrange.client.producer.blocking.shared_connection import SharedConnection, SharedRequest
from downrange.client.producer.send_result import SendResult
from downrange.model.message import MessageQueue
from downrange.protocol.bodies.send import SendMessageResponse
from downrange.protocol.codes import ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.errors import RemoteProtocolError
from downrange.protocol.framing import Frame, FrameDecoder, encode
from downrange.transport.errors import ConnectionLost, RequestTimedOut

EXPECTED = "ID", "orders", MessageQueue("orders", "broker-a", 0)
Step = list[Frame] | BaseException


def frames_of(*commands: Command) -> list[Frame]:
    return FrameDecoder().frames(b"".join(map(encode, commands)))


def stored(opaque: int) -> Command:
    return Command(310, opaque).reply(header=SendMessageResponse(msg_id="M", queue_id=0, queue_offset=opaque))


def busy(opaque: int) -> Command:
    return Command(310, opaque).reply(ResponseCode.SYSTEM_BUSY, "busy")


class Played:
    """A connection whose `write_and_read` returns or raises what the test says next; `written` is what came in each."""

    address = "broker:1"
    round_trip = 0.0

    def __init__(self) -> None:
        self.next_opaque = itertools.count(1).__next__
        self.quiet = True
        self.is_closed = False
        self.written: SimpleQueue[list[int]] = SimpleQueue()
        self.says: SimpleQueue[Step] = SimpleQueue()

    def is_quiet(self) -> bool:
        return self.quiet

    def write_and_read(self, frames: bytes, seconds: float) -> list[Frame]:
        self.written.put([command.opaque for command in FrameDecoder().feed(frames)])
        try:
            step = self.says.get(timeout=seconds)
        except Empty:
            return []
        if isinstance(step, BaseException):
            raise step
        return step

    def close(self) -> None:
        self.is_closed = True


class Asking:
    """Threads that ask, one request each."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self.connection = Played()
        self.shared = SharedConnection(cast(DirectConnection, self.connection))

    def ask(self, seconds: float = 10) -> Command | SendResult | None:
        opaque = self.shared.next_opaque()
        return self.shared.ask(opaque, encode(Command(310, opaque)), 310, seconds, EXPECTED)

    def lead(self) -> Future[Command | SendResult | None]:
        """A thread that asks first: when this returns its request is written."""
        asked = self._pool.submit(self.ask)
        assert self.connection.written.get(timeout=10)
        return asked

    def follow(self, seconds: float = 10) -> Future[Command | SendResult | None]:
        """A thread that asks while another one leads: when this returns it waits."""
        before = len(self.shared._unsent)
        asked = self._pool.submit(self.ask, seconds)
        wait_until(lambda: len(self.shared._unsent) == before + 1)
        return asked

    def say(self, *commands: Command) -> None:
        self.connection.says.put(frames_of(*commands))

    def fail(self, error: BaseException) -> None:
        self.connection.says.put(error)

    def written(self) -> list[int]:
        return self.connection.written.get(timeout=10)


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if holds():
            return
        time.sleep(0.001)
    raise AssertionError("it took too long")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture
def asking(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> Asking:
    monkeypatch.setattr(shared_connection, "_PATIENCE_SECONDS", 60)
    return Asking(pool)


def offset_of(asked: Future[Command | SendResult | None]) -> int:
    result = asked.result(10)
    assert isinstance(result, SendResult)
    return result.queue_offset


def test_a_thread_alone_reads_its_own_reply(asking: Asking) -> None:
    for opaque in (1, 2):
        asking.say(stored(opaque))
        result = asking.ask()
        assert isinstance(result, SendResult)
        assert result.queue_offset == opaque
    assert repr(asking.shared) == "<SharedConnection broker:1 idle asked=0 unsent=0>"


def test_what_is_asked_meanwhile_is_written_together_by_the_next_leader(asking: Asking) -> None:
    first = asking.lead()
    others = [asking.follow() for _ in range(3)]
    asking.say(stored(1))
    assert offset_of(first) == 1
    assert asking.written() == [2, 3, 4]
    asking.say(stored(4), stored(2), stored(3))
    assert [offset_of(each) for each in others] == [2, 3, 4]


def test_a_leader_goes_on_writing_until_its_own_reply_comes(asking: Asking) -> None:
    first = asking.lead()
    second = asking.follow()
    asking.say()  # a part of a frame, say
    assert asking.written() == [2]
    asking.say(stored(2))
    assert offset_of(second) == 2
    assert asking.written() == []
    asking.say(stored(1))
    assert offset_of(first) == 1


def test_a_leader_that_is_done_lets_another_one_read(asking: Asking) -> None:
    first = asking.lead()
    second, third = asking.follow(), asking.follow()
    asking.say()
    assert asking.written() == [2, 3]
    asking.say(stored(1))
    assert offset_of(first) == 1
    assert asking.written() == []
    asking.say(stored(3))
    assert offset_of(third) == 3
    assert asking.written() == []
    asking.say(busy(2))
    reply = second.result(10)
    assert isinstance(reply, Command)
    assert (reply.code, reply.opaque) == (ResponseCode.SYSTEM_BUSY, 2)


def test_who_waits_too_long_gives_up_alone(asking: Asking) -> None:
    first = asking.lead()
    late, other = asking.follow(0.01), asking.follow()
    with pytest.raises(RequestTimedOut, match=r"broker:1 did not answer request 310 within 0\.01 s"):
        late.result(10)
    asking.say()
    assert asking.written() == [2, 3], "it was not too late to send it when it asked"
    asking.say(stored(3), stored(2), stored(1))
    assert (offset_of(first), offset_of(other)) == (1, 3)
    assert not asking.shared.is_broken
    assert asking.shared.requests == {}


def test_a_leader_that_waits_too_long_lets_another_one_lead(asking: Asking, pool: ThreadPoolExecutor) -> None:
    first = pool.submit(asking.ask, 0.05)
    assert asking.written() == [1]
    second = asking.follow()
    with pytest.raises(RequestTimedOut):
        first.result(10)
    asking.say(stored(1), stored(2))
    assert offset_of(second) == 2
    assert not asking.shared.is_broken, "a late reply hurts nobody"


def test_when_nobody_waits_any_more_for_what_was_asked_the_connection_is_given_up(asking: Asking) -> None:
    with pytest.raises(RequestTimedOut):
        asking.ask(0.01)
    assert asking.written() == [1]
    assert asking.connection.is_closed
    assert asking.ask() is None


def test_without_time_nothing_is_sent(asking: Asking) -> None:
    with pytest.raises(RequestTimedOut):
        asking.ask(0)
    assert asking.connection.written.empty()


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ConnectionResetError(104, "Connection reset by peer"), "was lost: Connection reset by peer"),
        (RemoteProtocolError("frame of -1 bytes"), "was closed: frame of -1 bytes"),
    ],
)
def test_a_connection_that_breaks_fails_what_was_sent_and_no_more(
    asking: Asking, error: BaseException, why: str
) -> None:
    first = asking.lead()
    sent = asking.follow()
    asking.say()
    assert asking.written() == [2]
    unsent = asking.follow()
    asking.fail(error)
    for each in (first, sent):
        with pytest.raises(ConnectionLost, match=f"connection to broker:1 {why}"):
            each.result(10)
    assert unsent.result(10) is None
    assert asking.connection.is_closed
    assert asking.ask() is None, "nothing is asked any more"


def test_who_is_not_written_soon_goes_another_way(asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    first = asking.lead()
    patient = asking.follow()
    monkeypatch.setattr(shared_connection, "_PATIENCE_SECONDS", 0.001)
    assert asking.ask() is None
    asking.say()
    assert asking.written() == [2], "not the third"
    asking.say(stored(2), stored(1))
    assert (offset_of(first), offset_of(patient)) == (1, 2)


def test_who_was_written_waits_for_the_reply(asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    first = asking.lead()
    monkeypatch.setattr(shared_connection, "_PATIENCE_SECONDS", 0.5)
    second = asking.follow()
    asking.say()
    assert asking.written() == [2]
    with pytest.raises(FutureTimeoutError):
        second.result(0.6)
    asking.say(stored(2), stored(1))
    assert (offset_of(first), offset_of(second)) == (1, 2)


def test_far_away_only_the_leader_is_served(asking: Asking) -> None:
    asking.shared._is_far = True
    first = asking.lead()
    assert asking.ask() is None
    asking.say(stored(1))
    assert offset_of(first) == 1


def test_an_idle_connection_that_was_closed_costs_no_attempt(asking: Asking) -> None:
    asking.connection.quiet = False
    assert asking.ask() is None
    assert asking.connection.written.empty()
    assert asking.shared.is_broken


def test_a_broker_that_asks_is_not_listened_to(asking: Asking) -> None:
    asking.say(Command(40, 1))
    with pytest.raises(ConnectionLost, match="request 40 where a reply should be"):
        asking.ask()


def test_a_leader_that_is_interrupted_breaks_the_connection(asking: Asking) -> None:
    first = asking.lead()
    second = asking.follow()
    asking.say()
    assert asking.written() == [2]
    asking.fail(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        first.result(10)
    with pytest.raises(ConnectionLost, match="interrupted"):
        second.result(10)


class Interrupted(SharedRequest):
    """Its thread is interrupted as soon as it was woken: after the last moment to give up."""

    __slots__ = ()

    def wait(self, seconds: float = 1) -> None:
        super().wait(seconds)
        raise KeyboardInterrupt


@pytest.mark.parametrize("replies", [(2, 3, 1), (1,)], ids=["answered", "made the leader"])
def test_a_thread_that_is_interrupted_when_woken_lets_the_others_go_on(
    asking: Asking, monkeypatch: pytest.MonkeyPatch, replies: tuple[int, ...]
) -> None:
    first = asking.lead()
    with monkeypatch.context() as patch:
        patch.setattr("downrange.client.producer.blocking.shared_connection.SharedRequest", Interrupted)
        second = asking.follow()
    third = asking.follow()
    asking.say()
    assert asking.written() == [2, 3]
    asking.say(*map(stored, replies))
    assert offset_of(first) == 1
    with pytest.raises(KeyboardInterrupt):
        second.result(10)
    if 3 not in replies:
        asking.say(stored(2), stored(3))
    assert offset_of(third) == 3


@pytest.mark.parametrize("step", ["_lead", "_hand_over"])
def test_who_waits_for_a_leader_that_has_gone_breaks_the_connection(
    asking: Asking, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(SharedConnection, step, _interrupted)
    asking.say(stored(1))
    with pytest.raises(KeyboardInterrupt):
        asking.ask()
    monkeypatch.undo()
    assert asking.ask() is None
    assert asking.shared.is_broken
    assert asking.connection.is_closed
    assert not asking.shared._unsent


def test_who_was_written_by_a_leader_that_has_gone_hears_of_it(asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_connection, "_PATIENCE_SECONDS", 60.0)  # it is written before that
    first = asking.lead()
    second = asking.follow()
    monkeypatch.setattr(SharedConnection, "_hand_over", _interrupted)
    asking.say()
    assert asking.written() == [2]
    asking.say(stored(1))
    with pytest.raises(KeyboardInterrupt):
        first.result(10)
    monkeypatch.setattr(shared_connection, "_PATIENCE_SECONDS", 0.003)
    assert asking.ask() is None
    with pytest.raises(ConnectionLost, match="interrupted"):
        second.result(10)


class Slipped(SharedRequest):
    """Whoever reads its reply is interrupted before it can tell."""

    __slots__ = ()

    def set_result(self, reply: Command | SendResult, /) -> None:
        raise KeyboardInterrupt


def test_whose_reply_was_in_the_hands_of_a_leader_that_is_interrupted_hears_of_it(
    asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_connection, "_PATIENCE_SECONDS", 1.0)  # it is written before that
    first = asking.lead()
    monkeypatch.setattr(shared_connection, "SharedRequest", Slipped)
    second = asking.follow(seconds=60)
    monkeypatch.setattr(shared_connection, "SharedRequest", SharedRequest)
    asking.say()
    assert asking.written() == [2]
    asking.say(stored(2))
    with pytest.raises(KeyboardInterrupt):
        first.result(10)
    with pytest.raises(ConnectionLost, match="interrupted"):
        second.result(10)


def _interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


class Echo(Played):
    """Answers everything, sooner or later, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self._random = Random(5)
        self._unanswered: list[int] = []
        self._users = threading.Semaphore(1)

    def write_and_read(self, frames: bytes, seconds: float) -> list[Frame]:
        assert self._users.acquire(blocking=False), "one thread at a time"
        self._unanswered += [command.opaque for command in FrameDecoder().feed(frames)]
        self._random.shuffle(self._unanswered)
        time.sleep(0)  # let others ask
        some = self._random.randrange(len(self._unanswered) + 1)
        now, self._unanswered = self._unanswered[:some], self._unanswered[some:]
        self._users.release()
        return frames_of(*map(stored, now))


def test_many_threads_each_get_their_own(pool: ThreadPoolExecutor) -> None:
    shared = SharedConnection(cast(DirectConnection, Echo()))

    def ask_often(_: int) -> None:
        for _ in range(300):
            opaque = shared.next_opaque()
            result = shared.ask(opaque, encode(Command(310, opaque)), 310, 30, EXPECTED)
            if result is not None:  # it may have waited too long to be written
                assert isinstance(result, SendResult)
                assert result.queue_offset == opaque

    list(pool.map(ask_often, range(8)))
    assert repr(shared) == "<SharedConnection broker:1 idle asked=0 unsent=0>"
