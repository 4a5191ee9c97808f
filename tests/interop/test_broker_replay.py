"""What genuine clients sent to a genuine broker, sent to ours: the answers must be the same.

A capture is one long run against one broker, so its scenarios are played in the order they happened. Messages get the
same queue offsets, the same sizes and, but for the shift by what is left out, the same places in the log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from downrange.broker.app import broker
from downrange.broker.config import BrokerConfig
from downrange.clock import ManualClock
from downrange.protocol.bodies.send import SendMessageRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request
from downrange.store.config import StoreConfig
from tests.support.broker_client import client_of
from tests.support.replay import Difference, Replay

# Left out: what concerns other parts (name server, registration, access control).
BASICS = ["topic_admin", "route_query", "send_basic", "send_v1", "send_batch"]
OF_498_JSON = [
    *BASICS,
    *("send_delay", "send_compressed", "send_ordered", "push_concurrent", "push_orderly", "rebalance_two", "retry_dlq"),
    *("broadcasting", "transaction", "request_reply", "query_message", "offsets", "pull_consumer", "admin_consumer"),
    *("cluster_admin", "trace", "namespace_vip", "wrong_requests", "sql_filter"),
]
OF_498_BINARY = [
    *BASICS,
    *("send_compressed", "send_ordered", "push_concurrent", "push_orderly", "retry_dlq", "transaction"),
    *("request_reply", "query_message", "offsets", "pull_consumer", "wrong_requests"),
]
OF_533_CLIENT = [
    *("topic_admin", "route_query", "send_basic", "send_batch", "send_compressed", "send_ordered", "push_concurrent"),
    *("push_orderly", "retry_dlq", "broadcasting", "transaction", "request_reply", "query_message", "offsets"),
    *("pull_consumer", "admin_consumer", "sql_filter", "trace"),
]
RUNS = {
    # The genuine broker went on with the second capture where the first had ended.
    "4.9.8 client, JSON headers, then binary ones": [
        *(f"498-json/{name}" for name in OF_498_JSON),
        *(f"498-binary/{name}" for name in OF_498_BINARY),
    ],
    "5.3.3 client": [f"533-client-498-server/{name}" for name in OF_533_CLIENT],
    "4.9.8 client, offsets reset": ["498-json/reset_offset"],
}


class StandIn(NamedTuple):
    """A message the genuine broker had from a scenario that is left out."""

    topic: str
    queue_id: int
    body: bytes = b"stand-in"
    properties: Mapping[str, str] = {}
    born_timestamp: int = 1_794_732_467_000


# Scenario -> what was there before it.
STAND_INS = {
    "533-client-498-server/query_message": [
        # An earlier try of this scenario that was not captured.
        StandIn(
            "gsc5TopicA",
            0,
            b"find me 7b140e2255b8a672",
            {"KEYS": "gsc5find1 gsc5find2", "UNIQ_KEY": "0A0000096FEF4E0E2F2A4A022EE5001F", "TAGS": "TagQ"},
            1_794_732_857_061,
        ),
        StandIn(
            "gsc5TopicA",
            1,
            b"find me too c9fca2dfabdbecd1",
            {"KEYS": "gsc5find1", "UNIQ_KEY": "0A0000096FEF4E0E2F2A4A022F400020", "TAGS": "TagQ"},
            1_794_732_857_152,
        ),
    ],
}


class OnPurpose(NamedTuple):
    """A difference we want: to which request, in what, where the genuine answer looks so, and why."""

    request: int
    what: str
    golden: str
    because: str
    place: str = ""


ANY_REQUEST = 0
ON_PURPOSE = [
    OnPurpose(
        ANY_REQUEST,
        "header encoding",
        "^0$",
        "Java answers a binary request in JSON when it fails, was held, or is answered from a file; we keep the "
        "encoding of the request",
        "498-binary",
    ),
    OnPurpose(
        RequestCode.PULL_MESSAGE,
        "code",
        "^25$",
        "Java lets a pull overtake the heartbeat before it, and finds its subscription too old; we keep their order",
    ),
    OnPurpose(
        RequestCode.LITE_PULL_MESSAGE,
        "code",
        "^3$",
        "we serve this request of 5.x",
    ),
    OnPurpose(
        RequestCode.GET_TOPIC_CONFIG,
        "code",
        "^3$",
        "we serve this request of 5.x",
    ),
    *(
        OnPurpose(
            code,
            "ext field names",
            "AccessKey.*Signature",
            "a client could use the operator's signature for itself: what is relayed to it goes without",
        )
        for code in (RequestCode.GET_CONSUMER_RUNNING_INFO, RequestCode.CONSUME_MESSAGE_DIRECTLY)
    ),
    OnPurpose(
        RequestCode.GET_BROKER_RUNTIME_INFO,
        "keys",
        "",
        "we show the keys of 5.x about timer messages, too",
    ),
    OnPurpose(
        RequestCode.QUERY_CONSUME_TIME_SPAN,
        "body",
        "TimeStampStr",
        "Java adds each time once more as text; nobody reads it",
    ),
    OnPurpose(
        RequestCode.GET_BROKER_CONSUME_STATS,
        "body",
        "cg_reply",
        "a client that leaves a group does not create it here, as gscg_off was",
        "admin_consumer",
    ),
    OnPurpose(
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
        "body",
        "gscg_reply",
        "names groups of scenarios that are left out, and gscg_off",
        "498-binary/topic_admin",
    ),
]


def purpose_of(difference: Difference) -> OnPurpose | None:
    for wanted in ON_PURPOSE:
        if (
            wanted.request in (ANY_REQUEST, difference.request)
            and difference.what == wanted.what
            and re.search(wanted.golden, repr(difference.golden))
            and wanted.place in difference.place
        ):
            return wanted
    return None


@pytest.fixture(scope="module")
def met() -> dict[str, set[OnPurpose]]:
    """Run -> the purposes of the differences seen in it."""
    return {}


@pytest.mark.parametrize("run", RUNS)
async def test_our_broker_answers_what_the_genuine_one_answered(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, met: dict[str, set[OnPurpose]]
) -> None:
    # A message for queue -1 goes to any queue; both genuine captures have it in queue 1.
    monkeypatch.setattr("downrange.broker.handlers.send_reader.random.randrange", lambda queues: 1 % queues)
    config = BrokerConfig(
        broker_name="broker-a",
        broker_ip1="10.0.0.1",
        listen_port=0,
        metrics_port=-1,
        trace_topic_enable=True,
        transaction_time_out=1000,
        transaction_check_interval=3_600_000,
    )
    store = StoreConfig(store_path_root_dir=tmp_path, mapped_file_size_commit_log=1 << 20)
    clock = ManualClock(1_794_732_390_000)
    differences: list[Difference] = []
    async with broker(config, store, clock) as running:
        replay = Replay(running.server.port, running.server.port - 2, clock)
        replay.before_push[RequestCode.CHECK_TRANSACTION_STATE] = running.transactions.check
        async with client_of(running) as client:
            for scenario in RUNS[run]:
                for message in STAND_INS.get(scenario, ()):
                    command = client.send_command(
                        message.topic, message.body, queue_id=message.queue_id, properties=message.properties
                    )
                    header = msgspec.structs.replace(
                        command.header(SendMessageRequest), born_timestamp=message.born_timestamp
                    )
                    await client.ask(request(command.code, header, body=message.body))
                differences += await replay.play(scenario)
    met[run] = {purpose for difference in differences if (purpose := purpose_of(difference))}
    unwanted = [str(difference) for difference in differences if not purpose_of(difference)]
    assert not unwanted, "\n".join(unwanted)
    assert replay.compared > 50


def test_every_difference_on_purpose_is_still_there(met: dict[str, set[OnPurpose]]) -> None:
    if met.keys() != RUNS.keys():
        pytest.skip("not all runs were played")
    gone = set(ON_PURPOSE) - set().union(*met.values())
    assert not gone, f"these answers are the same now: {gone}"
