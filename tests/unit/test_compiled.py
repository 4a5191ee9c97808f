"""The compiled steps: who chooses them, that they are really used, and that they keep no reference."""

from __future__ import annotations

import os
import sys
import zipfile
from array import array
from contextlib import suppress
from pathlib import Path
from random import Random
from shutil import which
from subprocess import run
from sysconfig import get_config_var
from typing import Any

import pytest

from downrange import compiled
from downrange.model.hashing import tags_code
from downrange.protocol.bodies.send_replies import SendReply
from downrange.store.new_messages import NewMessages
from downrange.store.queue.queue_entry import ENTRY
from downrange.store.queue.queue_tails import END, PHYSICAL_END, ROW, SPILL_AT, QueueTails
from tests.support import compiled_cases as cases
from tests.support.leaks import check_no_leaks
from tests.unit.store.small_store import BORN_HOST, NOW, STORE_HOST, new_message

ROOT = Path(__file__).parent.parent.parent
needs_twins = pytest.mark.skipif(compiled.steps is None, reason="built without a compiler, or DOWNRANGE_PURE is set")
ID = "UNIQ_KEY\x017F0000011A2B18B4AAC2000000000001\x02TAGS\x01TagA"


def batch(queues: int, count: int, properties: str = ID) -> tuple[NewMessages, list[_State]]:
    """Messages that go to these queues in turn."""
    states = [_State(8 * queue) for queue in range(queues)]
    messages = NewMessages()
    for number in range(count):
        state: Any = states[number % queues]
        messages.add(state, new_message(b"body", properties=properties.encode()), True)
    return messages, states


class _State:
    """What the steps want to know of a queue."""

    queue_id, topic, topic_field, is_special = 3, "TopicTest", b"\tTopicTest", False

    def __init__(self, row: int) -> None:
        self.row = row


def tails_for(queues: int, next_offset: int = 1, spill_at: int = 4000) -> QueueTails:
    """Queues that have so many entries, none of them in memory."""
    tails = QueueTails()
    for _ in range(queues):
        row = tails.add_row()
        end = 20 * next_offset
        tails.rows[row : row + ROW] = array("q", (next_offset, end, 100, 0, 0, 0, spill_at, end))
    return tails


def shown_version(**environment: str) -> str:
    command = [sys.executable, "-m", "downrange.cli.main", "--version"]
    return run(command, env=os.environ | environment, capture_output=True, text=True, check=True).stdout


def test_the_environment_can_ask_for_pure_python() -> None:
    assert shown_version(DOWNRANGE_PURE="1").endswith("(pure)\n")
    assert shown_version().endswith(f"({compiled.VARIANT})\n")


@needs_twins
def test_every_step_stands_in_the_page_about_them() -> None:
    page = (ROOT / "docs/how-to/compiled.md").read_text("utf-8")
    steps = [name for name, step in vars(compiled.steps).items() if callable(step) and not name.startswith("_")]
    assert [name for name in steps if f"`{name}`" not in page] == []


@needs_twins
def test_a_batch_becomes_records_entries_and_keys() -> None:
    steps = compiled.steps
    messages, _ = batch(2, 3)
    tails = tails_for(2)
    memory = bytearray(4096)
    size = 88 + 4 + 10 + 2 + len(ID)
    assert steps.write_records(messages, 0, memory, 100, 4096, 8192, NOW, tails.rows) == (3, 100 + 3 * size)
    places = [(8292, size, 1), (8292 + size, size, 1), (8292 + 2 * size, size, 2)]
    assert messages.places == places
    assert (messages.end_offset, messages.largest, messages.stored) == (8292 + 3 * size, size, 3)
    assert tails.rows[0] == 3
    assert tails.rows[8] == 2
    assert steps.put_entries(messages, 0, 3, tails.rows, tails.memory) == (3, [])
    assert [*tails.rows[:6]] == [3, 60, places[2][0] + size, 256 + 16 + 40, 2, 2 * size]
    assert tails.read(0, 20, 60) == b"".join(ENTRY.pack(*places[n][:2], tags_code("TagA")) for n in (0, 2))
    index = bytearray(40 + 4 * 10 + 20 * 50)
    assert steps.index_keys(messages, 0, 3, index, 10, 2, 50, 1, 0) == (5, 2, places[2][0], NOW)


@needs_twins
def test_groups_that_do_not_fit_are_not_begun() -> None:
    steps = compiled.steps
    messages, states = batch(1, 2)
    state: Any = states[0]
    messages.add(state, new_message(b"third"), False)
    tails = tails_for(1)
    sizes = [messages.group_size(0), messages.group_size(1)]
    memory = bytearray(sum(sizes) - 1)
    assert steps.write_records(messages, 0, memory, 0, len(memory), 0, NOW, tails.rows) == (1, sizes[0])
    assert (messages.stored, tails.rows[0]) == (1, 2)
    assert not any(memory[sizes[0] :])
    assert steps.write_records(messages, 1, memory, sizes[0], len(memory), 0, NOW, tails.rows) == (1, sizes[0])
    assert steps.write_records(messages, 1, memory, 0, len(memory), 5000, NOW, tails.rows) == (3, sizes[1])
    assert messages.places[1][::2] == (5000, 2)


@needs_twins
def test_the_step_says_which_queues_are_to_be_written() -> None:
    steps = compiled.steps
    messages, _ = batch(2, 8)
    tails = tails_for(2)
    tails.rows[8 + SPILL_AT] = 60
    steps.write_records(messages, 0, bytearray(4096), 0, 4096, 1000, NOW, tails.rows)
    assert steps.put_entries(messages, 0, 8, tails.rows, tails.memory) == (8, [8])


@needs_twins
def test_an_entry_that_does_not_come_next_is_left_to_python() -> None:
    steps = compiled.steps
    for change in ((END, 60), (END, 0), (SPILL_AT, 0)):
        messages, _ = batch(2, 4)
        tails = tails_for(2)
        steps.write_records(messages, 0, bytearray(4096), 0, 4096, 1000, NOW, tails.rows)
        tails.rows[8 + change[0]] = change[1]
        before = list(tails.rows[8:])
        assert steps.put_entries(messages, 0, 4, tails.rows, tails.memory) == (1, [])
        assert tails.rows[END] == 40
        assert list(tails.rows[8:]) == before


@needs_twins
def test_an_entry_that_is_there_already_is_passed_over() -> None:
    messages, _ = batch(2, 4)
    tails = tails_for(2)
    compiled.steps.write_records(messages, 0, bytearray(4096), 0, 4096, 1000, NOW, tails.rows)
    tails.rows[8 + PHYSICAL_END] = 1 << 40
    before = list(tails.rows[8:])
    assert compiled.steps.put_entries(messages, 0, 4, tails.rows, tails.memory) == (4, [])
    assert tails.rows[END] == 60
    assert list(tails.rows[8:]) == before


@needs_twins
def test_every_code_has_its_own_family_or_none() -> None:
    frames = [(1, code.to_bytes(2, "big", signed=True), b"") for code in (-1, 0, 310, 310, 10, 11, -1, 310)]
    families: dict[int, str | None] = {310: "sends", 10: "sends", 11: "pulls"}
    runs = []
    at = 0
    while at < len(frames):
        family, at = compiled.steps.next_run(frames, at, families)
        runs.append((family, at))
    assert runs == [(None, 1), (None, 2), ("sends", 5), ("pulls", 6), (None, 7), ("sends", 8)]


@needs_twins
def test_no_reference_is_kept_or_lost() -> None:
    steps: Any = compiled.steps
    frames = [cases.send(Random(seed)) for seed in range(200)]
    origins = [_Origin()] * len(frames)
    chunk = b"".join(cases.wire(Random(seed)) for seed in range(20))
    destinations = {topic: cases.packed(topic, (0, 8)) for topic in ("TopicA", "a")}
    table = steps.TopicTable()
    template = SendReply(0, STORE_HOST, "DefaultRegion", trace_on=True)
    state, message = _State(0), new_message(properties=ID.encode())
    by_row = [state, state]
    cluster = b"CLUSTER\x01c"
    memory, keys = bytearray(200_000), bytearray(40 + 4 * 10 + 20 * 1000)
    tails = tails_for(2)
    rows, tail = tails.rows, tails.memory
    tails.make_room(1000)
    put_before = rows[:], bytes(tail)
    ready = b"ready" * 10
    watched = [state, state.topic, state.topic_field, message, message.body, message.properties, message.born_host]
    watched += [rows, tail, memory, keys, by_row, cluster, table, template, template.json_pieces[0], ready]
    watched += [STORE_HOST, frames, frames[0], frames[0][1], origins, origins[0], origins[0].peer_host]
    watched += [chunk, destinations, *destinations.values(), None]

    def once() -> None:
        table.forget("a")
        table.forget("TopicA")
        rows[:], tail[:] = put_before
        usual = steps.UsualSends(table, destinations.get, by_row, cluster, STORE_HOST)
        messages, replies = steps.NewMessages(), steps.SendReplies()
        messages.add(state, message, True)
        for wrong in ((state, message, 1), (state, None, True), (None, message, True)):
            with suppress(TypeError, AttributeError):  # what pytest knows of an exception would be counted below
                messages.add(*wrong)
        replies.add(0, 310, 5, 0, 0, 0, 1, True)
        replies.add_ready(36, ready, 0, 0, False)
        replies.add_ready(36, b"", 0, 0, False)
        replies.set_ready(2, ready)
        at = 0
        while at < len(frames):
            at = 1 + usual.read(frames, origins, at, len(frames), replies, messages, 700, 3000)
        assert len(messages) > 20
        with suppress(ValueError):
            replies.encode(template, messages, 0)
        with suppress(TypeError):
            usual.read(frames, origins, 0, 5, replies, None, 700, 3000)
        with suppress(TypeError):
            steps.write_records(messages, 0, b"", 0, 4096, 0, NOW, rows)
        assert steps.write_records(messages, 0, memory, 0, 100, 10**6, NOW, rows) == (0, 0)
        stop, end = steps.write_records(messages, 0, memory, 0, 4000, 10**6, NOW, rows)
        stop, _ = steps.write_records(messages, stop, memory, end, len(memory), 10**6, NOW, rows)
        assert stop == len(messages.states) == len(messages.places) == messages.stored
        assert (messages.special, messages.code(0)) == ([], None)
        messages.set_code(1, 77)
        with suppress(IndexError):
            messages.properties(10**6)
        assert len(list(messages.properties_for(state))) == stop
        assert steps.put_entries(messages, 0, stop, rows, tail)[0] == stop
        assert steps.put_entries(messages, 0, stop, rows, tail)[0] == stop
        assert steps.index_keys(messages, 0, stop, keys, 10, 2, 1000, 0, 0)
        assert steps.index_keys(messages, 0, stop, keys, 10, 2, 4, 0, 0) is None
        for answered in range(3):
            assert replies.encode(template, messages, answered)[0]
        assert replies.request(0)
        assert replies.batches()
        assert replies.codes()
        assert steps.cut_frames(chunk, 2**24, 2**16)
        assert steps.cut_frames(chunk, 100, 2**16) is None
        assert steps.next_run(frames, 0, {310: state})

    check_no_leaks(once, watched)
    for grown in (memory, tail):
        grown += b"it can grow: nobody holds a view of it"
    rows.append(0)


class _Origin:
    peer_host = BORN_HOST


def built_wheel(directory: Path, compiler: str) -> tuple[zipfile.ZipFile, str]:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    done = run(command, cwd=ROOT, env=os.environ | {"CC": compiler}, capture_output=True, text=True, check=True)
    (wheel,) = directory.glob("*.whl")
    return zipfile.ZipFile(wheel), done.stdout + done.stderr


@pytest.mark.parametrize("compiler", ["/bin/false", "/no/such/compiler"])
def test_without_a_compiler_the_wheel_is_pure(tmp_path: Path, compiler: str) -> None:
    pytest.importorskip("hatchling")
    wheel, said = built_wheel(tmp_path, compiler)
    with wheel:
        assert str(wheel.filename).endswith("-py3-none-any.whl")
        assert not [name for name in wheel.namelist() if name.endswith((".so", ".c"))]
    assert said.count("pure Python") == 1


@pytest.mark.skipif(which("cc") is None, reason="there is no compiler")
def test_with_a_compiler_the_wheel_holds_the_twins(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    wheel, said = built_wheel(tmp_path, "cc")
    module = f"_steps{get_config_var('EXT_SUFFIX')}"
    with wheel:
        assert "none-any" not in str(wheel.filename), said
        wheel.extract(f"downrange/{module}", tmp_path)
    code = f"""
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("downrange._steps", {str(tmp_path / "downrange" / module)!r})
module = module_from_spec(spec)
print(module.cut_frames(b"", 1, 1))
"""
    assert run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "([], 0)\n"
