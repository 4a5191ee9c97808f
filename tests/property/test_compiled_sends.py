"""The compiled steps from frames to stored sends and their replies: as `test_compiled.py`, which has the rest."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from downrange.compiled import steps
from downrange.model.topics import SEND_FORBIDDEN_TOPICS
from downrange.protocol.bodies.fields import encode_fields
from downrange.protocol.bodies.send import _V1_NAMES as V1_NAMES
from downrange.protocol.bodies.send import BatchEntry, SendMessageRequest, encode_batch
from downrange.protocol.command import Command
from downrange.protocol.framing import Frame, FrameDecoder, decode_frame, encode
from tests.support import compiled_cases as cases
from tests.support import compiled_send_checks as checks

pytestmark = pytest.mark.skipif(steps is None, reason="built without a compiler, or DOWNRANGE_PURE is set")
SEEDS = st.integers(0, 2**64).map(Random)


def is_usual(frame: Frame) -> bool:
    """May this captured send be a usual one, once its topic and queue are there?"""
    fields = decode_frame(frame).ext_fields
    is_set_aside = any(word in fields.get("i", "") for word in ("DELAY", "TRAN_MSG", "TIMER_D"))
    return (
        {*"abefg"} <= fields.keys()
        and re.fullmatch("[a-zA-Z0-9_-]{1,127}", fields["b"]) is not None
        and fields["b"] not in SEND_FORBIDDEN_TOPICS
        and fields["e"] in map(str, range(16))
        and int(fields["f"]) & 12 == 0
        and not is_set_aside
        and len(frame[1]) + len(frame[2]) < 10_000
    )


@given(random=SEEDS)
@settings(max_examples=100, deadline=None)
def test_sends_are_stored_and_answered_alike(random: Random) -> None:
    with TemporaryDirectory() as root:
        checks.same_sends(random, root)


def test_the_compiled_step_reads_most_of_what_is_usual(tmp_path: Path) -> None:
    both = checks.BothBrokers(str(tmp_path), mapped_file_size_commit_log=1 << 20)
    frames = [cases.send(Random(seed), unusual=0) for seed in range(300)]
    both.take(frames[:50])  # the first message of a queue is not usual
    assert both.take(frames) > 250
    both.close()


@pytest.mark.parametrize("code", [10, 310, 320])
def test_what_is_nearly_usual_is_stored_and_answered_alike(tmp_path: Path, code: int) -> None:
    both = checks.BothBrokers(str(tmp_path), mapped_file_size_commit_log=4096)
    entries = [BatchEntry(0, bytes(500), ""), BatchEntry(7, b"", "TAGS\x01a\x02WAIT\x01false")]
    chosen: list[dict[str, Any]] = [{}, {}]  # the first message of a queue is not usual
    chosen += [
        {"properties": text} for text in ("AWAIT\x01false", "a\x01b\x02WAIT\x01false", "WAIT\x01false\x02a\x01b")
    ]
    chosen += [
        {"properties": text} for text in ("WAIT\x01 false", "WAIT\x01false\x02WAIT\x01true", "WAIT\x01", "xDELAY")
    ]
    chosen += [{"topic": "Many"}] * 2  # of several tags
    chosen += [{"body": bytes(size)} for size in (3800, 4000)] if code != 320 else []
    chosen += [{"entries": count * entries} for count in (1, 4, 6, 0)] if code == 320 else []
    for one in chosen * 2:
        header = SendMessageRequest(
            producer_group="g", topic=one.get("topic", "TopicA"), queue_id=0, sys_flag=0, born_timestamp=5, flag=0,
            properties=one.get("properties", ""), reconsume_times=0, batch=code == 320,
        )  # fmt: skip
        body = encode_batch(one.get("entries", entries)) if code == 320 else one.get("body", b"body")
        fields = encode_fields(header)
        if code == 10:
            fields = {V1_NAMES.get(name, name): value for name, value in fields.items()}
        for kind in (0, 1):
            (frame,) = FrameDecoder().frames(encode(Command(code, 1, 0, fields, body, serialize_type=kind)))
            both.take([frame, frame])
    both.close()


def test_captured_sends_are_read_however_they_are_cut(tmp_path: Path) -> None:
    both = checks.BothBrokers(str(tmp_path), mapped_file_size_commit_log=16 << 20)
    both.take([*cases.golden_sends()])
    frames = [frame for frame in cases.golden_sends() if is_usual(frame)]
    assert len(frames) > 100
    for frame in frames:
        both.know_topic(decode_frame(frame).ext_fields["b"])
    both.take(frames)
    left = [frame for frame in frames if not both.take([frame])]
    # A Java client that signs writes every field of a binary header twice.
    assert len(left) < len(frames) / 10
    assert all(b"Signature" in frame[1] for frame in left)
    for kind, header, body in frames[:20]:
        both.take([(kind, header[:end], body) for end in range(len(header))])
        both.take([(kind, header[end:], body) for end in range(len(header))])
    both.close()


@given(random=SEEDS)
@settings(max_examples=200, deadline=None)
def test_frames_are_cut_into_runs_alike(random: Random) -> None:
    checks.same_cuts_into_runs(random)


@given(random=SEEDS)
@settings(max_examples=300, deadline=None)
def test_a_chunk_is_cut_alike(random: Random) -> None:
    checks.same_frames(random)


@given(random=SEEDS)
@settings(max_examples=200, deadline=None)
def test_replies_are_the_same_bytes(random: Random) -> None:
    checks.same_replies(random)


@given(random=SEEDS)
@settings(max_examples=300, deadline=None)
def test_arguments_that_only_a_bug_can_pass_are_refused(random: Random) -> None:
    checks.refuses_nonsense_about_sends(random)
