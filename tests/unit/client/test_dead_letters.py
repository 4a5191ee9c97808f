"""Dead letters: made by a broker, listed, exported and sent again."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from downrange import Message
from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.dead_letters import DeadLetter, DeadLetters, DeadLettersUnreadable
from downrange.client.errors import GroupNotFound
from downrange.client.producer.outgoing import ForbiddenTopic
from downrange.client.resending import JournalDamaged, JournalFile, Noted, Pace, Place
from downrange.client.session import Session
from downrange.clock import ManualClock
from downrange.model.message import MessageQueue
from downrange.model.topics import SubscriptionGroupConfig, TopicConfig
from downrange.protocol.errors import SubscriptionGroupNotExist
from downrange.testing import EmbeddedBroker, broker
from tests.support.dead_letters import GROUP, give_up
from tests.unit.client.consumer.received import message as received


@pytest.fixture
def mq() -> Iterator[EmbeddedBroker]:
    with broker() as running:
        running.create_topic("orders", 1)
        yield running


@pytest.fixture
async def session(mq: EmbeddedBroker) -> AsyncIterator[Session]:
    async with Session(ClientConfig.of(mq.namesrv)) as opened:
        yield opened


@pytest.fixture
async def letters(mq: EmbeddedBroker, session: Session) -> DeadLetters:
    """Three messages the group billing gave up on."""
    await give_up(mq, session, *(Message("orders", b"%d" % number, "A", f"k{number}") for number in range(3)))
    return DeadLetters(session, GROUP)


async def read(letters: DeadLetters, **options: object) -> list[DeadLetter]:
    return [letter async for letter in letters.read(**options)]  # type: ignore[arg-type]


def bodies(messages: list[ReceivedMessage]) -> list[bytes]:
    return [message.body for message in messages]


def test_letters_of_groups_that_pop_come_from_the_topic_and_not_from_its_retry_topic() -> None:
    for source in ("orders", "%RETRY%billing_orders", "%RETRY%billing+orders"):
        queue = MessageQueue("%DLQ%billing", "broker-a", 0)
        letter = DeadLetter(received(0, queue=queue, properties=f"RETRY_TOPIC\x01{source}\x02"), was_resent=False)
        assert letter.origin_topic == "orders"


async def test_letters_tell_where_they_come_from(letters: DeadLetters) -> None:
    found = await read(letters)
    assert [letter.message.body for letter in found] == [b"0", b"1", b"2"]
    first = found[0]
    assert (first.origin_topic, first.message.topic, first.message.keys) == ("orders", "%DLQ%billing", ["k0"])
    assert first.message.reconsume_times == 1
    assert not first.was_resent
    assert await letters.count() == 3


async def test_letters_are_chosen_by_time_id_and_number(letters: DeadLetters) -> None:
    found = await read(letters)
    second = found[1]
    assert [each.message.body for each in await read(letters, limit=2)] == [b"0", b"1"]
    for message_id in (second.message.message_id, second.message.offset_message_id, second.origin_message_id):
        assert [each.message.body for each in await read(letters, message_ids={message_id})] == [b"1"]
    last = found[-1].message.store_timestamp
    assert await read(letters, begin=last + 1) == []
    assert len(await read(letters, end=last)) == 3


async def test_an_export_holds_everything(letters: DeadLetters) -> None:
    file = io.StringIO()
    assert await letters.export(letters.read(), file) == 3
    rows = [json.loads(line) for line in file.getvalue().splitlines()]
    assert [row["body"] for row in rows] == ["0", "1", "2"]
    assert rows[0]["originTopic"] == "orders"
    assert rows[0]["properties"]["KEYS"] == "k0"


async def test_a_body_that_is_not_text_is_exported_as_hex(mq: EmbeddedBroker, session: Session) -> None:
    await give_up(mq, session, Message("orders", b"\xff\x00"))
    letters = DeadLetters(session, GROUP)
    file = io.StringIO()
    await letters.export(letters.read(), file)
    row = json.loads(file.getvalue())
    assert (row["body"], row["bodyHex"]) == (None, "ff00")


async def test_letters_go_to_their_group_alone_and_start_anew(
    mq: EmbeddedBroker, session: Session, letters: DeadLetters
) -> None:
    outcomes = [outcome async for outcome in letters.resend(letters.read())]
    assert [outcome.error for outcome in outcomes] == [None, None, None]
    again = mq.messages("%RETRY%billing")
    assert bodies(again) == [b"0", b"1", b"2"]
    assert [message.offset_message_id for message in again] == [outcome.offset_message_id for outcome in outcomes]
    # Consumers give the message its first topic back, and count from zero.
    assert [(message.topic, message.tags, message.reconsume_times) for message in again] == [("orders", "A", 0)] * 3
    assert len(mq.messages("orders")) == 3


async def test_what_was_sent_again_is_remembered(mq: EmbeddedBroker, session: Session, letters: DeadLetters) -> None:
    _ = [outcome async for outcome in letters.resend(letters.read(limit=2, include_resent=False))]
    later = DeadLetters(session, GROUP)
    assert [letter.was_resent for letter in await read(later)] == [True, True, False]
    assert [letter.message.body for letter in await read(later, include_resent=False)] == [b"2"]
    _ = [outcome async for outcome in later.resend(later.read(include_resent=False))]
    assert await read(later, include_resent=False) == []
    assert bodies(mq.messages("%RETRY%billing")) == [b"0", b"1", b"2"]


async def test_a_letter_out_of_turn_does_not_hide_those_before_it(session: Session, letters: DeadLetters) -> None:
    last = (await read(letters))[-1]
    _ = [outcome async for outcome in letters.resend(letters.read(message_ids={last.message.message_id}))]
    assert [letter.message.body for letter in await read(letters, include_resent=False)] == [b"0", b"1"]
    assert [letter.was_resent for letter in await read(letters)] == [False, False, True]


class DyingJournal(JournalFile):
    """A journal of a process that dies with the n-th letter: before it was sent, or before its outcome was noted."""

    def __init__(self, path: Path, *, dies_at: int, was_sent: bool) -> None:
        super().__init__(path)
        self._left = dies_at
        self._was_sent = was_sent

    def intend(self, place: Place, topic: str, timestamp: int) -> Noted:
        noted = super().intend(place, topic, timestamp)
        self._left -= 1
        if self._left == 0 and not self._was_sent:
            raise KeyboardInterrupt
        return noted

    def conclude(self, place: Place, sent_as: str | None, error: str | None) -> None:
        if self._left == 0:
            raise KeyboardInterrupt
        super().conclude(place, sent_as, error)


@pytest.mark.parametrize("was_sent", [True, False])
@pytest.mark.parametrize("topic", [None, "repaired"])
async def test_a_job_that_died_is_continued_and_sends_nothing_twice(
    mq: EmbeddedBroker, session: Session, letters: DeadLetters, tmp_path: Path, was_sent: bool, topic: str | None
) -> None:
    mq.create_topic("repaired", 1)
    path = tmp_path / "job.jsonl"
    with DyingJournal(path, dies_at=2, was_sent=was_sent) as dying, pytest.raises(KeyboardInterrupt):
        async for _ in letters.resend(letters.read(), topic, journal=dying):
            pass
    with path.open("ab") as file:
        file.write(b'["%DLQ%bil')  # and cut off in the middle of a line
    later = DeadLetters(session, GROUP)
    with JournalFile(path) as journal:
        left = later.read(include_resent=False, noted=frozenset(journal.noted))
        outcomes = [outcome async for outcome in later.resend(left, topic, journal=journal)]
        assert [outcome.error for outcome in outcomes] == [None, None]
        assert [noted.sent_as is not None for noted in journal.noted.values()] == [True] * 3
    sent = mq.messages(topic or "%RETRY%billing")
    assert sorted(bodies(sent)) == [b"0", b"1", b"2"]
    assert {noted.sent_as for noted in journal.noted.values()} == {message.offset_message_id for message in sent}
    with JournalFile(path) as journal:
        assert [outcome async for outcome in later.resend(later.read(), topic, journal=journal)] == []


async def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("milk\n")
    with pytest.raises(JournalDamaged, match="line 1"):
        JournalFile(path)
    assert path.read_text() == "milk\n"


async def test_letters_are_sent_at_the_pace_given_and_none_during_a_pause() -> None:
    clock = ManualClock()
    pace = Pace(clock, per_second=50)
    times = []

    async def send(count: int) -> None:
        for _ in range(count):
            await pace.wait()
            times.append(clock.now())

    begin = clock.now()
    sending = asyncio.create_task(send(7))
    while len(times) < 4:
        await asyncio.sleep(0)
        if clock.sleeping:
            await clock.advance(0.01)
    assert [time - begin for time in times] == [0, 20, 40, 60]
    pace.pause()
    await clock.advance(10)
    await asyncio.sleep(0)
    assert len(times) == 4
    pace.go_on()
    while len(times) < 7:
        await asyncio.sleep(0)
        if clock.sleeping:
            await clock.advance(0.01)
    await sending
    assert times[6] - times[5] == 20  # a pause is not made up for, but for one letter


async def test_letters_can_go_to_another_topic(mq: EmbeddedBroker, letters: DeadLetters) -> None:
    mq.create_topic("repaired", 1)
    outcomes = [outcome async for outcome in letters.resend(letters.read(), topic="repaired")]
    assert all(outcome.offset_message_id for outcome in outcomes)
    sent = mq.messages("repaired")
    assert [(message.body, message.tags, message.keys) for message in sent] == [
        (b"0", "A", ["k0"]),
        (b"1", "A", ["k1"]),
        (b"2", "A", ["k2"]),
    ]
    assert "RETRY_TOPIC" not in sent[0].properties


async def test_a_failure_has_its_own_outcome_and_is_not_remembered_as_sent(
    mq: EmbeddedBroker, session: Session, letters: DeadLetters
) -> None:
    async with Admin(ClientConfig.of(mq.namesrv)) as admin:
        await admin.cluster.update_config({"autoCreateSubscriptionGroup": "false"})
        await admin.groups.delete(GROUP)
        outcomes = [outcome async for outcome in letters.resend(letters.read())]
        assert [type(outcome.error) for outcome in outcomes] == [SubscriptionGroupNotExist] * 3
        await admin.groups.create(SubscriptionGroupConfig(GROUP))
        await admin.cluster.update_config({"autoCreateSubscriptionGroup": "true"})
    assert len(await read(letters, include_resent=False)) == 3
    refused = [outcome async for outcome in letters.resend(letters.read(), topic="SCHEDULE_TOPIC_XXXX")]
    assert [type(outcome.error) for outcome in refused] == [ForbiddenTopic] * 3


async def test_a_compressed_body_survives(mq: EmbeddedBroker, session: Session) -> None:
    await give_up(mq, session, Message("orders", b"long" * 5000))
    letters = DeadLetters(session, GROUP)
    _ = [outcome async for outcome in letters.resend(letters.read())]
    assert bodies(mq.messages("%RETRY%billing")) == [b"long" * 5000]


async def test_a_group_without_dead_letters_and_one_nobody_knows(mq: EmbeddedBroker, session: Session) -> None:
    with pytest.raises(GroupNotFound, match="nobody"):
        await read(DeadLetters(session, "nobody"))
    async with Admin(ClientConfig.of(mq.namesrv)) as admin:
        await admin.groups.create(SubscriptionGroupConfig("young"))
    assert await read(DeadLetters(session, "young")) == []
    assert await DeadLetters(session, "young").count() == 0


async def test_a_topic_that_may_not_be_read_says_what_to_do(mq: EmbeddedBroker, letters: DeadLetters) -> None:
    async with Admin(ClientConfig.of(mq.namesrv)) as admin:
        await admin.topics.create(TopicConfig("%DLQ%billing", 1, 1, perm=2))
    with pytest.raises(DeadLettersUnreadable, match="topic perm %DLQ%billing 6"):
        await read(letters)
