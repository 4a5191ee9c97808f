"""`downrange produce`, `consume` and `dlq` as people run them: processes, pipes and signals."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from downrange import Message, Producer
from downrange.client.config import ClientConfig
from downrange.client.consumer.blocking import PushConsumer
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.retry import Later
from downrange.client.producer.send_result import SendResult
from downrange.client.session import Session
from downrange.testing import EmbeddedBroker, broker
from tests.support.dead_letters import GROUP, dead_letters_are_known, give_up
from tests.support.processes import DOWNRANGE, Running, running


@pytest.fixture
def mq() -> Iterator[EmbeddedBroker]:
    with broker() as running_broker:
        running_broker.create_topic("orders", 4)
        yield running_broker


def run(
    mq: EmbeddedBroker, *arguments: str, given: str | None = None, code: int = 0
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*DOWNRANGE, *arguments],
        input=given,
        stdin=subprocess.DEVNULL if given is None else None,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "NAMESRV_ADDR": mq.namesrv},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def fill(mq: EmbeddedBroker, count: int, start: int = 0, **options: str) -> None:
    producer = mq.producer()
    queues = producer.queues("orders")
    for number in range(start, start + count):
        producer.send(Message("orders", b"%d" % number, **options), queue=queues[number % len(queues)])  # type: ignore[arg-type]
    producer.close()


# --- produce --------------------------------------------------------------------------------------------------------


def test_lines_become_messages(mq: EmbeddedBroker) -> None:
    done = run(
        mq, "produce", "orders", "--tag", "A", "--key", "k1 k2", "--property", "colour=red",
        given="one\n\ntwo\r\nthree",
    )  # fmt: skip
    messages = mq.messages("orders")
    assert sorted(message.body for message in messages) == [b"one", b"three", b"two"]
    assert {(message.tags, *message.keys, message.properties["colour"]) for message in messages} == {
        ("A", "k1", "k2", "red")
    }
    assert done.stdout.startswith("sent 3 messages to orders in ")
    assert done.stderr == ""


def test_a_sharding_key_keeps_the_order_of_a_file(mq: EmbeddedBroker, tmp_path: Path) -> None:
    lines = [f"line {number}" for number in range(200)]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    run(mq, "produce", "orders", "--shard", "customer-7", "--file", str(tmp_path / "lines.txt"))
    messages = mq.messages("orders")
    assert [message.body.decode() for message in messages] == lines
    assert len({message.queue_id for message in messages}) == 1


def test_made_up_messages_for_load(mq: EmbeddedBroker) -> None:
    done = run(mq, "produce", "orders", "--count", "500", "--size", "300")
    messages = mq.messages("orders")
    assert {len(message.body) for message in messages} == {300}
    assert len({message.body for message in messages}) == 500
    assert "p99" in done.stdout


def test_each_send_as_json(mq: EmbeddedBroker) -> None:
    done = run(mq, "produce", "orders", "--json", "--delay", "1", given="one\n")
    row = json.loads(done.stdout)
    assert (row["sendStatus"], row["brokerName"]) == ("SEND_OK", "broker-a")
    assert "sent 1 message to orders" in done.stderr
    assert mq.wait_for("orders", 1, timeout=60)[0].message_id == row["msgId"]


def test_a_line_typed_is_sent_before_the_next_one(mq: EmbeddedBroker) -> None:
    process = subprocess.Popen(
        [*DOWNRANGE, "produce", "orders", "-n", mq.namesrv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    process.stdin.write("first\n")
    process.stdin.flush()
    assert mq.wait_for("orders", 1, timeout=60)[0].body == b"first"
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert output.startswith("sent 1 message to orders")
    assert process.returncode == 0


def test_an_interrupted_load_says_so(mq: EmbeddedBroker) -> None:
    with running("produce", "orders", "--count", "100000000", "-n", mq.namesrv) as process:
        mq.wait_for("orders", 1, timeout=60)
        process.signal(signal.SIGTERM)
        assert process.wait() == 130
        assert "interrupted" in process.errors
        sent = int(process.output[0].split()[1].replace(",", ""))
    assert sent == len(mq.messages("orders"))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--file", "nowhere.txt"], "cannot read nowhere.txt: No such file or directory"),
        (["--size", "3"], "--count"),
        (["--count", "3", "--file", "x"], "give only one of them"),
        (["--property", "colour"], "not key=value"),
    ],
)
def test_a_command_line_that_cannot_work(mq: EmbeddedBroker, arguments: list[str], problem: str) -> None:
    done = run(mq, "produce", "orders", *arguments, code=2)
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_cannot_be_sent_is_told_in_one_line(mq: EmbeddedBroker) -> None:
    done = run(mq, "produce", "bad topic", given="one\ntwo\n", code=2)
    assert "illegal characters" in done.stderr
    assert done.stderr.count("\n") == 1
    done = run(mq, "produce", "orders", "--property", "TAGS=x", given="one\ntwo\n", code=1)
    assert done.stderr.startswith("downrange: message 1: the property name TAGS is reserved")
    assert done.stderr.count("\n") == 1
    nobody = subprocess.run(
        [*DOWNRANGE, "produce", "orders", "-n", "127.0.0.1:1"], input="one\n", capture_output=True, text=True
    )
    assert nobody.returncode == 1
    assert nobody.stderr.count("\n") == 1


# --- consume --------------------------------------------------------------------------------------------------------


def test_everything_there_is_printed_once_and_that_is_all(mq: EmbeddedBroker) -> None:
    fill(mq, 100)
    assert sorted(map(int, run(mq, "consume", "orders").stdout.split())) == list(range(100))
    assert len(run(mq, "consume", "orders").stdout.split()) == 100  # nothing was committed


def test_a_group_goes_on_where_it_was(mq: EmbeddedBroker) -> None:
    fill(mq, 100)
    first = run(mq, "consume", "orders", "--group", "readers", "--limit", "37").stdout.split()
    second = run(mq, "consume", "orders", "--group", "readers").stdout.split()
    assert len(first) == 37
    assert sorted(map(int, first + second)) == list(range(100))
    third = run(mq, "consume", "orders", "--group", "readers")
    assert (third.stdout, third.stderr) == ("", "downrange: no messages\n")


def test_messages_as_json_and_with_their_place(mq: EmbeddedBroker) -> None:
    fill(mq, 1, tags="A", keys="k1")
    row = json.loads(run(mq, "consume", "orders", "--json").stdout)
    assert (row["body"], row["tags"], row["keys"], row["brokerName"], row["queueOffset"]) == (
        "0", "A", ["k1"], "broker-a", 0,
    )  # fmt: skip
    line = run(mq, "consume", "orders", "-v").stdout
    assert line.endswith("broker-a:0@0 tag=A keys=k1  0\n")


def test_messages_in_a_form_of_ones_own(mq: EmbeddedBroker) -> None:
    """The letters of kcat, and those of RocketMQ's own fields; bodies stay the bytes that they are."""
    with Producer("test", mq.namesrv) as producer:
        queue = producer.queues("orders")[2]
        message = Message("orders", b"\xff one\n", tags="paid", keys="a b", properties={"region": "eu"})
        sent = producer.send(message, queue=queue)
    command = [*DOWNRANGE, "consume", "orders", "-n", mq.namesrv, "-f"]
    layout = r"%t[%p]@%o %g %k(%K) %s(%S) %b %i %%\x21\t"
    shown = subprocess.run([*command, layout], capture_output=True, timeout=60, check=True).stdout
    place = b"orders[2]@0 paid a b(3) "
    assert shown == place + b"\xff one\n(6) " + f"{queue.broker_name} {sent.message_id} %!\t".encode()
    shown = subprocess.run([*command, "%h %T"], capture_output=True, timeout=60, check=True).stdout
    assert b"region=eu" in shown
    assert abs(int(shown.split()[-1]) - time.time() * 1000) < 600_000
    assert "%z is none of %t" in run(mq, "consume", "orders", "-f", "%z", code=2).stderr
    assert r"\q is none of \n" in run(mq, "consume", "orders", "-f", r"\q", code=2).stderr
    assert "leave out --json" in run(mq, "consume", "orders", "-f", "%s", "--json", code=2).stderr


def test_only_the_tags_asked_for(mq: EmbeddedBroker) -> None:
    fill(mq, 10, tags="A")
    fill(mq, 10, start=10, tags="B")
    assert sorted(map(int, run(mq, "consume", "orders", "--tag", "B || C").stdout.split())) == list(range(10, 20))
    assert run(mq, "consume", "orders", "--tag", "C").stdout == ""


def test_only_what_an_expression_matches(mq: EmbeddedBroker) -> None:
    for price in (5, 50, 500):
        run(mq, "produce", "orders", "--property", f"price={price}", given=f"costs {price}\n")
    assert sorted(run(mq, "consume", "orders", "--sql", "price > 10").stdout.splitlines()) == ["costs 50", "costs 500"]
    refused = run(mq, "consume", "orders", "--sql", "price > > 10", code=1)
    assert refused.stderr.count("\n") == 1
    assert "cannot be combined" in run(mq, "consume", "orders", "--sql", "a > 1", "--tag", "A", code=2).stderr


def test_where_to_begin(mq: EmbeddedBroker) -> None:
    fill(mq, 8)
    assert run(mq, "consume", "orders", "--from", "last").stdout == ""
    assert len(run(mq, "consume", "orders", "--from", "2001-01-01 00:00").stdout.split()) == 8
    done = run(mq, "consume", "orders", "--from", "yesterday-ish", code=2)
    assert "not a time" in done.stderr


def test_following_prints_what_comes_until_it_is_told_to_stop(mq: EmbeddedBroker) -> None:
    fill(mq, 4)
    with running("consume", "orders", "--group", "readers", "--follow", "-n", mq.namesrv) as process:
        for number in range(4):
            process.wait_for(f"^{number}$")
        fill(mq, 4, start=4)
        for number in range(4, 8):
            process.wait_for(f"^{number}$")
        assert process.stop() == 0
        assert process.errors == ""
    assert run(mq, "consume", "orders", "--group", "readers").stdout == ""  # all was committed on the way out


def test_popped_messages_are_acknowledged_one_by_one(mq: EmbeddedBroker) -> None:
    fill(mq, 40, tags="A")
    pop = ("consume", "orders", "--group", "readers", "--pop")
    first = run(mq, *pop, "--limit", "15", "--tag", "A").stdout.split()
    assert len(first) == 15
    rest = [json.loads(line)["body"] for line in run(mq, *pop, "--json", "--tag", "A").stdout.splitlines()]
    assert sorted(map(int, first + rest)) == list(range(40))
    done = run(mq, *pop)
    assert (done.stdout, done.stderr) == ("", "downrange: no messages\n")
    with running(*pop, "--follow", "-n", mq.namesrv) as process:
        fill(mq, 4, start=40)
        for number in range(40, 44):
            process.wait_for(f"^{number}$")
        assert process.stop() == 0
        assert process.errors == ""
    assert run(mq, *pop).stdout == ""
    assert "--pop needs --group" in run(mq, "consume", "orders", "--pop", code=2).stderr
    assert "not at a time" in run(mq, *pop, "--from", "2001-01-01", code=2).stderr
    assert "no broker serves the topic nowhere" in run(mq, "consume", "nowhere", *pop[2:], code=1).stderr


def test_a_timer_message_is_recalled() -> None:
    with broker({"recallMessageEnable": "true"}) as mq:
        mq.create_topic("orders", 1)
        line = json.loads(
            run(mq, "produce", "orders", "--delay", "1h", "--json", given="later\n").stdout.splitlines()[0]
        )
        done = run(mq, "message", "recall", line["recallHandle"])
        assert done.stdout == f"message {line['msgId']} recalled\n"
        assert "is no recall handle" in run(mq, "message", "recall", "nonsense", code=2).stderr


def test_control_characters_do_not_reach_the_terminal(mq: EmbeddedBroker) -> None:
    mq.producer().send(Message("orders", b"red \x1b[31m\xff"))
    assert run(mq, "consume", "orders").stdout == "red \N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}\n"


def test_a_reader_that_goes_away_ends_it_quietly_and_the_rest_is_left(mq: EmbeddedBroker) -> None:
    fill(mq, 400)
    with subprocess.Popen(
        [*DOWNRANGE, "consume", "orders", "--group", "readers", "-n", mq.namesrv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # before the first write
        assert process.stderr.read() == b""
        assert process.wait(30) == 0
    assert len(run(mq, "consume", "orders", "--group", "readers").stdout.split()) == 400


def test_a_topic_that_is_not_there(mq: EmbeddedBroker) -> None:
    for group in ((), ("--group", "readers"), ("--group", "readers", "--pop")):
        done = run(mq, "consume", "nowhere", *group, code=1)
        assert "no broker serves the topic nowhere" in done.stderr
        assert done.stderr.count("\n") == 1
        done = run(mq, "consume", "order", *group, code=1)
        assert done.stderr.endswith("; did you mean orders?\n")
        assert done.stderr.count("\n") == 1
    assert run(mq, "topic", "status", "order", code=1).stderr.endswith("; did you mean orders?\n")
    assert "did you mean" not in run(mq, "message", "view", "0A", "--topic", "orders", code=1).stderr


def test_following_waits_for_a_topic_that_is_not_there_yet(mq: EmbeddedBroker) -> None:
    with running("consume", "later", "--group", "readers", "--pop", "--follow", "-n", mq.namesrv) as process:
        end = time.monotonic() + 60
        while "no broker serves the topic later" not in process.errors:
            assert process.is_running
            assert time.monotonic() < end
            time.sleep(0.05)
        mq.create_topic("later", 1)
        mq.producer().send(Message("later", b"here"))
        process.wait_for("^here$")
        assert process.stop() == 0


def test_progress_is_shown_on_a_terminal_and_only_there(mq: EmbeddedBroker) -> None:
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        [*DOWNRANGE, "produce", "orders", "--count", "100000000", "-n", mq.namesrv],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=end,
    )  # fmt: skip
    os.close(end)
    shown = b""
    try:
        while b" of 100,000,000 messages, " not in shown:
            shown += os.read(terminal, 65536)
        process.send_signal(signal.SIGTERM)
        with suppress(OSError):  # nobody has the other end any more
            while part := os.read(terminal, 65536):
                shown += part
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait(60)
        os.close(terminal)
    assert shown.rpartition(b"messages, ")[2].partition(b"/s")[2].startswith(b"\r\x1b[K")  # wiped away at the end


# --- groups of processes --------------------------------------------------------------------------------------------


def test_processes_of_a_group_lose_nothing_when_one_is_killed_and_one_is_stopped(mq: EmbeddedBroker) -> None:
    consumers = [
        Running("consume", "orders", "--group", "readers", "--follow", "--from", "first", "-n", mq.namesrv)
        for _ in range(3)
    ]
    count = 0
    deadline = time.monotonic() + 60
    try:
        with Producer("writers", mq.namesrv) as producer:

            def produce(least: int, enough: Callable[[], bool] = lambda: True) -> None:
                nonlocal count
                least += count
                while count < least or not enough():
                    assert time.monotonic() < deadline
                    sent = producer.send_all(Message("orders", b"%d x" % (count + n)) for n in range(100))
                    assert all(isinstance(result, SendResult) for result in sent)
                    count += 100
                    time.sleep(0.02)

            produce(3000, lambda: all(consumer.output for consumer in consumers))
            consumers[0].kill()
            produce(1000)
            assert consumers[1].stop() == 0
            produce(2000)
        deadline = time.monotonic() + 60
        while len({line for each in consumers for line in each.output}) < count and time.monotonic() < deadline:
            time.sleep(0.05)
        assert consumers[2].stop() == 0
        seen = Counter(line for consumer in consumers for line in consumer.output)
    finally:
        for consumer in consumers:
            consumer.close()
    assert len(seen) == count
    # The killed one had up to five seconds of its queues uncommitted. Of the others at most the batch in hand is read
    # again when a queue changes hands, which it does a few times here.
    by_the_killed = set(consumers[0].output)
    assert sum(times - 1 for line, times in seen.items() if line not in by_the_killed) <= 10 * 32


# --- dead letters ---------------------------------------------------------------------------------------------------


def test_dead_letters_from_list_to_a_second_chance(mq: EmbeddedBroker, tmp_path: Path) -> None:
    give_up_three(mq)
    rows = json.loads(run(mq, "dlq", "list", GROUP, "--json").stdout)["letters"]
    assert [(row["body"], row["originTopic"], row["resent"]) for row in rows] == [
        (str(number), "orders", False) for number in range(3)
    ]
    assert "3 of 3 dead letters of billing" in run(mq, "dlq", "list", GROUP).stdout

    run(mq, "dlq", "export", GROUP, "--file", str(tmp_path / "letters.jsonl"))
    exported = [json.loads(line) for line in (tmp_path / "letters.jsonl").read_text().splitlines()]
    assert [row["msgId"] for row in exported] == [row["msgId"] for row in rows]
    assert len(run(mq, "dlq", "export", GROUP).stdout.splitlines()) == 3

    assert "3 dead letters would be sent again" in run(mq, "dlq", "resend", GROUP, "--dry-run").stdout
    assert mq.messages("%RETRY%billing") == []
    sent = run(mq, "dlq", "resend", GROUP, "--json").stdout.splitlines()
    assert [json.loads(line)["outcome"] for line in sent] == ["sent"] * 3
    assert [message.body for message in mq.messages("%RETRY%billing")] == [b"0", b"1", b"2"]
    assert "0 dead letters sent again" in run(mq, "dlq", "resend", GROUP).stdout
    assert "1 dead letters sent again" in run(mq, "dlq", "resend", GROUP, "--id", rows[1]["msgId"]).stdout


def test_a_running_consumer_gets_its_dead_letters_again(mq: EmbeddedBroker) -> None:
    handled: list[tuple[str, bytes, int]] = []
    second_chance = threading.Event()

    def handle(message: ReceivedMessage) -> Later | None:
        handled.append((message.topic, message.body, message.reconsume_times))
        if len(handled) == 1:
            return Later(delay_level=-1)
        second_chance.set()
        return None

    consumer = PushConsumer(GROUP, mq.namesrv, on_message=handle)
    consumer.subscribe("orders")
    with consumer:
        mq.producer().send(Message("orders", b"difficult"))
        mq.wait_for(f"%DLQ%{GROUP}", 1, timeout=60)
        in_session(mq, dead_letters_are_known)
        run(mq, "dlq", "resend", GROUP)
        assert second_chance.wait(30)
    assert handled == [("orders", b"difficult", 0), ("orders", b"difficult", 0)]


def test_dead_letters_that_cannot_be_sent(mq: EmbeddedBroker) -> None:
    give_up_three(mq)
    done = run(mq, "dlq", "resend", GROUP, "--topic", "SCHEDULE_TOPIC_XXXX", code=1)
    assert "0 dead letters sent again, 3 failed" in done.stdout
    assert done.stderr.count("\n") == 3


def test_a_group_nobody_knows_has_no_dead_letters(mq: EmbeddedBroker) -> None:
    assert "no broker knows the consumer group nobody" in run(mq, "dlq", "list", "nobody", code=1).stderr


def give_up_three(mq: EmbeddedBroker) -> None:
    in_session(mq, lambda session: give_up(mq, session, *(Message("orders", b"%d" % number) for number in range(3))))


def in_session(mq: EmbeddedBroker, work: Callable[[Session], Awaitable[None]]) -> None:
    async def main() -> None:
        async with Session(ClientConfig.of(mq.namesrv)) as session:
            await work(session)

    asyncio.run(main())
