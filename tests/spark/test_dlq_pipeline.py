"""`downrange pipeline dlq`: the table of dead letters, its report, and sending chosen ones again."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from downrange import Message
from downrange.cli import pipeline_dlq
from downrange.cli.main import main
from downrange.client.config import ClientConfig
from downrange.client.resending import JournalFile
from downrange.client.session import Session
from downrange.client.trace import ConsumeCode, encode_sub_after, encode_sub_before
from downrange.model.message import MessageQueue
from downrange.model.topics import TRACE_TOPIC, popped_topic, retry_topic
from downrange.spark.errors import OptionError
from downrange.spark.pipelines.dead_letters import checked_source, deliveries, dlq, letters, letters_in
from downrange.spark.pipelines.errors import PipelineError
from downrange.spark.pipelines.resend import JOURNAL, Fate, Job, Outcome, chosen, resend
from downrange.testing import EmbeddedBroker, broker
from tests.docs.test_docs import ROOT, example
from tests.support.dead_letters import GROUP, give_up

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)
PAGE = ROOT / "docs" / "how-to" / "dead-letters.md"


@pytest.fixture
def mq() -> Iterator[EmbeddedBroker]:
    with broker() as running:
        running.create_topic("orders", 1)
        running.create_topic("payments", 1)
        yield running


def give_up_some(mq: EmbeddedBroker, count: int = 3) -> None:
    """The group billing gives up on orders with tags A and B, and on one payment."""

    async def work() -> None:
        async with Session(ClientConfig.of(mq.namesrv)) as session:
            orders = [Message("orders", b"%d" % number, "AB"[number % 2], f"k{number}") for number in range(count)]
            await give_up(mq, session, *orders, Message("payments", b"paid"))

    asyncio.run(work())


def trace(mq: EmbeddedBroker, message_id: str, code: ConsumeCode) -> None:
    before = encode_sub_before(
        timestamp=1, region_id=None, group=GROUP, request_id="r", message_id=message_id, retry_times=16, keys=None
    )
    after = encode_sub_after(
        timestamp=2,
        group=GROUP,
        request_id="r",
        message_id=message_id,
        keys=None,
        cost_millis=1,
        success=False,
        code=code,
    )
    mq.producer("tracing").send(Message(TRACE_TOPIC, (before + after).encode()))


def planned(spark: SparkSession, mq: EmbeddedBroker, out: Path, condition: str = "true") -> list[Outcome]:
    options = {"namesrv": mq.namesrv}
    dlq(spark, out, options, traces=False)
    return chosen(letters_in(spark, out, options, traces=False), condition, Job())


def test_the_report_counts_letters_by_cause(spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path) -> None:
    options = {"namesrv": mq.namesrv}
    nothing = dlq(spark, tmp_path, options)
    assert (nothing.letters, nothing.since, nothing.causes) == (0, None, [])
    give_up_some(mq)
    first = mq.messages("%DLQ%billing")[0]
    assert first.unique_key is not None
    trace(mq, first.unique_key, ConsumeCode.EXCEPTION)
    report = dlq(spark, tmp_path, options)
    assert (report.letters, report.new) == (4, 4)
    found = {
        (row["origin_topic"], row["tags"], row["consumer_host"], row["error"]): row["letters"] for row in report.causes
    }
    assert found == {
        ("orders", "A", "127.0.0.1", "EXCEPTION"): 1,
        ("orders", "A", None, None): 1,
        ("orders", "B", None, None): 1,
        ("payments", None, None, None): 1,
    }
    assert report.since is not None
    assert round(report.since.timestamp() * 1000) == first.store_timestamp
    for name in ("letters.png", "causes.png"):
        assert tmp_path / name in report.written
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    again = dlq(spark, tmp_path, options, traces=False)
    assert (again.letters, again.new, again.since) == (4, 0, report.since)


def test_the_last_failed_delivery_says_host_and_error(spark: SparkSession) -> None:
    def delivery(request: str, at: int, code: ConsumeCode | None, *, is_old: bool = False) -> str:
        before = encode_sub_before(
            timestamp=at, region_id="r", group=GROUP, request_id=request, message_id="m", retry_times=0, keys="k"
        )
        if code is None:
            return before
        after = encode_sub_after(
            timestamp=at + 1,
            group=GROUP,
            request_id=request,
            message_id="m",
            keys="k",
            cost_millis=1,
            success=code is ConsumeCode.SUCCESS,
            code=code,
        )
        return before + ("\x01".join(after.split("\x01")[:6]) + "\x02" if is_old else after)

    def found(*texts: str) -> list[tuple[str, str]]:
        rows = [(f"10.0.0.{number}:5000", text.encode()) for number, text in enumerate(texts)]
        frame = spark.createDataFrame(rows, "born_host string, body binary")
        return [(row["consumer_host"], row["error"]) for row in deliveries(frame).collect()]

    assert found(delivery("a", 9, ConsumeCode.FAILED), delivery("b", 10, ConsumeCode.TIME_OUT)) == [
        ("10.0.0.1", "TIME_OUT")
    ]
    assert found(delivery("a", 10, ConsumeCode.FAILED), delivery("b", 9, None)) == [("10.0.0.0", "FAILED")]
    assert found(delivery("a", 9, None), "junk\x02SubAfter\x01x\x02") == [("10.0.0.0", "NO_END")]
    assert found(delivery("a", 9, ConsumeCode.EXCEPTION, is_old=True)) == [("10.0.0.0", "FAILED")]
    assert found(delivery("a", 9, ConsumeCode.SUCCESS)) == []


def test_letters_of_groups_that_pop_come_from_the_topic(spark: SparkSession) -> None:
    topics = (
        "orders",
        "%RETRY%billing_orders",
        "%RETRY%billing+orders",
        "%RETRY%billing",
        "%RETRY%billing_",
        "%RETRY%o",
    )
    rows = [("%DLQ%billing", "id", NOON, {"RETRY_TOPIC": topic}) for topic in topics]
    schema = "topic string, msg_id string, store_time timestamp, properties map<string, string>"
    found = letters(spark.createDataFrame(rows, schema), None).collect()
    assert [row["origin_topic"] for row in found] == [popped_topic(topic, "billing") for topic in topics]


def test_chosen_letters_are_sent_once(spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path) -> None:
    give_up_some(mq)
    some = planned(spark, mq, tmp_path, "origin_topic = 'orders' AND tags = 'A'")
    assert [(one.fate, one.topic) for one in some] == [(Fate.PLANNED, "%RETRY%billing")] * 2
    done = resend(some, tmp_path, mq.namesrv, Job(rate=500))
    assert [one.fate for one in done] == [Fate.SENT, Fate.SENT]
    assert sorted(message.body for message in mq.messages(retry_topic(GROUP))) == [b"0", b"2"]
    everything = planned(spark, mq, tmp_path)
    done = resend(everything, tmp_path, mq.namesrv, Job())
    assert sorted(one.fate.value for one in done) == ["sent", "sent", "sent before", "sent before"]
    assert sorted(message.body for message in mq.messages(retry_topic(GROUP))) == [b"0", b"1", b"2", b"paid"]
    (tmp_path / JOURNAL).unlink()  # the console or `downrange dlq resend` sent them: there is no journal of ours
    assert {one.fate for one in resend(everything, tmp_path, mq.namesrv, Job())} == {Fate.SENT_BEFORE}


def test_letters_go_to_their_first_topics(spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path) -> None:
    give_up_some(mq, 1)
    options = {"namesrv": mq.namesrv}
    dlq(spark, tmp_path, options, traces=False)
    job = Job(to_own=True)
    done = resend(chosen(letters_in(spark, tmp_path, options), "true", job), tmp_path, mq.namesrv, job)
    assert [(one.topic, one.fate) for one in done] == [("orders", Fate.SENT), ("payments", Fate.SENT)]
    assert [message.body for message in mq.messages("payments")] == [b"paid", b"paid"]


def test_a_run_that_was_killed_goes_on(spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path) -> None:
    """One letter was noted and sent, one noted and not sent, one failed: each is sent once all in all."""
    give_up_some(mq)
    everything = planned(spark, mq, tmp_path)
    topic = retry_topic(GROUP)
    sent, unsent, failed, _ = everything
    with JournalFile(tmp_path / JOURNAL) as journal:
        journal.intend(unsent.place, topic, mq.messages("orders")[0].store_timestamp)
        journal.intend(failed.place, topic, mq.messages("orders")[0].store_timestamp)
        journal.conclude(failed.place, None, "the broker was away")
    resend([sent], tmp_path, mq.namesrv, Job())
    lines = (tmp_path / JOURNAL).read_bytes().splitlines(keepends=True)
    (tmp_path / JOURNAL).write_bytes(b"".join(lines[:-1]) + lines[-1][:10])  # its outcome was half written
    done = resend(everything, tmp_path, mq.namesrv, Job())
    assert [one.fate for one in done] == [Fate.SENT] * 4
    assert len(mq.messages(topic)) == 4
    assert len({message.unique_key for message in mq.messages(topic)}) == 4
    with JournalFile(tmp_path / JOURNAL) as journal:
        assert all(journal.noted[one.place].sent_as for one in everything)


def test_letters_that_no_broker_has_are_gone(spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path) -> None:
    give_up_some(mq, 1)
    queue, _ = planned(spark, mq, tmp_path)[0].place
    gone = Outcome(GROUP, (queue, 99), "key", retry_topic(GROUP), Fate.PLANNED)
    nobody = Outcome("nobody", (MessageQueue("%DLQ%nobody", "broker-a", 0), 0), "key", "%RETRY%nobody", Fate.PLANNED)
    assert [one.fate for one in resend([gone, nobody], tmp_path, mq.namesrv, Job())] == [Fate.GONE] * 2


def test_wrong_calls() -> None:
    with pytest.raises(OptionError, match="reads the dead-letter topics of all groups"):
        checked_source({"subscribe": "orders"})
    with pytest.raises(PipelineError, match="would never end"):
        Job(rate=0)


def test_the_command_and_the_example_of_the_page(
    spark: SparkSession,
    mq: EmbeddedBroker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @contextmanager
    def shared_session(_: str | None) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr(pipeline_dlq, "spark_session", shared_session)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["downrange", "pipeline", "dlq", "letters", "-n", mq.namesrv, *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        assert ended.value.code == code, shown.err
        return shown.out if code == 0 else shown.err

    give_up_some(mq)
    assert "4 dead letters of 1 groups, 4 of them new" in run()
    assert "belong to --resend" in run("--dry-run", code=2)
    assert "cannot be resolved" in run("--resend", "colour = 'red'", code=2)
    shown = json.loads(run("--resend", "tags = 'B'", "--dry-run", "--json"))
    assert [row["outcome"] for row in shown["outcomes"]] == ["to be sent"]
    assert len(mq.messages(retry_topic(GROUP))) == 0
    assert run("--resend", "tags = 'B'").splitlines()[-1] == "1 dead letters: 1 sent"
    exec(example(PAGE, "pipeline").replace("127.0.0.1:9876", mq.namesrv), {})  # noqa: S102  our own page
    assert "4 dead letters\n" in capsys.readouterr().out
    assert len(mq.messages(retry_topic(GROUP))) == 3
    statuses = [json.loads(message.body) for message in mq.messages("DOWNRANGE_PIPELINES")]
    assert {status["kind"] for status in statuses} == {"dlq"}
