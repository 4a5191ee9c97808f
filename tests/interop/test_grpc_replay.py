"""Captured conversations of the proxy of 5.3.3, played again against our gRPC port."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.model.topics import SubscriptionGroupConfig
from downrange.protocol.bodies.users import AclInfo, PolicyEntryInfo, PolicyInfo, UserInfo
from downrange.proxy.wire.enums import Code
from tests.support.grpc_cluster import grpc_cluster
from tests.support.grpc_replay import Replay, conversations, groups_of, queues_of, seconds_of, topics_of


class Different(NamedTuple):
    """An answer of ours that is not the captured one."""

    scenario: str
    note: str
    code: Code | None
    """None: of several calls with this note, each has its own."""
    why: str


SHORT = "it polls as long as the client waits"
AT_ONCE = "a message that failed comes with a receive that waits, not with the next one"
NO_HANDLE = "clients try any other code again, for ever"
DIFFERENCES = [
    Different("raw_route", "route: no endpoints", Code.OK, "clients need an address: ours is the one of this server"),
    Different("raw_send", "batch of three", Code.OK, "an entry for each message, as clients expect"),
    Different("raw_send", "read back", Code.OK, "messages of a batch keep their ids and tags; bodies are sent plain"),
    Different("raw_send_refused", "topic does not exist", Code.TOPIC_NOT_FOUND, "says what is wrong"),
    Different("raw_send_refused", "batch of FIFO messages, same group", Code.OK, "an entry for each message"),
    Different("raw_send_refused", "batch of FIFO messages, two groups", Code.OK, "an entry for each message"),
    Different("raw_send_refused", "batch of DELAY messages", Code.OK, "an entry for each message"),
    Different("raw_send_refused", "batch of TRANSACTION messages", Code.INTERNAL_SERVER_ERROR, "says what is wrong"),
    Different("raw_receive", "receive before any settings were sent", Code.MESSAGE_NOT_FOUND, "needs no settings"),
    Different("raw_receive", "no long_polling_timeout, deadline 4 s", Code.MESSAGE_NOT_FOUND, SHORT),
    Different("raw_receive", "long polling 20 s, deadline 3 s", Code.MESSAGE_NOT_FOUND, SHORT),
    Different("raw_receive", "change: nonsense handle", Code.INVALID_RECEIPT_HANDLE, NO_HANDLE),
    Different("raw_receive", "ack: nonsense handle", Code.INVALID_RECEIPT_HANDLE, NO_HANDLE),
    Different("raw_receive", "ack: other topic", Code.INVALID_RECEIPT_HANDLE, NO_HANDLE),
    Different("raw_receive", "ack several, one of them nonsense", Code.MULTIPLE_RESULTS, NO_HANDLE),
    Different("raw_receive", "illegal SQL expression", Code.ILLEGAL_FILTER_EXPRESSION, "it is the client's fault"),
    Different("raw_renew", "forward to dead letter queue", Code.OK, "its text is OK, not 0"),
    Different("raw_renew", "forward with a nonsense handle", Code.INVALID_RECEIPT_HANDLE, NO_HANDLE),
    Different("raw_renew", "receive from the dead letter topic", Code.OK, "DELAY=0 does not make a delayed message"),
    Different("raw_transaction", "commit again", Code.OK, "a client whose answer was lost may ask again"),
    Different("node_push", "send p3", Code.OK, AT_ONCE),
    Different("node_push", "consume; p2 fails the first time", None, AT_ONCE + ", so captured acks are early here"),
    Different(
        "py_push_fifo_dlq",
        "FIFO push consumer, poison always fails, retryMaxTimes=1: forwarded to DLQ",
        Code.OK,
        "its text is OK, not 0",
    ),
    Different("node_push_fifo", "FIFO push consumer; o1 fails twice", Code.OK, "its text is OK, not 0"),
    Different("raw_transaction", "wrong message id", Code.OK, "the transaction id counts, and it has ended so"),
]
KINDS = {
    "GRawFifo": "FIFO", "GRawTx": "TRANSACTION", "GRawRecall": "DELAY", "GNodeDelayRecall": "DELAY",
    "GNodeFifo": "FIFO", "GNodePushFifo": "FIFO", "GNodeTransaction": "TRANSACTION", "GPyDelay": "DELAY",
    "GPyPushFifo": "FIFO", "GPyFifoDlq": "FIFO", "GPyRefF": "FIFO", "GPyFifo": "FIFO", "GPyTx": "TRANSACTION",
}  # fmt: skip
SUFFIXES = {"F": "FIFO", "D": "DELAY", "T": "TRANSACTION"}
RETRIES = {"g_raw_tel_q": 3, "g_raw_renew": 2, "g_node_push_dlq": 1, "g_py_dlq": 1, "g_py_fdlq": 1}
ORDERLY = {
    "g_raw_tel_o", "g_raw_assign_fifo", "g_raw_fifo", "g_node_fifo", "g_node_push_fifo", "g_py_pfifo", "g_py_fdlq",
}  # fmt: skip
MISSING = {"GNoSuch", "GNoSuchTopic", "GNoSuchTopic2", "g_never_made"}
ONE_QUEUE = {"raw_receive", "raw_renew", "raw_fifo", "raw_recall", "raw_transaction"}
WITH_PAUSES = {"raw_fifo", *(name for name in conversations() if name.startswith(("node_", "py_")))}
SLOW = {"raw_receive", "raw_renew", "raw_recall", *(name for name in WITH_PAUSES if seconds_of(name) > 5)}
SETTINGS = {"transactionCheckInterval": 1000, "transactionTimeOut": 9000, "recallMessageEnable": "true"}


def kind_of(topic: str) -> str:
    suffix = re.fullmatch(r"GRaw[A-Z][a-z]+([FDT])", topic)
    return KINDS.get(topic) or (SUFFIXES[suffix[1]] if suffix else "NORMAL")


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name in sorted(conversations())
        if not name.startswith("auth_")
    ],
)
async def test_captured_calls_get_the_captured_answers(scenario: str, tmp_path: Path) -> None:
    rows = conversations()[scenario]
    topics = {name: kind_of(name) for name in topics_of(rows) if name.startswith("G") and name not in MISSING}
    groups = [
        SubscriptionGroupConfig(
            name, retry_max_times=RETRIES.get(name, 16), consume_message_orderly=name in ORDERLY or None
        )
        for name in sorted(set(groups_of(rows)))
        if name.startswith("g_") and name not in MISSING
    ]
    async with grpc_cluster(tmp_path, SETTINGS) as cluster:
        for name, kind in topics.items():
            await cluster.create({name: kind}, queues=1 if scenario in ONE_QUEUE else queues_of(rows, name))
        await cluster.create({}, groups)
        outcomes = await Replay(cluster.target).play(rows, with_pauses=scenario in WITH_PAUSES)
    expected = {one.note: one for one in DIFFERENCES if one.scenario == scenario}
    problems = []
    seen = set()
    for outcome in outcomes:
        differences = outcome.differences()
        allowed = expected.get(outcome.note)
        if allowed is not None and differences:
            seen.add(outcome.note)
            if allowed.code is not None and outcome.code() != allowed.code:
                problems.append(f"{outcome.note}: code {outcome.code()}, the table says {allowed.code}")
        elif differences:
            problems.append(f"{outcome.note} ({outcome.method}):\n  " + "\n  ".join(differences))
    assert not problems, "\n".join(problems)
    assert seen == expected.keys(), "the table names answers that do not differ"


RULES = [
    PolicyEntryInfo(resource="Topic:AuthTopic", actions=("Pub", "Sub"), decision="Allow"),
    PolicyEntryInfo(resource="Topic:AuthPrefix*", actions=("Pub",), decision="Allow"),
    PolicyEntryInfo(resource="Topic:AuthDenied", actions=("Pub", "Sub"), decision="Deny"),
    PolicyEntryInfo(resource="Group:auth_group", actions=("Sub",), decision="Allow", source_ips=("127.0.0.0/8",)),
]


@pytest.mark.parametrize(("scenario", "refusals"), [("auth_raw", 80), ("auth_py", 2), ("auth_node", 2)])
async def test_users_are_refused_as_they_were(scenario: str, refusals: int, tmp_path: Path) -> None:
    """ACL 2.0: who is refused, and with which words. The messages that are there differ, and so do their handles."""
    rows = conversations()[scenario]
    root = '{"username":"goldenRoot","password":"rootSecret1"}'
    settings = {
        "authenticationEnabled": "true", "authorizationEnabled": "true", "initAuthenticationUser": root,
        "failedLoginWaitMills": 0,
    }  # fmt: skip
    async with grpc_cluster(tmp_path, settings) as cluster:
        topics = {name: "NORMAL" for name in topics_of(rows) if name.startswith("Auth")}
        await cluster.create(topics, [SubscriptionGroupConfig("auth_group"), SubscriptionGroupConfig("auth_other")])
        account = ClientConfig((cluster.namesrv,), access_key="goldenRoot", secret_key="rootSecret1")  # noqa: S106  captured
        async with Admin(account) as admin:
            for name, password, kind in (("alice", "aliceSecret1", "Normal"), ("bob", "bobSecret12", "Super")):
                user = UserInfo(username=name, password=password, user_type=kind, user_status="enable")
                (await admin.users.create(user)).raise_if_none()
            rules = AclInfo(subject="User:alice", policies=(PolicyInfo(entries=tuple(RULES)),))
            (await admin.acls.put(rules)).raise_if_none()
        outcomes = await Replay(cluster.target).play(rows)
    refused = 0
    for outcome in outcomes:
        if not outcome.captured:  # a stream that was opened and closed
            continue
        captured, ours = outcome.captured[0].status, outcome.ours[0].status
        is_refused = captured.code == Code.UNAUTHORIZED
        assert (ours.code == Code.UNAUTHORIZED) == is_refused, (outcome.note, captured, ours)
        if is_refused:
            assert ours.message == captured.message, outcome.note
            refused += 1
    assert refused > refusals
