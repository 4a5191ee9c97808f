"""A small store that was killed, copies of it, and ways to damage them."""

from __future__ import annotations

import shutil
from pathlib import Path

from downrange.clock import ManualClock
from downrange.model.message import StoredMessage
from downrange.store.files import OsFiles
from downrange.store.message_store import MessageStore
from tests.unit.store.small_store import NOW, kill, open_store, pull_the_plug, put, read_all


class UnsyncedFiles(OsFiles):
    """The real files without waiting for the disk: no machine stops in these tests."""

    def sync(self, descriptor: int) -> None:
        pass

    def sync_directory(self, path: Path) -> None:
        pass


QUEUES = (("TopicTest", 0), ("TopicTest", 1), ("Other", 0))


class CrashedStore:
    """One store whose process died. `copy` gives a fresh one to damage; `before` is what it held."""

    def __init__(self, root: Path, scratch: Path, *, messages: int = 60, plug_pulled: bool = True) -> None:
        self.root = root
        self._scratch = scratch
        self._copies = 0
        self.plug_pulled = plug_pulled
        self.clock = ManualClock(NOW)
        store = self.reopen(root)
        for number in range(messages):
            topic, queue_id = QUEUES[number % len(QUEUES)]
            self.clock.tick(0.7)
            put(
                store,
                f"{number}:".encode() + bytes([number]) * (40 + number * 7 % 300),
                topic=topic,
                queue_id=queue_id,
                properties={"UNIQ_KEY": f"U{number}", "KEYS": f"k{number} all", "TAGS": f"Tag{number % 3}"},
            )
            if number == messages // 2:
                store.flush_commit_log()
                store.write_pending()
                store.flush_queues(thorough=True)
        store.write_pending()
        config = root / "config"
        config.mkdir()
        (config / "topics.json").write_text(
            '{\n\t"topicConfigTable":{\n\t\t"TopicTest":{"topicName":"TopicTest","readQueueNums":2,"writeQueueNums":2},'
            '\n\t\t"Other":{"topicName":"Other","readQueueNums":1,"writeQueueNums":1}\n\t}\n}'
        )
        (config / "consumerOffset.json").write_text('{\n\t"offsetTable":{\n\t\t"TopicTest@g":{0:12,1:7\n\t\t}\n\t}\n}')
        self.before = everything(store)
        self.last_record = max(message.physical_offset for message in self.before)
        self.end = store.max_offset
        (pull_the_plug if plug_pulled else kill)(store)

    def copy(self) -> Path:
        self._copies += 1
        target = self._scratch / f"copy-{self._copies}"
        shutil.copytree(self.root, target)
        return target

    def reopen(self, root: Path) -> MessageStore:
        return open_store(root, clock=self.clock, files=UnsyncedFiles())


def everything(store: MessageStore) -> list[StoredMessage]:
    """Every message that can be read, by place in the log."""
    found = [message for state in store.queues for message in read_all(store, state.topic, state.queue_id)]
    return sorted(found, key=lambda message: message.physical_offset)


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as stream:
        stream.seek(at)
        stream.write(data)


def flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(at)
        (value,) = stream.read(1)
        stream.seek(at)
        stream.write(bytes([value ^ (1 << bit)]))


def log_file(root: Path, offset: int, file_size: int = 4096) -> Path:
    return root / "commitlog" / f"{offset // file_size * file_size:020d}"
