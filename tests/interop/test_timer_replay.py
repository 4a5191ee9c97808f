"""What genuine clients of 5.3.3 sent to a genuine 5.3.3 broker about timer messages, sent to ours.

The broker goes from scenario to scenario as the genuine one did. Differences that we want are in the table, with the
reason for each.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from downrange.broker.app import broker
from downrange.broker.config import BrokerConfig
from downrange.clock import ManualClock
from downrange.model.message import StoredMessage
from downrange.protocol.bodies.send import SendMessageRequest
from downrange.protocol.codes import RequestCode
from downrange.store.config import StoreConfig
from tests.support.golden import scenarios
from tests.support.replay import Difference, Replay, decode

ARCHIVE = "timer-533.tar.xz"
SCENARIOS = ("timer_send", "timer_recall", "timer_pending", "timer_delete")
# 5.3.3 stores these with every message; 4.9.8 and this broker do not. The last one is the time of this very run.
NOT_COMPARED = ("MSG_REGION", "TRACE_ON", "WAIT", "TIMER_DEQUEUE_MS")


class TimerReplay(Replay):
    """Compares records without what 5.3.3 adds to all of them."""

    def _plain(self, message: StoredMessage) -> dict[str, object]:
        plain = super()._plain(message)
        properties = {name: value for name, value in message.properties.items() if name not in NOT_COMPARED}
        return {**plain, "properties": properties, "size": None}


class OnPurpose(NamedTuple):
    """A difference we want: to which request, in what, where the genuine answer looks so, and why."""

    request: int
    what: str
    golden: str
    because: str


SEND = RequestCode.SEND_MESSAGE_V2
ON_PURPOSE = [
    OnPurpose(SEND, "ext field names", "'transactionId'", "5.x repeats the unique id, which the client has sent"),
    OnPurpose(SEND, "ext field queueOffset", "^'5'$", "a half message: see the line about its handle"),
    OnPurpose(
        SEND,
        "ext field queueOffset",
        "^'(7|11|12|13|14|15|16|17)'$",
        "one less in the timer topic: the half message of timer_send waits in the half topic here",
    ),
    OnPurpose(
        SEND,
        "ext field queueOffset",
        "^'1(17|18|19|26)'$",
        "the genuine broker took messages that were not captured, before timer_delete",
    ),
    OnPurpose(RequestCode.HEART_BEAT, "ext field names", "IS_SUB_CHANGE", "heartbeats of 4.9.8 have none"),
    OnPurpose(RequestCode.PULL_MESSAGE, "ext field names", "topicSysFlag", "5.x tells flags of topic and group"),
    OnPurpose(
        RequestCode.GET_TIMER_CHECK_POINT,
        "checkpoint",
        "",
        "ours is of the moment it was saved last; the half message is not in it",
    ),
    OnPurpose(
        RequestCode.GET_TIMER_METRICS,
        "body",
        "",
        "RocketMQ counts a deletion as a message that left, and ends below zero; half messages are not timed here",
    ),
]


def purpose_of(difference: Difference) -> OnPurpose | None:
    return next(
        (
            wanted
            for wanted in ON_PURPOSE
            if wanted.request == difference.request
            and wanted.what == difference.what
            and re.search(wanted.golden, repr(difference.golden))
        ),
        None,
    )


def begin_of(scenario: str) -> int:
    """When a scenario began: the messages say when they were born."""
    rows = [row for row in scenarios(ARCHIVE)[scenario] if row.code == SEND and not row.is_response]
    return max(decode(row.frame).header(SendMessageRequest).born_timestamp - row.millis for row in rows)


async def test_our_broker_answers_what_the_genuine_one_answered(tmp_path: Path) -> None:
    config = BrokerConfig(
        broker_name="broker-a", broker_ip1="127.0.0.1", listen_port=0, metrics_port=-1, recall_message_enable=True
    )
    store = StoreConfig(store_path_root_dir=tmp_path, mapped_file_size_commit_log=1 << 20, timer_roll_window_slot=12)
    clock = ManualClock(begin_of(f"timer-533/{SCENARIOS[0]}") - 1000)
    differences: list[Difference] = []
    async with broker(config, store, clock) as running:
        replay = TimerReplay(running.server.port, running.server.port - 2, clock)
        for name in SCENARIOS:
            scenario = f"timer-533/{name}"
            replay.archive = ARCHIVE
            differences += await replay.play(scenario, begin_of(scenario))
    unwanted = [str(difference) for difference in differences if not purpose_of(difference)]
    assert not unwanted, "\n".join(unwanted)
    assert replay.compared > 80
    gone = {wanted for wanted in ON_PURPOSE if wanted not in set(map(purpose_of, differences))}
    assert not gone, f"these answers are the same now: {gone}"
