"""A batch is stored in its order; each group of its messages lies in one file, or nowhere."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from downrange.model.hashing import tags_code
from downrange.model.message import QueueOffset
from downrange.model.message_id import pack_host
from downrange.model.topics import SCHEDULE_TOPIC
from downrange.store.message_store import MessageStore
from downrange.store.new_message import NewMessage, PutMessageStatus
from downrange.store.new_messages import NewMessages
from downrange.store.queue.queue_entry import ENTRY
from tests.support.store_files import files_of
from tests.support.stores import append, append_batch, append_group
from tests.unit.store.small_store import FailingFiles, bodies, kill, new_message, open_store, put

V6 = pack_host("2001:db8::1", 50001)


def several() -> list[NewMessage]:
    """Of four queues, one of them that of a delay level; some in no queue, large ones, hosts of both kinds."""
    return [
        new_message(b"one", properties={"UNIQ_KEY": "7F0000011A2B18B4AAC2000000000001", "TAGS": "a"}),
        new_message(b"two", queue_id=1, properties={"KEYS": "k1 k2"}, sys_flag=8, prepared_transaction_offset=77),
        new_message(b"three", topic=SCHEDULE_TOPIC, queue_id=2, properties={"DELAY": "3", "REAL_TOPIC": "x"}),
        new_message(b"prepared", queue_id=1, properties={"UNIQ_KEY": "P"}, sys_flag=4),
        new_message(b"rolled back", queue_id=1, properties={"UNIQ_KEY": "R"}, sys_flag=12),
        new_message(b"four" * 50, born_host=V6, store_host=V6, sys_flag=48, reconsume_times=3, flag=-1),
        new_message(b"", topic="gr\u00f6\u00dfe", properties="TAGS\x01gr\u00fcn\x02KEYS\x01sch\u00f6n".encode()),
        new_message(b"", queue_id=1),
    ]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("ext", [False, True])
def test_the_bytes_are_those_of_storing_each(tmp_path: Path, ext: bool, known: bool) -> None:
    stores = [open_store(tmp_path / name, enable_consume_queue_ext=ext) for name in ("each", "together", "as one")]
    for store in stores:
        for message in several() if known else ():
            append(store, new_message(b"first", topic=message.topic, queue_id=message.queue_id))
    results = [append(stores[0], message) for message in several()]
    assert append_batch(stores[1], [[message] for message in several()]) == (results, None)
    assert append_group(stores[2], *several()) == results
    counts = [sorted(store.queues.take_counts()) for store in stores]
    assert counts == [counts[0]] * 3
    assert sum(messages for _, messages, _ in counts[0]) == (14 if known else 6)
    for store in stores:
        store.close()
    assert files_of(tmp_path / "each") == files_of(tmp_path / "together") == files_of(tmp_path / "as one")


def test_a_batch_goes_over_the_ends_of_files_and_a_group_does_not(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        groups = [[new_message(b"%d" % n * 300, queue_id=n % 2)] * (1 + n % 4) for n in range(30)]
        results, refusal = append_batch(store, groups)
        assert refusal is None
        starts: list[int] = []
        left = iter(results)
        for group in groups:
            files = {next(left).physical_offset // 4096 for _ in group}
            assert len(files) == 1
            starts += files
        assert sorted(starts) == starts
        assert len(set(starts)) == max(starts) + 1 > 5
        for queue_id in (0, 1):
            chosen = [message.body for group in groups for message in group if message.queue_id == queue_id]
            assert bodies(store, queue_id=queue_id) == chosen
        assert max(state.queue.max_physical_offset for state in store.queues) == store.max_offset


def test_a_group_that_does_not_fit_moves_on_as_a_whole(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, bytes(3500))
        results = append_group(store, new_message(b"a" * 300), new_message(b"b" * 300))
        assert isinstance(results, list)
        places = [(one.physical_offset, one.size, one.queue_offset) for one in results]
        assert places == [(4096, 400, 1), (4496, 400, 2)]
        assert bodies(store)[1:] == [b"a" * 300, b"b" * 300]


@pytest.mark.parametrize("state", ["full disk", "no new file", "larger than a file", "closed"])
def test_what_cannot_be_stored_leaves_nothing_behind(tmp_path: Path, state: str) -> None:
    files = FailingFiles()
    store = open_store(tmp_path, files=files)
    put(store, bytes(3000))
    end = store.max_offset
    chosen = [new_message(b"a" * 900), new_message(b"b" * 900)]
    expected = PutMessageStatus.SERVICE_NOT_AVAILABLE
    match state:
        case "full disk":
            store.set_disk_full(True)
        case "no new file":
            files.fail["create"] = errno.ENOSPC
        case "larger than a file":
            chosen *= 3
            expected = PutMessageStatus.MESSAGE_ILLEGAL
        case "closed":
            store.close()
    refusal = append_group(store, *chosen)
    assert not isinstance(refusal, list)
    assert refusal.status is expected
    if state == "closed":
        return
    assert (store.max_offset, len(bodies(store))) == (end, 1)
    store.set_disk_full(False)
    files.fail.clear()
    results = append_group(store, *chosen[:2])
    assert isinstance(results, list)
    assert [one.queue_offset for one in results] == [1, 2]
    store.close()


@pytest.mark.parametrize("fail", ["create", "reserve"])
def test_of_a_batch_that_breaks_off_the_first_messages_are_there(tmp_path: Path, fail: str) -> None:
    files = FailingFiles()
    store = open_store(tmp_path, files=files)
    put(store, b"first")
    messages = NewMessages()
    for number in range(12):
        group = [new_message(b"%d" % number * 400, queue_id=queue_id) for queue_id in (0, 1)]
        assert store.add(messages, group) is None
    files.fail[fail] = errno.ENOSPC
    refusal = store.append(messages)
    assert refusal is not None
    assert refusal.status is PutMessageStatus.SERVICE_NOT_AVAILABLE
    assert "No space left" in refusal.reason
    assert len(messages) == 24
    stored = messages.stored
    assert 0 < stored < 24
    assert stored % 2 == 0
    assert messages.end_offset == messages.bounds(0, stored)[1]
    # A file that was made and could not be filled follows a blank record.
    assert store.max_offset == (messages.end_offset if fail == "create" else 4096)
    files.fail.clear()
    assert [state.next_offset for state in store.queues] == [1 + stored // 2, stored // 2]
    kill(store)
    with open_store(tmp_path) as again:
        expected = [b"%d" % number * 400 for number in range(stored // 2)]
        assert bodies(again) == [b"first", *expected]
        assert bodies(again, queue_id=1) == expected
        assert put(again, queue_id=1).queue_offset == stored // 2


def test_a_killed_process_finds_all_of_it_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert append_batch(store, [several()])[1] is None
    kill(store)
    with open_store(tmp_path) as again:
        assert bodies(again) == [b"one", b"four" * 50]
        assert bodies(again, queue_id=1) == [b"two", b""]


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"queue_id": -1}, PutMessageStatus.MESSAGE_ILLEGAL),
        ({"topic": "../x"}, PutMessageStatus.MESSAGE_ILLEGAL),
        ({"topic": "x" * 128}, PutMessageStatus.MESSAGE_ILLEGAL),
        ({"body": bytes(4000)}, PutMessageStatus.MESSAGE_ILLEGAL),
        ({"properties": bytes(32768)}, PutMessageStatus.MESSAGE_ILLEGAL),
    ],
)
def test_a_group_with_a_message_that_cannot_be_stored_is_not_added(
    tmp_path: Path, changes: dict[str, Any], status: PutMessageStatus
) -> None:
    with open_store(tmp_path) as store:
        messages = NewMessages()
        assert store.add(messages, [new_message(b"before")]) is None
        refusal = store.add(messages, [new_message(b"good"), new_message(**changes), new_message(b"good")])
        assert refusal is not None
        assert refusal.status is status
        assert store.add(messages, [new_message(b"after")]) is None
        assert len(messages) == 2
        assert store.append(messages) is None
        assert bodies(store) == [b"before", b"after"]


def test_of_several_tags_and_keys_the_last_that_is_not_empty_counts(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store)  # the first file of the index is there
        put(store, properties=b"TAGS\x01a\x02KEYS\x01k\x02TAGS\x01b\x02TAGS\x01\x02KEYS\x01")
        state = store.queues.get("TopicTest", 0)
        assert state is not None
        assert ENTRY.unpack(state.queue.read(QueueOffset(1), 1))[2] == tags_code("b")
        assert len(store.query("TopicTest", "k", 32, 0, 1 << 60).slices) == 1


def test_a_batch_says_what_it_holds(tmp_path: Path) -> None:
    with open_store(tmp_path, enable_consume_queue_ext=True) as store:
        messages = NewMessages()
        group = several()
        assert store.add(messages, group[:2]) is None
        assert store.add(messages, group[2:]) is None
        assert (len(messages), messages.stored, messages.places) == (8, 0, [])
        queues = [(state.topic, state.queue_id) for state in messages.states]
        assert queues == [(message.topic, message.queue_id) for message in group]
        assert messages.special == list(range(8))  # with ext files every queue is
        assert [messages.properties(n) for n in range(8)] == [message.properties for message in group]
        assert [messages.sys_flag(n) for n in range(8)] == [message.sys_flag for message in group]
        chosen = [message.properties for message in group if (message.topic, message.queue_id) == queues[1]]
        assert [*messages.properties_for(messages.states[1])] == chosen
        assert [messages.code(n) for n in (0, 7)] == [None, None]
        sizes = [messages.group_size(0), messages.group_size(2)]
        assert store.append(messages) is None
        places = messages.places
        assert sizes == [sum(place[1] for place in places[:2]), sum(place[1] for place in places[2:])]
        assert messages.largest == max(place[1] for place in places)
        assert messages.bounds(2, 8) == (places[2][0], places[-1][0] + places[-1][1])
        assert all(messages.code(n) is not None for n in messages.special)


def test_a_batch_takes_as_many_queues_as_there_are(tmp_path: Path) -> None:
    """More than one block of queue entries for each message would be too few, and so would be one for all."""
    store = open_store(tmp_path, mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=20 * 40)
    for turn in range(50):
        results, refusal = append_batch(store, [[new_message(b"", queue_id=n)] for n in range(70)])
        assert refusal is None
        assert {one.queue_offset for one in results} == {turn}
    assert_queues(store, 70, 50)
    kill(store)
    with open_store(tmp_path, mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=20 * 40) as again:
        assert_queues(again, 70, 50)


def assert_queues(store: MessageStore, queues: int, messages: int) -> None:
    for queue_id in range(queues):
        assert len(bodies(store, queue_id=queue_id)) == messages
