"""A blocking connection to a broker that answers, is silent, goes away, or says what nobody asked for."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from downrange.client.producer.blocking.direct_connection import DirectConnection
from downrange.protocol.command import Command
from downrange.protocol.errors import RemoteProtocolError
from downrange.protocol.framing import FrameDecoder, decode_frame, encode
from downrange.transport.errors import ConnectFailed
from tests.support.lasting_port import lasting_port

REQUEST = encode(Command(310, 1, body=b"body"))
REPLY = encode(Command(0, 1, 1))


class Peer:
    """Accepts one connection and plays `script` on it; `received` is set whenever a whole request has come."""

    def __init__(self, script: Callable[[socket.socket], None]) -> None:
        self._script = script
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        peer, _ = self._listener.accept()
        with peer:
            self._script(peer)

    def close(self) -> None:
        self._thread.join(10)
        self._listener.close()


def receive(peer: socket.socket) -> None:
    """Until a whole request has come, or the client has gone."""
    decoder = FrameDecoder()
    while data := peer.recv(65536):
        if decoder.frames(data):
            return


def until_gone(peer: socket.socket) -> None:
    while peer.recv(65536):
        pass


@contextmanager
def connected(script: Callable[[socket.socket], None]) -> Iterator[DirectConnection]:
    peer = Peer(script)
    try:
        connection = DirectConnection(peer.address, 5)
        try:
            yield connection
        finally:
            connection.close()
    finally:
        peer.close()


def answering(*pieces: bytes) -> Callable[[socket.socket], None]:
    def script(peer: socket.socket) -> None:
        receive(peer)
        for piece in pieces:
            peer.sendall(piece)
        until_gone(peer)

    return script


def ask(connection: DirectConnection, seconds: float) -> Command:
    frames = connection.write_and_read(REQUEST, seconds)
    while not frames:
        frames = connection.write_and_read(b"", seconds)
    (frame,) = frames
    return decode_frame(frame)


def test_one_reply_after_the_other() -> None:
    def script(peer: socket.socket) -> None:
        for _ in range(3):
            receive(peer)
            peer.sendall(REPLY)
        until_gone(peer)

    with connected(script) as connection:
        assert 0 < connection.round_trip < 5
        for seconds in (5, 5, 4):
            assert connection.is_quiet()
            assert ask(connection, seconds) == Command(0, 1, 1)


def test_a_reply_in_pieces() -> None:
    going_on = threading.Event()

    def script(peer: socket.socket) -> None:
        receive(peer)
        peer.sendall(REPLY[:5])
        going_on.wait(30)
        peer.sendall(REPLY[5:])
        until_gone(peer)

    with connected(script) as connection:
        threading.Timer(0.02, going_on.set).start()
        assert ask(connection, 5) == Command(0, 1, 1)


def test_a_reply_longer_than_one_read() -> None:
    long = encode(Command(0, 1, 1, remark="x" * 200_000))
    with connected(answering(long)) as connection:
        assert ask(connection, 5).remark == "x" * 200_000


@pytest.mark.parametrize("pieces", [(), (REPLY[:7],)])
def test_silence_is_nothing(pieces: tuple[bytes, ...]) -> None:
    with connected(answering(*pieces)) as connection:
        assert connection.write_and_read(REQUEST, 0.05) == []


def test_a_peer_that_does_not_read() -> None:
    gone = threading.Event()

    def script(peer: socket.socket) -> None:
        gone.wait(10)

    with connected(script) as connection:
        with pytest.raises(TimeoutError, match="no more data"):
            connection.write_and_read(bytes(50_000_000), 0.05)
        gone.set()


def test_a_peer_that_goes_away_instead_of_answering() -> None:
    with connected(receive) as connection, pytest.raises(ConnectionError):
        connection.write_and_read(REQUEST, 5)


def test_what_is_no_frame() -> None:
    with connected(answering(b"\xff" * 8)) as connection, pytest.raises(RemoteProtocolError, match="frame of"):
        connection.write_and_read(REQUEST, 5)


def test_several_replies_at_once() -> None:
    with connected(answering(REPLY + REPLY + REPLY[:3], REPLY[3:])) as connection:
        frames = connection.write_and_read(REQUEST, 5)
        while len(frames) < 3:
            frames += connection.write_and_read(b"", 5)
        assert list(map(decode_frame, frames)) == [Command(0, 1, 1)] * 3


@pytest.mark.parametrize("unasked", [b"", REPLY])
def test_a_connection_that_was_closed_or_spoke_unasked_is_not_quiet(unasked: bytes) -> None:
    said = threading.Event()

    def script(peer: socket.socket) -> None:
        receive(peer)
        peer.sendall(REPLY)
        receive(peer)  # nothing more will be asked: this waits for the other end to close its half
        peer.sendall(unasked)
        said.set()

    with connected(script) as connection:
        ask(connection, 5)
        assert connection.is_quiet()
        connection._socket.shutdown(socket.SHUT_WR)
        assert said.wait(30)
        assert connection._poll.poll(5000)
        assert not connection.is_quiet()


def test_another_thread_can_end_the_waiting() -> None:
    asked = threading.Event()

    def script(peer: socket.socket) -> None:
        receive(peer)
        asked.set()
        until_gone(peer)

    with connected(script) as connection:

        def cut() -> None:
            asked.wait(30)
            connection.cut()

        cutting = threading.Thread(target=cut)
        cutting.start()
        with pytest.raises(ConnectionError):
            connection.write_and_read(REQUEST, 30)
        cutting.join()
        connection.cut()  # gone already: nothing happens


def test_nobody_there() -> None:
    with pytest.raises(ConnectFailed, match="cannot connect"):
        DirectConnection(f"127.0.0.1:{lasting_port()}", 1)
