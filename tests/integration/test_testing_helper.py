"""The embedded broker of `downrange.testing`, and the pytest fixture made of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import pytest

import downrange.testing
from downrange import Message
from downrange.client.errors import NoRoute
from downrange.clock import ManualClock
from downrange.settings import ConfigError
from tests.support.processes import DOWNRANGE

ROOT = Path(__file__).parents[2]


def test_what_is_sent_is_there() -> None:
    with downrange.testing.broker() as mq:
        producer = mq.producer()
        for number in range(5):
            producer.send(Message("orders", b"%d" % number, tags="A", keys=f"k{number}"))
        messages = mq.messages("orders")
        assert [message.body for message in messages] == [b"0", b"1", b"2", b"3", b"4"]
        assert (messages[0].topic, messages[0].tags, messages[0].keys) == ("orders", "A", ["k0"])
        assert mq.messages("nothing") == []


def test_each_broker_is_empty_and_on_its_own() -> None:
    with downrange.testing.broker() as one, downrange.testing.broker() as two:
        assert one.namesrv != two.namesrv
        one.producer().send(Message("orders", b"x"))
        assert len(one.messages("orders")) == 1
        assert two.messages("orders") == []
        directory = one.data
        assert directory.exists()
    assert not directory.exists()


def test_nothing_is_left_of_it() -> None:
    before = set(threading.enumerate())
    with downrange.testing.broker() as mq:
        mq.producer().send(Message("orders", b"x"))
    assert set(threading.enumerate()) <= before  # threads of other tests may end any time


def test_a_directory_of_ones_own_is_kept(tmp_path: Path) -> None:
    with downrange.testing.broker(data=tmp_path) as mq:
        mq.producer().send(Message("orders", b"kept"))
    with downrange.testing.broker(data=tmp_path) as mq:
        assert [message.body for message in mq.messages("orders")] == [b"kept"]


def test_settings_are_those_of_a_broker_conf() -> None:
    with downrange.testing.broker({"autoCreateTopicEnable": "false"}) as mq:
        with pytest.raises(NoRoute):
            mq.producer().send(Message("unknown", b"x"))
        mq.create_topic("known", 2)
        mq.producer().send(Message("known", b"x"))
    with (
        pytest.raises(ConfigError, match="autoCreateTopicEnabel"),
        downrange.testing.broker({"autoCreateTopicEnabel": "false"}),
    ):
        pass


def test_time_can_be_moved() -> None:
    with downrange.testing.broker(clock=ManualClock()) as mq:
        mq.producer().send(Message("orders", b"later", delay_level=4))  # 30 s
        mq.advance(29)
        assert mq.messages("orders") == []
        mq.advance(2)
        assert [message.body for message in mq.messages("orders")] == [b"later"]
    with downrange.testing.broker() as mq, pytest.raises(RuntimeError, match="clock=ManualClock"):
        mq.advance(1)


def test_messages_can_be_waited_for() -> None:
    with downrange.testing.broker() as mq:
        producer = mq.producer()
        sender = threading.Timer(0.02, lambda: producer.send(Message("orders", b"x")))
        sender.start()
        assert [message.body for message in mq.wait_for("orders", 1, timeout=30)] == [b"x"]
        sender.join()
        with pytest.raises(TimeoutError, match="1 of 2 messages in orders"):
            mq.wait_for("orders", 2, timeout=0.05)


def test_other_programs_can_use_it() -> None:
    with downrange.testing.broker() as mq:
        done = subprocess.run(
            [*DOWNRANGE, "message", "send", "hello", "from outside", "-n", mq.namesrv],
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, done.stderr
        assert mq.messages("hello")[0].body == b"from outside"


def test_it_starts_in_well_under_a_second() -> None:
    with downrange.testing.broker():  # imports are paid once
        pass
    starts = []
    for _ in range(3):
        begun = time.process_time()  # what others do on this machine meanwhile does not count
        with downrange.testing.broker():
            starts.append(time.process_time() - begun)
    assert min(starts) < 0.5


def test_the_pytest_fixture(tmp_path: Path) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    assert declared == {"downrange": "downrange.testing.plugin"}
    (tmp_path / "test_orders.py").write_text(
        "from downrange import Message\n\n\n"
        "def test_an_order_is_sent(rocketmq):\n"
        "    rocketmq.producer().send(Message('orders', b'one'))\n"
        "    assert [message.body for message in rocketmq.messages('orders')] == [b'one']\n"
    )
    done = subprocess.run(
        # Named here instead of found by its entry point: this must hold before the package is installed anew.
        [sys.executable, "-m", "pytest", "-q", "-p", declared["downrange"], "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
