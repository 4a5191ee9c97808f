"""The audit log: one line for each refused request and each request that changes something, without any secret.

    2026-11-16 14:00:00,123 outcome=refused code=17 name=UPDATE_AND_CREATE_TOPIC peer=10.1.2.3:50412 account=shop
    resource=Topic:orders reason="…"

Words that a peer chose are quoted where they have blanks or control characters, so that a peer cannot write lines of
its own. Signatures, secrets and bodies are never written.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Sequence
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final, NamedTuple

from downrange.auth.access_control import Action, Need
from downrange.auth.guard import Outcome
from downrange.protocol.codes import RequestCode
from downrange.settings import ConfigError

log = logging.getLogger("downrange.audit")

_KEPT_FILES: Final = 5
_LONGEST_WORD: Final = 300
_MOST_RESOURCES: Final = 8
_MESSAGING: Final = frozenset({Action.PUB, Action.SUB})
_CHANGING: Final = frozenset({Action.CREATE, Action.UPDATE, Action.DELETE})
_ROUTINE: Final = frozenset({RequestCode.REGISTER_BROKER, RequestCode.QUERY_DATA_VERSION, RequestCode.BROKER_HEARTBEAT})
"""Requests that brokers repeat all the time."""
_NAMES: Final = {int(code): code.name for code in RequestCode}


class RefusedCall(NamedTuple):
    """A call of a gRPC client that was refused."""

    call: str
    peer: str
    account: str | None
    """None if the login failed."""
    needs: Sequence[Need]
    reason: str
    left_out: int = 0
    """Refusals from this address before this one that got no line."""


class AuditLog:
    """Writes to the logger `downrange.audit`, and to a file of its own if there is one."""

    def __init__(self, file: Path | None = None, max_bytes: int = 64 << 20) -> None:
        """Open the file, which is renamed when it has `max_bytes`: five older ones are kept. Raises ConfigError."""
        self._file = None if file is None else _open_file(file, max_bytes)

    def passed(self, outcome: Outcome) -> None:
        """Note a request that may be carried out, if it changes something."""
        if is_change(outcome):
            self._write(logging.INFO, f"outcome=passed {_facts(outcome)}")

    def refused(self, outcome: Outcome, left_out: int = 0) -> None:
        """Note a refused request; `left_out` refusals from the same address before it were not written."""
        reason = outcome.refusal.remark if outcome.refusal is not None else ""
        more = f" left_out={left_out}" if left_out else ""
        self._write(logging.WARNING, f"outcome=refused {_facts(outcome)} reason={_word(reason)}{more}")

    def left_out(self, outcome: Outcome) -> None:
        """Note a refused request that gets no line, where the ordinary log has everything."""
        if log.isEnabledFor(logging.DEBUG):
            reason = outcome.refusal.remark if outcome.refusal is not None else ""
            log.debug("outcome=refused %s reason=%s", _facts(outcome), _word(reason))

    def call_refused(self, refused: RefusedCall) -> None:
        """Note a refused call of a gRPC client."""
        more = f" left_out={refused.left_out}" if refused.left_out else ""
        self._write(
            logging.WARNING,
            f"outcome=refused call={_word(refused.call)} peer={refused.peer} account={_word(refused.account or '')} "
            f"resource={_word(_resources(refused.needs))} reason={_word(refused.reason)}{more}",
        )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, level: int, line: str) -> None:
        log.log(level, "%s", line)
        if self._file is not None:
            self._file.handle(logging.LogRecord(log.name, level, "", 0, line, None, None))


def is_change(outcome: Outcome) -> bool:
    """Whether a request changes something and is none of those with which messages are sent and received."""
    if outcome.needs is None:  # a code that only an administrator may use
        return True
    if outcome.command.code in _ROUTINE:
        return False
    return any(need.actions & _CHANGING and not need.actions & _MESSAGING for need in outcome.needs)


def _facts(outcome: Outcome) -> str:
    code = outcome.command.code
    return (
        f"code={code} name={_NAMES.get(code, '-')} peer={outcome.origin.peer} account={_word(outcome.account or '')} "
        f"resource={_word(_resources(outcome.needs or ()))}"
    )


def _resources(needs: Iterable[Need]) -> str:
    names = list(dict.fromkeys(f"{need.resource_type.value}:{need.name}" for need in needs))
    more = f",+{len(names) - _MOST_RESOURCES}" if len(names) > _MOST_RESOURCES else ""
    return ",".join(names[:_MOST_RESOURCES]) + more


def _word(text: str) -> str:
    """The text as one word of a line: in quotes, with escapes, unless it is plain already."""
    short = text[:_LONGEST_WORD]
    is_plain = short.isascii() and short.isprintable() and not any(mark in short for mark in ' "\\=')
    return (short or "-") if is_plain else json.dumps(short)


class _PrivateFile(RotatingFileHandler):
    """A file that only its owner can read."""

    def _open(self) -> TextIOWrapper:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        return open(descriptor, "a", encoding="utf-8")


def _open_file(path: Path, max_bytes: int) -> _PrivateFile:
    try:
        handler = _PrivateFile(path, maxBytes=max_bytes, backupCount=_KEPT_FILES, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"auditLogFile={path}: cannot be written: {error.strerror or error}") from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    return handler
