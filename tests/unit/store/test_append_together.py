"""Messages of several queues are stored in one go: the bytes are those of storing each, and it is all or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from downrange.model.message_id import pack_host
from downrange.model.topics import SCHEDULE_TOPIC
from downrange.store.message_store import MessageStore
from downrange.store.new_message import NewMessage
from tests.support.store_files import files_of
from tests.unit.store.small_store import NOW, FailingFiles, bodies, kill, new_message, open_store, put

V6 = pack_host("2001:db8::1", 50001)


def messages() -> list[NewMessage]:
    """Of three queues, one of them that of a delay level; committed ones, large ones, hosts of both kinds."""
    return [
        new_message(b"one", properties={"UNIQ_KEY": "7F0000011A2B18B4AAC2000000000001", "TAGS": "a"}),
        new_message(b"two", queue_id=1, properties={"KEYS": "k1 k2"}, sys_flag=8, prepared_transaction_offset=77),
        new_message(b"three", topic=SCHEDULE_TOPIC, queue_id=2, properties={"DELAY": "3", "REAL_TOPIC": "x"}),
        new_message(b"four" * 50, born_host=V6, store_host=V6, sys_flag=48, reconsume_times=3, flag=-1),
        new_message(b"", queue_id=1),
    ]


def make_queues(store: MessageStore) -> None:
    for message in messages():
        store.append(first_of_its_queue(message))


def first_of_its_queue(message: NewMessage) -> NewMessage:
    return new_message(b"first", topic=message.topic, queue_id=message.queue_id)


@pytest.mark.parametrize("without", [None, SCHEDULE_TOPIC])
@pytest.mark.parametrize("ext", [False, True])
def test_the_bytes_are_those_of_storing_each(tmp_path: Path, ext: bool, without: str | None) -> None:
    chosen = [message for message in messages() if message.topic != without]
    stores = [open_store(tmp_path / name, enable_consume_queue_ext=ext) for name in ("each", "together")]
    for store in stores:
        make_queues(store)
    results = [stores[0].append(message) for message in chosen]
    places = stores[1].append_together(chosen, NOW)
    assert places == [(result.physical_offset, result.size, result.queue_offset) for result in results]
    counts = [sum(count for _, count, _ in store.queues.take_counts()) for store in stores]
    assert counts == [0, len(chosen)]
    for store in stores:
        store.close()
    assert files_of(tmp_path / "each") == files_of(tmp_path / "together")


def test_they_lie_in_one_file(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, bytes(3500))
        places = store.append_together([new_message(b"a" * 300), new_message(b"b" * 300)], NOW)
        assert places == [(4096, 400, 1), (4496, 400, 2)]
        assert bodies(store)[1:] == [b"a" * 300, b"b" * 300]


@pytest.mark.parametrize("state", ["full disk", "no new file", "larger than a file", "closed"])
def test_what_cannot_be_stored_leaves_nothing_behind(tmp_path: Path, state: str) -> None:
    files = FailingFiles()
    store = open_store(tmp_path, files=files)
    put(store, bytes(3000))
    end = store.max_offset
    chosen = [new_message(b"a" * 900), new_message(b"b" * 900)]
    match state:
        case "full disk":
            store.set_disk_full(True)
        case "no new file":
            files.fail["create"] = 28
        case "larger than a file":
            chosen *= 3
        case "closed":
            store.close()
    assert store.append_together(chosen, NOW) is None
    if state == "closed":
        return
    assert (store.max_offset, len(bodies(store))) == (end, 1)
    store.set_disk_full(False)
    files.fail.clear()
    places = store.append_together(chosen[:2], NOW)
    assert places is not None
    assert [queue_offset for _, _, queue_offset in places] == [1, 2]
    store.close()


def test_a_killed_process_finds_all_of_it_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    make_queues(store)
    assert store.append_together(messages(), NOW) is not None
    kill(store)
    with open_store(tmp_path) as again:
        assert bodies(again) == [b"first", b"first", b"one", b"four" * 50]
        assert bodies(again, queue_id=1) == [b"first", b"first", b"two", b""]


@pytest.mark.parametrize(
    ("changes", "is_taken"),
    [
        ({}, True),
        ({"sys_flag": 8}, True),
        ({"sys_flag": 4}, False),
        ({"sys_flag": 12}, False),
        ({"queue_id": 9}, False),
        ({"topic": "unknown"}, False),
        ({"body": bytes(4000)}, False),
    ],
)
def test_only_what_needs_no_further_look_is_taken(tmp_path: Path, changes: dict[str, Any], is_taken: bool) -> None:
    with open_store(tmp_path) as store:
        put(store, b"first")
        assert store.takes_together(new_message(**changes)) is is_taken
