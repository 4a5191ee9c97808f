"""A process that dies loses nothing it acknowledged, whatever it was doing, in either flush mode."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from downrange.model.message import StoredMessage
from downrange.model.record import decode_records
from downrange.store.check.directory import StoreDirectory, StoreState
from downrange.store.config import FlushDiskType
from downrange.store.message_store import MessageStore
from tests.support.checked_store import REPOSITORY, assert_clean
from tests.support.store_writer import MOST_PER_APPEND, TOPICS, config_of, message_of, number_of

BOTH = [FlushDiskType.ASYNC_FLUSH, FlushDiskType.SYNC_FLUSH]


def write_until_killed(root: Path, flush: FlushDiskType, first: int, chance: random.Random) -> list[int]:
    """Run a writer, kill it at some moment after some acknowledgements; return the ids it acknowledged."""
    command = [sys.executable, "-m", "tests.support.store_writer", str(root), flush.value, str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=REPOSITORY) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        output = b""
        wanted = chance.randint(1, 300)
        while output.count(b"\n") < wanted:
            part = os.read(process.stdout.fileno(), 65536)
            assert part, process.stderr.read().decode()
            output += part
        # Not to wait for something: any moment will do, and this makes it another one each time.
        time.sleep(chance.random() * 0.004)
        process.kill()
        output += process.stdout.read()
    return [int(line) for line in output.splitlines(keepends=True) if line.endswith(b"\n")]


def served(store: MessageStore) -> dict[int, StoredMessage]:
    """Every message of every queue, by id; fails when one comes twice or its queue has a hole."""
    found: dict[int, StoredMessage] = {}
    for state in store.queues:
        offset = 0
        while offset < state.queue.max_offset:
            result = store.read(state.topic, state.queue_id, offset, 32)
            for part in result.slices:
                for message in decode_records(part):
                    assert message.queue_offset == offset
                    number = number_of(message.body)
                    assert number not in found
                    found[number] = message
                    offset += 1
            assert offset == result.next_begin_offset
    return found


def survive(root: Path, flush: FlushDiskType, rounds: int, seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    acknowledged: set[int] = set()
    first = 0
    for _ in range(rounds):
        new = write_until_killed(root, flush, first, chance)
        acknowledged.update(new)
        assert StoreDirectory(root).state is StoreState.CRASHED
        with MessageStore.open(config_of(root, flush), disk_use=lambda path: 0.1) as store:
            found = served(store)
            for number, message in found.items():
                right = message_of(number)
                assert (message.topic, message.queue_id) == (right.topic, right.queue_id)
                assert message.body == right.body
                assert message.properties_text.encode() == right.properties
            assert acknowledged <= found.keys()
            assert found.keys() >= {*range(max(found))}, "what was stored after a message is there, and the message not"
            assert max(found) < max(acknowledged) + 1 + MOST_PER_APPEND
            for number in new[-5:]:
                right = message_of(number)
                hits = store.query(right.topic, f"U{number}", 8, 0, 1 << 62).slices
                assert number in [number_of(message.body) for part in hits for message in decode_records(part)]
            acknowledged.update(found)  # what was there once must stay
        assert_clean(root)
        first = max(found) + 1
    assert {message_of(number).topic for number in acknowledged} == set(TOPICS)


@pytest.mark.parametrize("flush", BOTH)
def test_a_killed_process_loses_nothing_it_acknowledged(flush: FlushDiskType, tmp_path: Path) -> None:
    survive(tmp_path, flush, rounds=20, seed=random.randrange(1 << 32))


@pytest.mark.slow
@pytest.mark.parametrize("flush", BOTH)
def test_many_kills_lose_nothing(flush: FlushDiskType, tmp_path: Path) -> None:
    survive(tmp_path, flush, rounds=150, seed=random.randrange(1 << 32))
