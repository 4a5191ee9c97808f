"""Requests to a genuine 4.9.8 broker with access control, decided by ours: the same answers, but for what we close."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from downrange.auth.acl_yaml import read_yaml, write_yaml
from downrange.auth.needs import BROKER_NEEDS
from downrange.auth.plain_accounts import read_acl, to_write
from downrange.auth.plain_acl_files import PLAIN_ACL, PlainAclFiles
from downrange.broker.config import BrokerConfig
from downrange.broker.handlers.plain_acl import PlainAclHandlers
from downrange.broker.live_config import LiveConfig
from downrange.clock import ManualClock
from downrange.protocol.bodies.data_version import DataVersion
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError
from downrange.protocol.framing import FrameDecoder
from downrange.store.config import StoreConfig
from downrange.transport.connection import Connection
from tests.support.golden import captured_file, scenarios

ARCHIVE = "acl-498.tar.xz"
ACL_EXCEPTION = "org.apache.rocketmq.acl.common.AclException: "
ADDRESS = "127.0.0.1"

_OPEN = "open to every account in 4.9.8; it changes or shows the whole broker, so it needs an administrator here"
_WHITE = "a white list stands in for a signature, but never makes an administrator here"
_DIFFERENCES = {
    # Who asks, and the request codes that only 4.9.8 allows.
    "user": (_OPEN, {21, 26, 28, 50, 51, 52, 53, 202, 208, 222}),
    "white address elsewhere, right secret": (_OPEN, {28}),
    "account with white address": (_WHITE, {17, 21, 25, 26, 28, 50, 51, 52, 53, 200, 202, 207, 208, 215, 222}),
    "account with white address, wrong secret": (_WHITE, {28}),
    "no key, address on the global white list": (_WHITE, {17}),
}
_SINGLE_DIFFERENCES = {
    "user: max offset": "offsets of a topic are shown to those who may read it",
    "user: lock": "queues are locked by those who may consume with the group",
    "deleted user: send": "an account is gone at once; 4.9.8 reads the file again after some seconds",
}
_OTHER_ANSWERS = {
    "-a newUser5 -s newSecret5 -w 999.1.1.1": "such a pattern keeps 4.9.8 from starting again: refused here",
    "-g nonsense": "such a pattern keeps 4.9.8 from starting again: refused here",
}


class Exchange(NamedTuple):
    """A captured request to the broker, and its answer; None for a one-way request or one that was never answered."""

    scenario: str
    request: Command
    answer: Command | None
    note: str


def exchanges(scenario: str) -> Iterator[Exchange]:
    rows = scenarios(ARCHIVE)[f"acl-498/{scenario}"]
    answers = {(row.connection, row.opaque): row for row in rows if row.is_response and row.sender == "broker"}
    for row in rows:
        if not row.is_response and row.receiver == "broker":
            (request,) = FrameDecoder().feed(row.frame)
            found = answers.get((row.connection, row.opaque))
            answer = None if found is None else FrameDecoder().feed(found.frame)[0]
            yield Exchange(scenario, request, answer, row.note.removeprefix("request; "))


class StoredTopics:
    """The broker of the captures: its log begins with a message for AclTopic."""

    def topic_at(self, physical_offset: int) -> str | None:
        return "AclTopic" if physical_offset == 0 else None

    def topic_of_half_message(self, physical_offset: int) -> str | None:
        return None


class Peer:
    peer = f"{ADDRESS}:50000"


class OurBroker:
    """Decides requests as our broker does, and carries out those that change accounts."""

    def __init__(self, directory: Path) -> None:
        (directory / PLAIN_ACL).write_bytes(captured_file(ARCHIVE, "frames/acl-498/plain_acl.before.yml"))
        (directory / PLAIN_ACL).chmod(0o600)
        self.files = PlainAclFiles(directory / PLAIN_ACL, ManualClock())
        config = BrokerConfig(broker_name="broker-a", broker_ip1=ADDRESS, listen_port=27411)
        self.routes = PlainAclHandlers(LiveConfig(config, StoreConfig()), self.files).routes

    def answer(self, request: Command) -> Command | BrokerError | None:
        """The answer to a request about accounts, or a refusal; None for other requests that are allowed."""
        control = self.files.access_control
        try:
            account = control.authenticate(request, ADDRESS)
            if (rule := BROKER_NEEDS.get(request.code)) is not None:
                control.authorize(account, tuple(rule(request, StoredTopics())), request, ADDRESS)
            handler = self.routes.get(request.code)
            return None if handler is None else cast(Command, handler(request, cast(Connection, Peer())))
        except BrokerError as error:
            return error


def reason_of_difference(exchange: Exchange) -> str | None:
    who, _, _ = exchange.note.partition(": ")
    reason, codes = _DIFFERENCES.get(who, ("", set[int]()))
    if exchange.request.code in codes:
        return reason
    return next((why for note, why in _SINGLE_DIFFERENCES.items() if exchange.note.startswith(note)), None)


def sentence(remark: str | None) -> str:
    """The words of a refusal, without the Java method behind them."""
    return (remark or "").removeprefix(ACL_EXCEPTION).partition(", org.apache")[0]


@pytest.mark.parametrize("scenario", ["acl_requests", "acl_clients", "acl_admin_codes", "acl_config"])
def test_requests_are_decided_as_4_9_8_decides_them(scenario: str, tmp_path: Path) -> None:
    broker = OurBroker(tmp_path)
    wrong: list[str] = []
    counted = 0
    for exchange in exchanges(scenario):
        ours = broker.answer(exchange.request)
        if exchange.answer is None:  # one-way, or a pull that waited until the client left: carried out by 4.9.8
            wrong += [f"{exchange.note}: {ours}"] * isinstance(ours, BrokerError)
            continue
        counted += 1
        theirs = exchange.answer
        remark = ours.remark if isinstance(ours, BrokerError) else ""
        is_refused_by_them = (theirs.remark or "").startswith(ACL_EXCEPTION)
        is_refused_by_us = remark.startswith(ACL_EXCEPTION)
        if reason_of_difference(exchange) is not None:
            if is_refused_by_them or not is_refused_by_us:
                wrong.append(f"no difference any more: {exchange.note}")
        elif (is_refused_by_us or is_refused_by_them) and sentence(remark) != sentence(theirs.remark):
            wrong.append(f"{exchange.request.code} {exchange.note}: {remark!r}, 4.9.8: {theirs.remark!r}")
    assert wrong == []
    assert counted > 30


@pytest.mark.parametrize("scenario", ["acl_admin_codes", "acl_config"])
def test_accounts_are_administered_as_in_4_9_8(scenario: str, tmp_path: Path) -> None:
    broker = OurBroker(tmp_path)
    seen = set()
    for exchange in exchanges(scenario):
        ours = broker.answer(exchange.request)
        theirs = exchange.answer
        if theirs is None or exchange.request.code not in broker.routes or reason_of_difference(exchange) is not None:
            continue
        seen.add(exchange.request.code)
        code = ours.code if ours is not None else None
        if any(note in exchange.note for note in _OTHER_ANSWERS):
            assert (code, theirs.code) in {(209, 0), (211, 0)}
            continue
        assert code == theirs.code, exchange.note
        if theirs.code:
            secret = exchange.request.ext_fields.get("secretKey", "none")
            assert sentence(getattr(ours, "remark", "")) == sentence(theirs.remark).replace(secret, "******")
        elif exchange.request.code == RequestCode.GET_BROKER_CLUSTER_ACL_INFO:
            assert isinstance(ours, Command)
            check_versions(ours.ext_fields, theirs.ext_fields)
    assert seen == {50, 51, 52, 53}


def check_versions(ours: Any, theirs: Any) -> None:
    assert ours.keys() == theirs.keys()
    for name in ("brokerName", "brokerAddr", "clusterName"):
        assert ours[name] == theirs[name]
    for fields in (ours, theirs):
        (version,) = json.loads(fields["allAclFileVersion"]).values()
        assert version.keys() == json.loads(fields["version"]).keys() == {"counter", "timestamp"}
    assert list(json.loads(ours["allAclFileVersion"])) == [PLAIN_ACL]  # 4.9.8: the full path


def test_a_file_is_written_as_4_9_8_writes_it() -> None:
    text = captured_file(ARCHIVE, "frames/acl-498/plain_acl.after.yml")
    content = read_yaml(text)
    assert write_yaml(to_write(content, DataVersion(counter=8, timestamp=1794808417083))) == text
    content["globalWhiteRemoteAddresses"] = []  # `nonsense`: 4.9.8 took it, and cannot read its own file since
    acl = read_acl(content)
    assert acl.version == DataVersion(counter=8, timestamp=1794808417083)
    assert [account.access_key for account in acl.accounts] == ["goldenUser", "goldenAdmin", "whiteUser", "farUser"]
