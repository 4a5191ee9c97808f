"""A producer of transactions that dies again and again: `transaction_sender.py NAMESRV DIRECTORY SEED`.

Each life is a process that is forked from one that stays, and that kills itself at some step of some transaction, as if
by `kill -9`. What must survive it lies in DIRECTORY: `acknowledged` has the id of every half message a broker took, and
`decisions/ID` is a link to nowhere whose target is the decision. A link is made whole or not at all, and only once, so
it is the commit point of the local transaction. When a file `enough` appears, nothing more is sent or killed, and the
last life goes on to answer checks.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from pathlib import Path
from typing import Final

from downrange import AsyncTransactionProducer, HalfSent, LocalTransactionState, Message, MQError
from downrange.client.config import ClientConfig, split_addresses
from downrange.client.consumer.messages import ReceivedMessage
from downrange.transport.loop import run

TOPIC: Final = "orders"
WORKERS: Final = 8
DEATH_PER_STEP: Final = 0.003
STATES: Final = {"commit": LocalTransactionState.COMMIT, "rollback": LocalTransactionState.ROLLBACK}


class Journal:
    """What all lives share."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        (directory / "decisions").mkdir(parents=True, exist_ok=True)
        self._acknowledged = os.open(directory / "acknowledged", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def acknowledge(self, key: str) -> None:
        os.write(self._acknowledged, f"{key}\n".encode())

    def acknowledged(self) -> list[str]:
        return (self._directory / "acknowledged").read_text().splitlines()

    def decide(self, key: str, outcome: str) -> str:
        """Decide, unless that was done before; the decision."""
        try:
            os.symlink(outcome, self._directory / "decisions" / key)
        except FileExistsError:
            return os.readlink(self._directory / "decisions" / key)
        return outcome

    def decision(self, key: str) -> str | None:
        try:
            return os.readlink(self._directory / "decisions" / key)
        except FileNotFoundError:
            return None

    @property
    def is_enough(self) -> bool:
        return (self._directory / "enough").exists()


class Life:
    """One process."""

    def __init__(self, journal: Journal, chance: random.Random) -> None:
        self._journal = journal
        self._chance = chance
        self._keys = (f"{os.getpid()}-{number}" for number in range(1 << 30))

    async def live(self, namesrv: str) -> None:
        config = ClientConfig(split_addresses(namesrv), heartbeat_seconds=0.3, route_seconds=1.0)
        async with AsyncTransactionProducer("payers", config, check=self._check, topics=[TOPIC]) as producer:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(WORKERS):
                    tasks.create_task(self._work(producer))
            await asyncio.Event().wait()

    async def _work(self, producer: AsyncTransactionProducer) -> None:
        while not self._journal.is_enough:
            key = next(self._keys)

            async def execute(half: HalfSent, key: str = key) -> LocalTransactionState | None:
                self._journal.acknowledge(key)
                self._maybe_die()
                if self._chance.random() < 0.1:
                    return None
                outcome = self._journal.decide(key, self._chance.choice(["commit", "rollback"]))
                self._maybe_die()
                return STATES[outcome]

            message = Message(TOPIC, key.encode(), keys=key)
            try:
                await producer.send_in_transaction(
                    message, execute, check_immunity_seconds=self._chance.choice([None, None, 1])
                )
            except MQError:
                await asyncio.sleep(0.02)  # the broker is dead
            self._maybe_die()

    async def _check(self, message: ReceivedMessage) -> LocalTransactionState | None:
        self._maybe_die()
        if self._chance.random() < 0.1:
            return None
        # Undecided means that nobody will decide any more, or that this decision comes first and counts.
        return STATES[self._journal.decide(message.keys[0], "rollback")]

    def _maybe_die(self) -> None:
        if self._chance.random() < DEATH_PER_STEP and not self._journal.is_enough:
            os.kill(os.getpid(), signal.SIGKILL)


def main(namesrv: str, directory: str, seed: str) -> None:
    journal = Journal(Path(directory))
    lives = 0
    child = 0

    def stop(number: int, frame: object) -> None:
        if child:
            os.kill(child, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    while True:
        lives += 1
        print(f"life {lives}", flush=True)
        child = os.fork()
        if not child:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            run(Life(journal, random.Random(f"{seed}-{lives}")).live(namesrv))
            os._exit(1)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            sys.exit("a life ended by itself")


if __name__ == "__main__":
    main(*sys.argv[1:])
