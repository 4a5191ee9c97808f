"""The audit log: one JSON line for each write, each export and each refusal. Never bodies, never secrets."""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

log = logging.getLogger(__name__)

KEPT: Final = 1000


class AuditLog:
    """The newest entries in memory, and all of them in a file if one is named."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._entries: deque[dict[str, Any]] = deque(maxlen=KEPT)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._load(path)

    def _load(self, path: Path) -> None:
        if not path.exists():
            return
        with path.open(encoding="utf-8") as lines:
            for line in deque(lines, maxlen=KEPT):
                try:
                    self._entries.append(json.loads(line))
                except ValueError:
                    log.warning("line of the audit log passed over path=%s", path)

    def write(self, at: int, who: str, source: str, action: str, outcome: str, **details: Any) -> None:
        """`outcome` is `done`, `failed` or `refused`; details say what it was about and what each broker answered."""
        entry = {"at": at, "who": who, "from": source, "action": action, "outcome": outcome, **details}
        self._entries.append(entry)
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8", opener=_for_the_owner) as file:
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        log.info("audit action=%s who=%s outcome=%s", action, who, outcome)

    def entries(self) -> list[dict[str, Any]]:
        """The newest first."""
        return list(reversed(self._entries))

    def moves_over(self, cluster: str, group: str) -> list[Mapping[str, Any]]:
        """Moves of a group that were carried out."""
        return [
            entry
            for entry in self._entries
            if entry["action"] == "move" and entry.get("cluster") == cluster and entry.get("subject") == group
        ]


def _for_the_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
