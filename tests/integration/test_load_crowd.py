"""The load generator's connections that are read and written together, over real sockets; the test is the broker."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from downrange.compiled import steps
from downrange.protocol.command import Command
from downrange.protocol.framing import encode
from downrange.transport.errors import ConnectFailed, ConnectionLost

if steps is None:
    pytest.skip("this needs the compiled module", allow_module_level=True)

from downrange.load.crowd import Crowd


def frame(opaque: int, body: bytes = b"") -> bytes:
    return encode(Command(0, 100_000_000 + opaque, body=body))


@contextmanager
def crowd(count: int, outstanding: int) -> Iterator[tuple[Crowd, list[socket.socket]]]:
    """And the broker's end of each connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        Crowd(f"127.0.0.1:{listener.getsockname()[1]}", count, outstanding) as opened,
    ):
        ends = [listener.accept()[0] for _ in range(count)]
        try:
            for end in ends:
                end.settimeout(10)
            yield opened, ends
        finally:
            for end in ends:
                end.close()


def received(end: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += end.recv(size - len(data))
    return data


def read(opened: Crowd) -> bytes:
    assert opened.wait(10) == [opened]
    return opened.read()


def test_each_connection_gets_as_many_frames_as_are_outstanding_then_one_for_each_reply() -> None:
    sent = [frame(number) for number in range(10)]
    size = len(sent[0])
    with crowd(3, 2) as (opened, ends):
        opened.write(memoryview(b"".join(sent[:6])))
        assert [received(end, 2 * size) for end in ends] == [b"".join(sent[at : at + 2]) for at in (0, 2, 4)]
        assert opened.wait(0) == []
        assert opened.read() == b""
        ends[1].sendall(frame(2, b"first") + frame(3, b"second"))
        assert read(opened) == frame(2, b"first") + frame(3, b"second")
        ends[2].sendall(frame(4))
        assert read(opened) == frame(4)
        opened.write(memoryview(sent[6]))
        opened.write(memoryview(sent[7] + sent[8]))
        assert received(ends[1], 2 * size) == sent[6] + sent[7]
        assert received(ends[2], size) == sent[8]


def test_replies_may_be_cut_anywhere() -> None:
    replies = b"".join(frame(number, b"x" * number) for number in range(4))
    with crowd(2, 4) as (opened, ends):
        opened.write(memoryview(frame(0) * 8))
        got = b""
        for at in range(len(replies)):
            ends[0].sendall(replies[at : at + 1])
            got += read(opened)
            assert replies.startswith(got)
        assert got == replies
        for end in ends:
            received(end, 4 * len(frame(0)))
        ends[0].sendall(frame(9))
        assert read(opened) == frame(9)
        opened.write(memoryview(frame(0) * 5))  # one for each reply, all to the connection they came from
        assert received(ends[0], 5 * len(frame(0))) == frame(0) * 5


def test_what_the_kernel_does_not_take_waits_and_arrives_whole() -> None:
    sent = [frame(number, bytes([number]) * 1_000_000) for number in range(12)]
    with crowd(2, 6) as (opened, (slow, quick)):
        opened.write(memoryview(b"".join(sent)))
        for end, frames in ((quick, sent[6:]), (slow, sent[:6])):
            wanted = b"".join(frames)
            end.setblocking(False)
            got = bytearray()
            while len(got) < len(wanted):
                try:
                    got += end.recv(1 << 20)
                except BlockingIOError:
                    assert read(opened) == b""  # it takes more now
            assert got == wanted
        slow.setblocking(True)
        slow.sendall(frame(1))
        assert read(opened) == frame(1)


def test_a_broker_that_goes_away_ends_the_load() -> None:
    with crowd(2, 1) as (opened, ends):
        ends[1].close()
        with pytest.raises(ConnectionLost, match="closed a connection in the middle of the load"):
            read(opened)
    with crowd(2, 1) as (opened, ends):
        ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        ends[0].close()
        with pytest.raises(ConnectionLost, match="reset"):
            read(opened)


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(ConnectFailed):
        Crowd(address, 2, 1)
