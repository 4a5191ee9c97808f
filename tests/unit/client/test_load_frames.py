"""The ring of pre-encoded sends: real frames, all of one length, no two messages alike."""

from __future__ import annotations

import pytest

from downrange.load.frames import SendFrames
from downrange.load.outstanding import FIRST_OPAQUE
from downrange.load.plans import SendPlan
from downrange.model.properties import decode_properties
from downrange.protocol.bodies.send import SendMessageRequest, decode_batch
from downrange.protocol.codes import RequestCode, SerializeType
from downrange.protocol.command import Command
from downrange.protocol.framing import FrameDecoder
from downrange.protocol.signing import SIGNATURE, Signer, is_signed_with
from downrange.settings import ConfigError

KINDS = pytest.mark.parametrize("kind", list(SerializeType))


def decoded(frames: SendFrames, count: int) -> list[Command]:
    commands: list[Command] = []
    while len(commands) < count:
        decoder = FrameDecoder()
        commands += decoder.feed(bytes(frames.slice(*frames.take(count - len(commands)))))
        assert decoder.error is None
        assert decoder.buffered == 0
    return commands


@KINDS
def test_every_frame_is_a_send_with_its_own_opaque_and_queue(kind: SerializeType) -> None:
    frames = SendFrames(SendPlan(header=kind), "orders", 3, "broker-a")
    commands = decoded(frames, 9)
    assert [command.opaque for command in commands] == list(range(FIRST_OPAQUE, FIRST_OPAQUE + 9))
    headers = [command.header(SendMessageRequest) for command in commands]
    assert [header.queue_id for header in headers] == [0, 1, 2] * 3
    assert {(command.code, len(command.body_bytes)) for command in commands} == {(RequestCode.SEND_MESSAGE_V2, 128)}
    assert {(header.topic, header.bname, header.batch) for header in headers} == {("orders", "broker-a", False)}


@KINDS
def test_every_frame_has_a_signature_of_its_own(kind: SerializeType) -> None:
    secret = "producer-" + "words"
    frames = SendFrames(SendPlan(header=kind), "orders", 3, signer=Signer("producer-key", secret))
    commands = decoded(frames, frames.count + 3)
    assert [command.opaque for command in commands[:-3]] == list(range(FIRST_OPAQUE, FIRST_OPAQUE + frames.count))
    assert all(is_signed_with(command, secret.encode()) for command in commands)
    assert len({command.ext_fields[SIGNATURE] for command in commands}) == frames.count


@KINDS
def test_frames_of_several_topics_reach_all_their_queues_in_no_order(kind: SerializeType) -> None:
    frames = SendFrames(SendPlan(header=kind), "orders", 3, "broker-a", topics=1200)
    headers = [command.header(SendMessageRequest) for command in decoded(frames, frames.count)]
    places = [(header.topic, header.queue_id) for header in headers]
    assert set(places) == {(f"orders-{number:05}", queue) for number in range(1, 1201) for queue in range(3)}
    assert places != sorted(places)
    assert len(places) >= 2 * len(set(places))


def test_the_ring_is_as_long_as_wanted() -> None:
    assert SendFrames(SendPlan(ring=40_000), "orders", 4).count == 40_000


@KINDS
def test_no_key_or_body_comes_twice_when_the_ring_comes_round(kind: SerializeType) -> None:
    frames = SendFrames(SendPlan(header=kind, size=1024), "orders", 4)
    commands = decoded(frames, 3 * frames.count)
    properties = [decode_properties(command.header(SendMessageRequest).properties) for command in commands]
    assert len({each["UNIQ_KEY"] for each in properties}) == len(commands)
    assert len({each["KEYS"] for each in properties}) == len(commands)
    assert len({command.body_bytes for command in commands}) == len(commands)
    assert {len(each["UNIQ_KEY"]) for each in properties} == {32}


@pytest.mark.parametrize("at_once", [1, 7, 5000])
def test_a_body_begins_with_the_number_told(at_once: int) -> None:
    frames = SendFrames(SendPlan(), "orders", 4)
    taken = 0
    while taken < frames.count + 5:
        first, end = frames.take(at_once)
        numbers = frames.body_numbers(first, end)
        commands = FrameDecoder().feed(bytes(frames.slice(first, end)))
        for command, number in zip(commands, numbers, strict=True):
            assert command.body_bytes.startswith(number)
        taken += end - first


def test_frames_on_their_way_are_not_touched() -> None:
    plan = SendPlan(connections=3, outstanding=1000)
    frames = SendFrames(plan, "orders", 4)
    assert frames.most_outstanding >= 3000
    taken = [frames.take(1) for _ in range(frames.most_outstanding)]
    before = [bytes(frames.slice(*each)) for each in taken]
    frames.take(frames.most_outstanding)
    assert [bytes(frames.slice(*each)) for each in taken] == before


def test_a_taken_frame_carries_the_time() -> None:
    (command,) = decoded(SendFrames(SendPlan(), "orders", 4), 1)
    assert command.header(SendMessageRequest).born_timestamp > 1_700_000_000_000


@KINDS
def test_a_batch_holds_as_many_messages_each_with_its_key(kind: SerializeType) -> None:
    frames = SendFrames(SendPlan(batch=16, header=kind), "orders", 4)
    commands = decoded(frames, frames.count + 2)
    assert {command.code for command in commands} == {RequestCode.SEND_BATCH_MESSAGE}
    assert all(command.header(SendMessageRequest).batch for command in commands)
    entries = [entry for command in commands for entry in decode_batch(command.body_bytes)]
    assert len(entries) == 16 * len(commands)
    assert len({decode_properties(entry.properties)["UNIQ_KEY"] for entry in entries}) == len(entries)


def test_keys_can_be_left_out() -> None:
    (command,) = decoded(SendFrames(SendPlan(has_keys=False), "orders", 4), 1)
    assert "KEYS" not in decode_properties(command.header(SendMessageRequest).properties)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"size": 3}, "size 3: expected 16"),
        ({"connections": 0}, "connections 0"),
        ({"rate": 0.0}, "rate 0"),
        ({"size": 1 << 20, "batch": 16}, "larger than a broker takes"),
    ],
)
def test_a_plan_that_cannot_work_says_why(wrong: dict[str, float], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        SendPlan(**wrong)  # type: ignore[arg-type]
