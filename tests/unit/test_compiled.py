"""The compiled twins: who chooses them, that they are really used, and that they keep no reference."""

from __future__ import annotations

import os
import sys
import zipfile
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
from downrange.protocol.bodies.plain_send import SendReply
from downrange.store.queue.queue_entry import ENTRY
from downrange.store.queue.queue_tails import SPILL_AT
from downrange.store.queue.queues import QueueState
from downrange.store.run import Place, PlainMessage, Run, run_of
from tests.support import compiled_cases as cases
from tests.support.leaks import check_no_leaks
from tests.support.store_files import files_of
from tests.unit.store.small_store import BORN_HOST, NOW, STORE_HOST, new_message, open_store

ROOT = Path(__file__).parent.parent.parent
needs_twins = pytest.mark.skipif(compiled.steps is None, reason="built without a compiler, or DOWNRANGE_PURE is set")
ID = "UNIQ_KEY\x017F0000011A2B18B4AAC2000000000001\x02TAGS\x01TagA"


def usual_messages(states: list[QueueState]) -> list[PlainMessage]:
    return [(state, b"body", ID.encode(), ID, NOW, 0, 0, 0) for state in states]


def usual_run(states: list[QueueState], places: list[Place] | None = None) -> Run:
    run = compiled.steps.run_of(usual_messages(states), [], 310)
    assert run is not None
    if places is not None:
        run.places = places
    return run


def shown_version(**environment: str) -> str:
    command = [sys.executable, "-m", "downrange.cli.main", "--version"]
    return run(command, env=os.environ | environment, capture_output=True, text=True, check=True).stdout


def test_the_environment_can_ask_for_pure_python() -> None:
    assert shown_version(DOWNRANGE_PURE="1").endswith("(pure)\n")
    assert shown_version().endswith(f"({compiled.VARIANT})\n")


@needs_twins
def test_the_twins_take_what_is_usual(tmp_path: Path) -> None:
    steps = compiled.steps
    store = open_store(tmp_path)
    for queue_id in (0, 1):
        store.append(new_message(queue_id=queue_id, properties=ID.encode()))
    states = list(store.queues.states.values())
    run = usual_run([states[0], states[1], states[0]])
    memory = bytearray(4096)
    tails = states[0].tails
    end = steps.append_run(run, BORN_HOST, STORE_HOST, NOW, memory, 100, 4096, 8192, tails.rows)
    size = 88 + 4 + len(states[0].topic_field) + 2 + len(ID)
    assert end == run.end == 8292 + 3 * size
    assert run.largest == size
    places = run.places
    assert places == [(8292, size, 1), (8292 + size, size, 1), (8292 + 2 * size, size, 2)]
    assert [state.next_offset for state in states] == [3, 2]
    assert steps.put_entries(run, tails.rows, tails.memory) == []
    assert [state.queue.max_offset for state in states] == [3, 2]
    assert states[0].queue.read(2, 1) == ENTRY.pack(places[2][0], size, tags_code("TagA"))
    assert states[1].queue.max_physical_offset == places[1][0] + size
    index = bytearray(40 + 4 * 10 + 20 * 50)
    assert steps.index_keys(run, index, 10, 2, 50, 1, 0, 0) == (5, 2, places[2][0])
    store.close()


@needs_twins
def test_messages_of_several_hosts_are_stored_as_if_each_had_come_alone(tmp_path: Path) -> None:
    hosts = [BORN_HOST, b"\xfe\x80" + bytes(13) + b"\1" + BORN_HOST[4:], BORN_HOST[:4] + b"\0\0\x22\xb8"]
    for name in ("together", "alone"):
        store = open_store(tmp_path / name)
        store.append(new_message(properties=ID.encode()))
        messages = usual_messages([*store.queues.states.values()] * 4)
        if name == "together":
            sends = [(0, 1, 0, 0, 1), (0, 2, 0, 0, 2), (0, 3, 0, 0, 1)]
            run = run_of(messages, sends)
            for wrong in (hosts[:2], [*hosts[:2], b"host"], [*hosts[:2], None], [*hosts, BORN_HOST], []):
                assert not store.append_run(run, wrong, STORE_HOST, NOW)  # type: ignore[arg-type]
            assert store.append_run(run, hosts, STORE_HOST, NOW)
            assert len(run.places) == 4
            assert not store.append_run(run_of(messages, sends[:2]), hosts[:2], STORE_HOST, NOW)
        else:
            for message, host in zip(messages, [hosts[0], hosts[1], hosts[1], hosts[2]], strict=True):
                assert store.append_run(run_of([message]), host, STORE_HOST, NOW)
        store.close()
    assert files_of(tmp_path / "together") == files_of(tmp_path / "alone")


@needs_twins
def test_the_twin_says_which_queues_are_to_be_written(tmp_path: Path) -> None:
    steps = compiled.steps
    store = open_store(tmp_path)
    for queue_id in (0, 1):
        store.append(new_message(queue_id=queue_id))
    states = list(store.queues.states.values())
    tails = states[0].tails
    tails.make_room(1000)
    tails.rows[states[1].row + SPILL_AT] = 60
    first = store.max_offset
    places = [(first + 200 * n, 200, 1 + n // 2) for n in range(8)]
    assert steps.put_entries(usual_run(states * 4, places), tails.rows, tails.memory) == [states[1].row]
    store.close()


@needs_twins
def test_entries_that_do_not_come_next_are_left_to_the_twin(tmp_path: Path) -> None:
    steps = compiled.steps
    store = open_store(tmp_path)
    store.append(new_message())
    (state,) = store.queues.states.values()
    tails, first = state.tails, store.max_offset
    tails.make_room(10)
    before = list(tails.rows), bytes(tails.memory)
    gap, duplicate, backwards = [1, 3], [1, 0], [1, 2]
    for offsets, step in ((gap, 200), (duplicate, 200), (backwards, -100)):
        places = [(first + step * n, 200, offset) for n, offset in enumerate(offsets)]
        assert steps.put_entries(usual_run([state] * 2, places), tails.rows, tails.memory) is None
        assert (list(tails.rows), bytes(tails.memory)) == before
    store.close()


@needs_twins
def test_no_reference_is_kept_or_lost(tmp_path: Path) -> None:
    steps: Any = compiled.steps
    store = open_store(tmp_path)
    store.append(new_message(properties=ID.encode()))
    (state,) = store.queues.states.values()
    frames = [cases.send(Random(seed)) for seed in range(200)]
    chunk = b"".join(cases.wire(Random(seed)) for seed in range(20))
    destinations = {topic: cases.packed(topic, (0, 0)) for topic in ("TopicA", "a")}
    table = steps.TopicTable()
    reply = SendReply(0, STORE_HOST, "DefaultRegion", trace_on=True)
    messages = usual_messages([state] * 3)
    places = [(10**6 + 200 * n, 200, 1 + n) for n in range(3)]
    sends = [(0, 10**6, 0, 1, 1), (1, 10**6 + 1, 0, 1, 2)]
    memory = bytearray(4096)
    watched = [
        state,
        state.topic,
        state.topic_field,
        state.row,
        state.tails.rows,
        state.tails.memory,
        messages,
        messages[0],
        *messages[0][1:4],
        places,
    ]
    watched += [memory, BORN_HOST, STORE_HOST, sends, reply._json_pieces[0], frames[0], frames[0][1], None]
    watched += [chunk, destinations, *destinations.values()]
    pieces = reply._json_pieces, reply._binary_pieces, reply._id_size

    rows, tail = state.tails.rows, state.tails.memory
    state.tails.make_room(10)
    put_before = rows[:], bytes(tail)

    def once() -> None:
        table.forget("a")
        table.forget("TopicA")
        rows[:], tail[:] = put_before
        run = steps.run_of(messages, sends, 310)
        assert steps.append_run(run, BORN_HOST, STORE_HOST, NOW, memory, 0, 400, 0, rows) is None
        assert steps.append_run(run, BORN_HOST, STORE_HOST, NOW, b"", 0, 4096, 0, rows) is None
        assert steps.append_run(run, BORN_HOST, STORE_HOST, NOW, memory, 0, 4096, 0, b"") is None
        assert steps.encode_answers(*pieces, run) is None
        assert steps.append_run(run, BORN_HOST, STORE_HOST, NOW, memory, 0, 4096, 0, rows)
        assert steps.append_run(run, BORN_HOST, STORE_HOST, NOW, memory, 0, 4096, 0, rows) is None
        assert steps.run_of([*messages, None], sends, 310) is None
        assert steps.run_of(messages, [*sends, None], 310) is None
        assert (run.messages, run.sends, run.states) == (messages, sends, [state] * 3)
        run.places = places
        with suppress(TypeError):  # what pytest knows of an exception would be counted below
            run.places = [*places[:2], None]
        assert run.places == []
        run.places = places
        assert (run[1], run.places, run.end, run.requests) == (messages[1], places, 10**6 + 600, 2)
        assert steps.put_entries(run, rows, tail) == []
        assert steps.put_entries(run, rows, tail) is None
        assert steps.index_keys(run, memory, 10, 2, 100, 0, 0, 0)
        assert steps.index_keys(run, memory, 10, 2, 4, 0, 0, 0) is None
        assert steps.encode_answers(*pieces, run)
        assert steps.encode_answers(*pieces, messages) is None
        assert steps.cut_frames(chunk, 2**24, 2**16)
        assert steps.cut_frames(chunk, 100, 2**16) is None
        for at in range(len(frames)):
            run = steps.plain_run(frames, at, table, destinations.get, [state], 700, 3000, b"CLUSTER\x01c")
            if run is not None:
                assert len(run) == len(run.messages) == len(run.states)

    check_no_leaks(once, watched)
    for grown in (memory, tail):
        grown += b"it can grow: nobody holds a view of it"
    rows.append(0)
    rows[:] = put_before[0]
    tail[:] = put_before[1]
    store.close()


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
print(module.cut_frames(None, 1, 1))
"""
    assert run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "None\n"
