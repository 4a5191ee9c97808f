"""A hostile peer: `python -m tests.chaos.hostile ADDRESS SEED` sends mutated frames until SIGTERM, and prints how many.

The frames are those of genuine clients with something wrong in their fields or body, or with bytes changed anywhere.
With `peaceful` as SEED they are what genuine clients sent: a load to compare with.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import threading
from types import FrameType
from typing import Final

from downrange.protocol.framing import encode
from tests.support.rubbish import nearly_right, right, socket_to

BATCH: Final = 50
PEACEFUL: Final = "peaceful"
DAMAGED: Final = 0.3
"""The share of frames with changed bytes, which mostly end their connection."""


def mutated(chance: random.Random) -> list[list[bytes]]:
    """Connections' worth of frames."""
    frames = [encode(command, opaque) for opaque, command in enumerate(nearly_right(chance))]
    chance.shuffle(frames)
    made: list[list[bytes]] = []
    for first in range(0, len(frames), BATCH):
        batch = frames[first : first + BATCH]
        if chance.random() < DAMAGED:
            damaged = bytearray(batch[-1])
            for _ in range(chance.choice((1, 2, 8))):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            batch[-1] = bytes(damaged)
        made.append(batch)
    return made


def genuine() -> list[list[bytes]]:
    frames = [encode(command, opaque) for opaque, command in enumerate(right())]
    return [frames[first : first + BATCH] for first in range(0, len(frames), BATCH)]


class Attack:
    def __init__(self, address: str, seed: str) -> None:
        self._address = address
        self._is_peaceful = seed == PEACEFUL
        self._chance = random.Random(seed)
        self._socket = socket_to(address)
        self.frames = 0
        self._over = threading.Event()

    def stop(self) -> None:
        self._over.set()

    def run(self) -> None:
        while not self._over.is_set():
            for batch in genuine() if self._is_peaceful else mutated(self._chance):
                if self._over.is_set():
                    return
                try:
                    self._exchange(b"".join(batch))
                    self.frames += len(batch)
                except OSError:
                    self._socket.close()
                    self._socket = socket_to(self._address)
                if not self._is_peaceful and self._chance.random() < 0.05:  # a storm of new connections
                    self._socket.close()
                    self._socket = socket_to(self._address)

    def _exchange(self, data: bytes) -> None:
        """Send, and throw away what comes, so that the broker goes on reading."""
        self._socket.setblocking(False)
        view = memoryview(data)
        while view and not self._over.is_set():
            readable, writable, _ = select.select([self._socket], [self._socket], [], 1.0)
            if readable and not self._socket.recv(1 << 20):
                raise ConnectionResetError
            if writable:
                view = view[self._socket.send(view) :]


def main(address: str, seed: str) -> None:
    attack = Attack(address, seed)

    def stop(number: int, frame: FrameType | None) -> None:
        attack.stop()

    signal.signal(signal.SIGTERM, stop)
    os.nice(10)  # the broker is on trial, not the scheduler
    print("ready", flush=True)
    try:
        attack.run()
    except (TimeoutError, ConnectionError):
        print("refused", flush=True)
    print(f"frames {attack.frames}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
