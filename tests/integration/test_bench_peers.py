"""The peers of the benchmark as real servers: what is counted as acknowledged is there. Skipped where not installed."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.peers import nats, rabbitmq, redis
from bench.peers.clients import drive_client
from bench.peers.driver import Peer, connected_to, drive, read_until
from downrange.load import SendPlan
from downrange.load.server_process import listening_at


def entries(address: str) -> int:
    with connected_to(address) as connected:
        connected.sendall(b"XLEN bench\r\n")
        return int(read_until(connected, b"\r\n")[1:])


def stream_messages(address: str) -> int:
    with connected_to(address) as connected:
        connected.sendall(nats.Session(connected).publish(b"$JS.API.STREAM.INFO.bench", b""))
        answer = re.search(rb"\r\n(\{.*\})\r\n$", read_until(connected, b"}\r\n"), re.DOTALL)
        assert answer is not None
        return int(json.loads(answer[1])["state"]["messages"])


def queue_messages(address: str, peer: Peer = rabbitmq.PEER) -> int:
    """What is purged is counted."""
    with connected_to(address) as connected:
        session = peer.open(connected)
        assert isinstance(session, rabbitmq.Session)
        connected.sendall(rabbitmq.method(1, 50, 30, b"\0\0" + rabbitmq.short(rabbitmq.QUEUE) + b"\0"))
        return int(struct.unpack(">I", session.expect(connected, 50, 31))[0])


def quorum_queue_messages(address: str) -> int:
    return queue_messages(address, rabbitmq.QUORUM_PEER)


@pytest.mark.parametrize(
    ("peer", "held"),
    [
        pytest.param(redis.PEER, entries, id="redis"),
        pytest.param(redis.SYNCED_PEER, entries, id="redis-synced"),
        pytest.param(nats.PEER, stream_messages, id="nats"),
        pytest.param(rabbitmq.PEER, queue_messages, id="rabbitmq", marks=pytest.mark.slow),
        pytest.param(rabbitmq.QUORUM_PEER, quorum_queue_messages, id="rabbitmq-quorum", marks=pytest.mark.slow),
    ],
)
def test_a_peer_holds_exactly_what_was_counted(tmp_path: Path, peer: Peer, held: Callable[[str], int]) -> None:
    if peer.missing():
        pytest.skip(f"{peer.program} is not installed: make bench-peers")
    with peer.start(tmp_path) as running:
        peer.clear(running.address)
        by_frames = drive(peer, running, SendPlan(0.2, 0, 128, connections=2, outstanding=4))
        # What is in flight when the time is up is waited for, but not counted.
        assert held(running.address) == by_frames.messages + 8
        assert by_frames.messages > 0
        peer.clear(running.address)
        assert held(running.address) == 0
        if not peer.client.missing():
            # The first call ends before the counting begins, those of the others after its end.
            by_client = drive_client(peer.client, running, SendPlan(0.2, 0, 1024, connections=2, outstanding=4))
            assert held(running.address) == by_client.messages + 8
            assert by_client.messages > 0
    assert listening_at(running.address) is None
