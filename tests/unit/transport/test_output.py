"""What a connection has yet to send, on a transport that only remembers."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from downrange.protocol.command import Buffer
from downrange.transport.errors import TransportClosed
from downrange.transport.limits import Limits, Usage
from downrange.transport.output import Output

MUCH = bytes(300_000)


class Remembering:
    """A transport, as far as an output makes use of it."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.unsent = 0
        self.is_aborted = False

    def write(self, data: Buffer) -> None:
        self.writes.append(bytes(data))

    def writelines(self, parts: list[Buffer]) -> None:
        self.writes.append(b"".join(parts))

    def is_closing(self) -> bool:
        return self.is_aborted

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.is_aborted = True


class Sending:
    """An output with its surroundings."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.usage = Usage()
        self.transport = Remembering()
        self.output = Output(asyncio.get_running_loop(), limits or Limits(), self.usage)
        self.output.open(cast(asyncio.Transport, self.transport))


async def test_what_is_queued_in_one_turn_leaves_in_one_write_in_its_order() -> None:
    sending = Sending()
    sending.output.send(b"a")
    sending.output.send_parts([b"b", memoryview(b"c")])
    sending.output.send(b"d")
    assert sending.transport.writes == []
    await asyncio.sleep(0)
    assert sending.transport.writes == [b"abcd"]
    sending.output.send(b"e")
    await asyncio.sleep(0)
    assert sending.transport.writes == [b"abcd", b"e"]


async def test_what_is_large_is_not_joined_and_arrives_whole() -> None:
    sending = Sending()
    sending.output.send_parts([b"head", MUCH])
    await asyncio.sleep(0)
    assert sending.transport.writes == [b"head" + MUCH]


async def test_replies_leave_when_they_are_written_without_a_turn_of_the_loop() -> None:
    sending = Sending()
    output = sending.output
    output.add_parts([b"a"])
    output.send(b"b")  # a request of this end may be queued meanwhile
    assert sending.transport.writes == []
    output.add_parts([MUCH])
    assert sending.transport.writes == [b"ab" + MUCH], "much is not kept"
    output.add_parts([b"c"])
    output.write(b"d")
    assert sending.transport.writes[1:] == [b"cd"]
    output.write()
    await asyncio.sleep(0)
    assert len(sending.transport.writes) == 2


async def test_a_reply_without_bytes_leaves_nothing_behind() -> None:
    sending = Sending()
    for _ in range(3):
        sending.output.add_parts([b""])
        sending.output.write()
    assert sending.output._parts == []
    assert sending.transport.writes == []


async def test_a_peer_that_leaves_too_much_unsent_is_cut_off() -> None:
    sending = Sending(Limits(max_unsent_bytes_per_connection=1000))
    sending.transport.unsent = 1000
    sending.output.pause()
    assert (sending.output.is_full, sending.usage.unsent_bytes) == (True, 1000)
    sending.output.resume()
    assert (sending.output.is_full, sending.usage.unsent_bytes) == (False, 0)
    sending.output.pause()
    sending.transport.unsent = 1001
    sending.output.send(b"more")
    await asyncio.sleep(0)
    assert sending.transport.is_aborted
    sending.output.close()
    assert sending.usage.unsent_bytes == 0


async def test_all_peers_together_may_leave_only_so_much_unsent() -> None:
    sending = Sending(Limits(max_unsent_bytes=1000))
    sending.usage.unsent_bytes = 900  # by others
    sending.transport.unsent = 101
    sending.output.pause()
    assert sending.transport.is_aborted


async def test_nothing_is_queued_for_who_is_gone() -> None:
    output = Output(asyncio.get_running_loop(), Limits(), Usage())
    with pytest.raises(TransportClosed, match="is closed"):
        output.send(b"a")
    sending = Sending()
    sending.output.send(b"a")
    sending.transport.abort()
    with pytest.raises(TransportClosed, match="is closed"):
        sending.output.send_parts([b"b"])
    await asyncio.sleep(0)
    assert sending.transport.writes == []


async def test_a_peer_that_reads_is_active() -> None:
    sending = Sending()
    assert sending.output.last_sent == 0
    sending.output.flush()
    assert sending.output.last_sent > 0
    sending.output.last_sent = 0
    sending.output.pause()
    sending.output.flush()
    assert sending.output.last_sent == 0
