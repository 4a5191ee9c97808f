"""Waiting for the sockets of a load: never shorter than asked for, and no longer than it takes something to come."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from downrange.load.links import Links


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def links(server: socket.socket, *, polls: bool = False) -> Links:
    return Links(f"127.0.0.1:{server.getsockname()[1]}", 1, polls=polls)


@pytest.mark.parametrize("polls", [False, True])
@pytest.mark.parametrize("seconds", [0.0001, 0.0005, 0.003, 0.12])
def test_a_wait_for_nothing_takes_as_long_as_asked_for(server: socket.socket, seconds: float, polls: bool) -> None:
    with links(server, polls=polls) as waiting:
        started = time.monotonic()
        assert waiting.wait(seconds) == []
        assert time.monotonic() - started >= seconds


@pytest.mark.parametrize("seconds", [-1.0, 0.0, 0.0001, 0.05, 30.0])
def test_what_is_there_is_told_at_once(server: socket.socket, seconds: float) -> None:
    with links(server) as waiting:
        peer, _ = server.accept()
        with peer:
            peer.sendall(b"reply")
            while not (readable := waiting.wait(seconds)):  # loopback may take a moment
                pass
            assert readable == waiting.all
            assert readable[0].read() == b"reply"
