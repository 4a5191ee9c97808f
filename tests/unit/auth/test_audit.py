"""The lines of the audit log, and its file."""

from __future__ import annotations

import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from downrange.auth.access_control import Action, Need, ResourceType
from downrange.auth.audit import AuditLog, is_change
from downrange.auth.guard import Outcome
from downrange.auth.needs import BROKER_NEEDS, NAMESRV_NEEDS
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command
from downrange.protocol.errors import NoPermission
from downrange.protocol.signing import SIGNATURE
from downrange.settings import ConfigError


@dataclass
class Peer:
    peer: str = "10.1.2.3:50412"
    peer_host: bytes = b""


class Nothing:
    """A store without messages."""

    def topic_at(self, physical_offset: int) -> str | None:
        return None

    def topic_of_half_message(self, physical_offset: int) -> str | None:
        return None


CREATE = Need(ResourceType.TOPIC, "orders", frozenset({Action.CREATE}))
SUB = Need(ResourceType.TOPIC, "orders", frozenset({Action.SUB, Action.UPDATE}))


def outcome(*needs: Need, account: str | None = "shop", refusal: str = "", code: int = 17) -> Outcome:
    command = Command(code, raw_ext={SIGNATURE: "the-signature", "topic": "orders"}, body=b"the-body")
    return Outcome(command, Peer(), account, needs, NoPermission(refusal) if refusal else None)


def lines(log: AuditLog, file: Path) -> list[str]:
    log.close()
    return file.read_text("utf-8").splitlines()


def test_a_change_and_a_refusal_get_a_line_each_and_reads_get_none(tmp_path: Path) -> None:
    file = tmp_path / "audit.log"
    log = AuditLog(file)
    log.passed(outcome(CREATE))
    log.passed(outcome(SUB))
    log.passed(outcome())
    log.refused(outcome(CREATE, refusal="no permission"))
    log.refused(outcome(account=None, refusal="nobody"), 7)
    changed, refused, unknown = (line.split(" ", 2)[2] for line in lines(log, file))
    facts = "code=17 name=UPDATE_AND_CREATE_TOPIC peer=10.1.2.3:50412"
    assert changed == f"outcome=passed {facts} account=shop resource=Topic:orders"
    assert refused == f'outcome=refused {facts} account=shop resource=Topic:orders reason="no permission"'
    assert unknown == f"outcome=refused {facts} account=- resource=- reason=nobody left_out=7"


@given(st.text(max_size=400), st.text(max_size=400), st.text(max_size=400))
def test_words_of_a_peer_stay_in_one_line_without_signature_and_body(key: str, topic: str, remark: str) -> None:
    written: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: written.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("downrange.audit")
    logger.addHandler(handler)
    try:
        need = CREATE._replace(name=topic)
        AuditLog().refused(outcome(need, account=key, refusal=remark or "x", code=-7))
    finally:
        logger.removeHandler(handler)
    (line,) = written
    assert line.isprintable()
    assert line.isascii()
    assert len(line) < 7000
    assert "the-signature" not in line
    assert "the-body" not in line


def test_the_file_is_private_and_rotated_by_size(tmp_path: Path) -> None:
    file = tmp_path / "audit.log"
    before = os.umask(0)
    try:
        log = AuditLog(file, 2000)
        for _ in range(200):
            log.passed(outcome(CREATE))
        log.close()
    finally:
        os.umask(before)
    found = sorted(tmp_path.iterdir())
    assert [path.name for path in found] == ["audit.log", *(f"audit.log.{number}" for number in range(1, 6))]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 and path.stat().st_size <= 2000 for path in found)


def test_a_file_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"auditLogFile=.*missing"):
        AuditLog(tmp_path / "missing" / "audit.log")


def test_which_codes_change_something_follows_from_the_rights_they_need() -> None:
    def changes(code: int) -> bool:
        rule = {**NAMESRV_NEEDS, **BROKER_NEEDS}.get(code)
        command = Command(code, raw_ext={"topic": "t", "consumerGroup": "g"})
        needs = None if rule is None else tuple(rule(command, Nothing()))
        return is_change(Outcome(command, Peer(), "root", needs, None))

    code = RequestCode
    for one in (code.UPDATE_AND_CREATE_TOPIC, code.DELETE_TOPIC_IN_BROKER, code.UPDATE_BROKER_CONFIG,
                code.PUT_KV_CONFIG, code.UPDATE_AND_CREATE_ACL_CONFIG, code.UNREGISTER_BROKER):  # fmt: skip
        assert changes(one), one
    for one in (code.SEND_MESSAGE, code.PULL_MESSAGE, code.UPDATE_CONSUMER_OFFSET, code.GET_BROKER_CONFIG,
                code.GET_CONSUME_STATS, code.GET_ROUTEINFO_BY_TOPIC, code.BROKER_HEARTBEAT):  # fmt: skip
        assert not changes(one), one
    assert changes(4711)
