"""One benchmark in a process of its own: `python -m bench.one NAME FILE` writes its rows as JSON."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from bench.report import QUICK, Figure, NotMeasured

QUICK_ARGUMENTS: dict[str, dict[str, int]] = {
    "store": {"count": 20_480, "recovery_bytes": 64 << 20},
    "key_index": {"count": 100_000},
    "many_topics": {"topics": 500},
}


def main() -> None:
    name, path = sys.argv[1:]
    module = importlib.import_module(f"bench.{name}")
    rows: list[Figure | NotMeasured] = module.run(**(QUICK_ARGUMENTS.get(name, {}) if QUICK else {}))
    Path(path).write_text(json.dumps([[isinstance(row, Figure), *row] for row in rows]))


if __name__ == "__main__":
    main()
