"""Hostile peers: `python -m tests.chaos.hostile ADDRESS SEED` sends mutated frames until SIGTERM, and prints how many.

The frames are those of genuine clients with something wrong in their fields or body, or with bytes changed anywhere.
Several connections send as fast as the broker reads. A frame counts when the broker has read it: behind a frame that
may end its connection nothing is sent until the connection has ended, and every connection is ended in order.
"""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Final

from downrange.protocol.framing import encode
from tests.support.rubbish import nearly_right, socket_to

CONNECTIONS: Final = 4
BATCH: Final = 50
DAMAGED: Final = 0.3
"""The share of batches whose last frame has changed bytes, which mostly ends the connection."""
STORM: Final = 0.05
"""The share of batches after which there is a storm of new connections."""
_END_SECONDS: Final = 5.0


def mutated(chance: random.Random) -> Iterator[tuple[list[bytes], bool]]:
    """Batches of frames without an end, and whether the last frame of each has changed bytes."""
    while True:
        frames = [encode(command, opaque) for opaque, command in enumerate(nearly_right(chance))]
        chance.shuffle(frames)
        for first in range(0, len(frames), BATCH):
            batch = frames[first : first + BATCH]
            is_damaged = chance.random() < DAMAGED
            if is_damaged:
                damaged = bytearray(batch[-1])
                for _ in range(chance.choice((1, 2, 8))):
                    damaged[chance.randrange(len(damaged))] = chance.randrange(256)
                batch[-1] = bytes(damaged)
            yield batch, is_damaged


class Attack:
    """One connection after the other. Holds always: `frames` were read by the broker, but for those of the last one."""

    def __init__(self, address: str, seed: str, over: threading.Event) -> None:
        self._address = address
        self._chance = random.Random(seed)
        self._batches = mutated(self._chance)
        self._over = over
        self.frames = 0

    def run(self) -> None:
        while not self._over.is_set():
            try:
                self._use(socket_to(self._address))
            except OSError:  # the broker ended the connection
                continue

    def _use(self, connection: socket.socket) -> None:
        """Send until a frame may have ended the connection, or a storm begins."""
        with connection:
            for batch, is_damaged in self._batches:
                self._exchange(connection, b"".join(batch))
                self.frames += len(batch)
                is_stormy = self._chance.random() < STORM
                if is_damaged or is_stormy or self._over.is_set():
                    self._until_ended(connection)
                    if is_stormy:
                        self._storm()
                    return

    def _exchange(self, connection: socket.socket, data: bytes) -> None:
        """Send, and throw away what comes, so that the broker goes on reading."""
        connection.setblocking(False)
        view = memoryview(data)
        while view and not self._over.is_set():
            readable, writable, _ = select.select([connection], [connection], [], 1.0)
            if readable and not connection.recv(1 << 20):
                raise ConnectionResetError
            if writable:
                view = view[connection.send(view) :]

    def _until_ended(self, connection: socket.socket) -> None:
        """Say that nothing follows, and read until the broker has ended the connection, too."""
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(_END_SECONDS)
        deadline = time.monotonic() + _END_SECONDS
        while connection.recv(1 << 20) and time.monotonic() < deadline:
            pass

    def _storm(self) -> None:
        for _ in range(self._chance.randrange(10)):
            socket_to(self._address).close()


def main(address: str, seed: str) -> None:
    over = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        over.set()

    signal.signal(signal.SIGTERM, stop)
    os.nice(10)  # the broker is on trial, not the scheduler
    attacks = [Attack(address, f"{seed}-{number}", over) for number in range(CONNECTIONS)]
    threads = [threading.Thread(target=attack.run) for attack in attacks]
    for thread in threads:
        thread.start()
    print("ready", flush=True)
    for thread in threads:
        thread.join()
    print(f"frames {sum(attack.frames for attack in attacks)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
