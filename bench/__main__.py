"""`make bench`: every benchmark but the longest, one table each. `python -m bench NAME …` runs those named."""

from __future__ import annotations

import importlib
import sys

from bench.report import table

ALL = ("codec", "namesrv", "store", "key_index", "many_topics", "producer", "consumer", "lite_pull", "sql_filter")
ON_REQUEST = ("failover",)
"""Takes ten minutes: runs only when named."""


def main() -> None:
    names = sys.argv[1:] or ALL
    for name in names:
        if name not in (*ALL, *ON_REQUEST):
            sys.exit(f"bench: there is no benchmark {name}; there are {', '.join((*ALL, *ON_REQUEST))}")
    for name in names:
        module = importlib.import_module(f"bench.{name}")
        print(f"\n## {name}\n\n{table(module.run())}", flush=True)


if __name__ == "__main__":
    main()
