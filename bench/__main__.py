"""`make bench`: every benchmark, one table each. `python -m bench NAME …` runs some of them."""

from __future__ import annotations

import importlib
import sys

from bench.report import table

ALL = ("codec", "namesrv", "store", "key_index", "many_topics", "producer")


def main() -> None:
    names = sys.argv[1:] or ALL
    for name in names:
        if name not in ALL:
            sys.exit(f"bench: there is no benchmark {name}; there are {', '.join(ALL)}")
    for name in names:
        module = importlib.import_module(f"bench.{name}")
        print(f"\n## {name}\n\n{table(module.run())}", flush=True)


if __name__ == "__main__":
    main()
