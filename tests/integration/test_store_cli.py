"""`downrange store check` and `downrange store cat` as an operator runs them."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from downrange.cli.main import main
from tests.support.compiled_replay_checks import fill
from tests.support.golden_store import GoldenStore, unpack
from tests.support.spoiled_store import spoil
from tests.unit.store.small_store import open_store, put


class Answer(NamedTuple):
    """How a command ended and what it said."""

    code: int
    stdout: str
    stderr: str


class Command:
    """`downrange store …`, run in this process: starting one for each call would take most of the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Answer:
        self._monkeypatch.setattr(sys, "argv", ["downrange", "store", *arguments])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        assert isinstance(end.value.code, int)
        return Answer(end.value.code, *self._capsys.readouterr())

    def cat(self, *arguments: str) -> list[dict[str, Any]]:
        answer = self("cat", *arguments, "--json")
        assert answer.code == 0, answer.stderr
        return [json.loads(line) for line in answer.stdout.splitlines()]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def as_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "downrange.cli.main", "store", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def golden(tmp_path: Path) -> GoldenStore:
    return unpack("clean", tmp_path)


def test_check_says_that_a_store_is_in_order(store: Command, golden: GoldenStore) -> None:
    answer = store("check", str(golden.root))
    assert answer.code == 0
    assert answer.stderr == ""
    assert "stopped in order" in answer.stdout
    assert "280 records" in answer.stdout
    assert answer.stdout.endswith("problems      none\n")


def test_check_reads_sizes_from_broker_conf(store: Command, golden: GoldenStore, tmp_path: Path) -> None:
    conf = tmp_path / "broker.conf"
    conf.write_text("".join(f"{key}={value}\n" for key, value in golden.manifest["config"].items()))
    assert store("check", str(golden.root), "-c", str(conf)).code == 0


def test_check_tells_problems_to_people_and_programs(store: Command, tmp_path: Path) -> None:
    golden = unpack("torn", tmp_path)
    answer = store("check", str(golden.root))
    assert answer.code == 1
    assert "torn tail" in answer.stdout
    assert "the next start cuts the log at 232373" in answer.stdout
    answer = store("check", str(golden.root), "--json")
    assert answer.code == 1
    document = json.loads(answer.stdout)
    assert (document["state"], document["clean"], document["records"]) == ("CRASHED", False, 288)
    assert [problem["where"] for problem in document["problems"]] == ["commitlog/00000000000000196608", "abort"]


@pytest.mark.parametrize("command", ["check", "cat"])
def test_what_is_not_a_store_ends_with_code_2(store: Command, command: str, tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "missing"):
        answer = store(command, str(directory))
        assert answer.code == 2
        assert answer.stderr.startswith(f"downrange: {directory} is not a")
        assert answer.stdout == ""


def test_check_and_cat_beside_a_writer(tmp_path: Path) -> None:
    with open_store(tmp_path) as live:
        for number in range(40):
            put(live, b"message %d" % number, queue_id=number % 4)
        check = as_process("check", str(tmp_path))
        assert check.returncode == 0, check.stdout
        assert f"in use by process {os.getpid()}" in check.stdout
        lines = as_process("cat", str(tmp_path), "--json").stdout.splitlines()
        assert [json.loads(line)["body"] for line in lines] == [f"message {number}" for number in range(40)]
        put(live, b"one more")


def test_cat_prints_every_message_with_every_field(store: Command, golden: GoldenStore) -> None:
    found = {message["offsetMsgId"]: message for message in store.cat(str(golden.root), "--body", "base64")}
    assert len(found) == 280
    for expected in golden.manifest["messages"]:
        message = found[expected["msgId"]]
        assert len(base64.b64decode(message["body"])) == expected["bodyLength"]
        for key in ("topic", "queueId", "queueOffset", "physicalOffset", "storeTimestamp", "bornHost", "properties"):
            assert message[key] == expected[key]


def test_cat_prints_one_line_a_message(store: Command, tmp_path: Path) -> None:
    with open_store(tmp_path) as own:
        put(own, b"hello\nworld", properties={"TAGS": "TagA", "KEYS": "k1 k2"})
        put(own, b"\xff\x00" * 100, topic="Other", queue_id=3)
    lines = store("cat", str(tmp_path)).stdout.splitlines()
    assert lines[0].startswith("0 2026-")
    assert lines[0].endswith("TopicTest/0/0 tags=TagA keys=k1,k2 hello world")
    assert "Other/3/0 tags=- keys=- hex:ff00ff00" in lines[1]
    assert lines[1].endswith("…")
    (line,) = store("cat", str(tmp_path), "-t", "Other", "--body", "hex").stdout.splitlines()
    assert line.endswith(" " + "ff00" * 100)


def test_cat_chooses_by_topic_queue_offset_time_and_key(store: Command, golden: GoldenStore) -> None:
    root = str(golden.root)
    alpha = [message for message in golden.manifest["messages"] if message["topic"] == "gsAlpha"]
    assert len(store.cat(root, "--topic", "gsAlpha")) == len(alpha)
    queue = sorted(m["queueOffset"] for m in alpha if m["queueId"] == 1)
    assert [m["queueOffset"] for m in store.cat(root, "-t", "gsAlpha", "-i", "1")] == queue
    assert [
        m["queueOffset"] for m in store.cat(root, "-t", "gsAlpha", "-i", "1", "--from", "2", "--limit", "2")
    ] == queue[2:4]
    place = alpha[3]["physicalOffset"]
    assert store.cat(root, "--from", str(place), "--limit", "1")[0]["physicalOffset"] == place
    assert store.cat(root, "--from", str(place - 1), "--limit", "1")[0]["physicalOffset"] == place
    key = alpha[3]["properties"]["UNIQ_KEY"]
    assert place in [message["physicalOffset"] for message in store.cat(root, "--key", key)]
    assert {message["msgId"] for message in store.cat(root, "--key", key)} == {key}
    # A time without a zone is local, as everywhere on the command line.
    assert store.cat(root, "--from", "2030-01-01 00:00:00") == []
    assert len(store.cat(root, "--from", "2020-01-01")) == 280


def test_cat_goes_on_behind_damage_and_says_so(store: Command, golden: GoldenStore) -> None:
    path = min((golden.root / "commitlog").iterdir())
    data = bytearray(path.read_bytes())
    data[95] ^= 1
    path.write_bytes(data)
    answer = store("cat", str(golden.root))
    assert answer.code == 1
    assert len(answer.stdout.splitlines()) == 279
    assert "checksum" in answer.stderr


def test_cat_stops_quietly_when_nobody_reads_on(golden: GoldenStore) -> None:
    command = [sys.executable, "-m", "downrange.cli.main", "store", "cat", str(golden.root), "--body", "hex"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(30) == 0
        assert process.stderr.read() == b""


def test_a_queue_needs_its_topic(store: Command, golden: GoldenStore) -> None:
    answer = store("cat", str(golden.root), "--queue", "1")
    assert answer.code == 2
    assert answer.stderr == "downrange: --queue needs --topic\n"


@pytest.mark.parametrize("seed", range(25))
def test_whatever_is_wrong_with_a_store_is_told_and_is_no_traceback(seed: int, store: Command, tmp_path: Path) -> None:
    random = Random(seed)
    with open_store(tmp_path, mapped_file_size_commit_log=16_384, max_index_num=50) as filled:
        fill(random, filled, 60)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "consumerOffset.json").write_text('{"offsetTable":{"T@g":{0:1,1:2}}}')
    (tmp_path / "config" / "broker.properties").write_text("maxHashSlotNum=100\nmaxIndexNum=50\n")
    done = [spoil(random, tmp_path) for _ in range(random.choice((1, 1, 3)))]
    for arguments in (["check"], ["check", "--json"], ["cat"], ["cat", "-t", "TopicA", "-i", "1"], ["cat", "--json"]):
        command, *options = arguments
        answer = store(command, str(tmp_path), *options)
        assert answer.code in (0, 1, 2), (done, answer)
        assert answer.code < 2 or (not answer.stdout and answer.stderr.count("\n") == 1), (done, answer)


def test_a_record_may_say_any_time(store: Command, tmp_path: Path) -> None:
    with open_store(tmp_path) as filled:
        put(filled)
    with (tmp_path / "commitlog" / ("0" * 20)).open("r+b") as stream:
        stream.seek(56)
        stream.write(b"\x7f" + bytes(7))
    assert f"{0x7F << 56} ms" in store("cat", str(tmp_path)).stdout
    assert f"{0x7F << 56} ms" in store("check", str(tmp_path)).stdout
