"""Topics as Spark DataFrames: the data source `rocketmq`, its sink, and pipelines. No other package imports pyspark.

import downrange.spark
spark = downrange.spark.session()
orders = spark.read.format("rocketmq").option("namesrv", "127.0.0.1:9876").option("subscribe", "orders").load()
"""

from typing import TYPE_CHECKING, Any

from downrange.spark.session import register, session

if TYPE_CHECKING:
    from downrange.spark.lake.compaction import compact
    from downrange.spark.lake.lake import Lake
    from downrange.spark.pipelines.archive import archive
    from downrange.spark.pipelines.dead_letters import dlq, letters_in
    from downrange.spark.pipelines.frames import lake_frame
    from downrange.spark.pipelines.latest import latest
    from downrange.spark.pipelines.mirror import mirror
    from downrange.spark.pipelines.mirror import plan as plan_mirror
    from downrange.spark.pipelines.mirror_clusters import Mirror
    from downrange.spark.pipelines.replay import replay
    from downrange.spark.pipelines.replay_plan import Choice as ReplayChoice
    from downrange.spark.pipelines.resend import Job as ResendJob
    from downrange.spark.pipelines.resend import chosen as chosen_letters
    from downrange.spark.pipelines.resend import resend as resend_letters
    from downrange.spark.pipelines.sql import View, ViewKind, sql
    from downrange.spark.pipelines.stats import lake_inputs, stats
    from downrange.spark.pipelines.trace import trace
    from downrange.spark.pipelines.trace_events import trace_frame
    from downrange.spark.progress import lag_of

__all__ = [
    "Lake",
    "Mirror",
    "ReplayChoice",
    "ResendJob",
    "View",
    "ViewKind",
    "archive",
    "chosen_letters",
    "compact",
    "dlq",
    "lag_of",
    "lake_frame",
    "lake_inputs",
    "latest",
    "letters_in",
    "mirror",
    "plan_mirror",
    "register",
    "replay",
    "resend_letters",
    "session",
    "sql",
    "stats",
    "trace",
    "trace_frame",
]

# The module of each name of a pipeline and its name there. It is imported when it is first used: Spark's workers import
# this package, too, and must start fast.
_HOMES = {
    "Lake": ("lake.lake", "Lake"),
    "Mirror": ("pipelines.mirror_clusters", "Mirror"),
    "ReplayChoice": ("pipelines.replay_plan", "Choice"),
    "ResendJob": ("pipelines.resend", "Job"),
    "View": ("pipelines.sql", "View"),
    "ViewKind": ("pipelines.sql", "ViewKind"),
    "archive": ("pipelines.archive", "archive"),
    "chosen_letters": ("pipelines.resend", "chosen"),
    "compact": ("lake.compaction", "compact"),
    "dlq": ("pipelines.dead_letters", "dlq"),
    "lag_of": ("progress", "lag_of"),
    "lake_frame": ("pipelines.frames", "lake_frame"),
    "lake_inputs": ("pipelines.stats", "lake_inputs"),
    "latest": ("pipelines.latest", "latest"),
    "letters_in": ("pipelines.dead_letters", "letters_in"),
    "mirror": ("pipelines.mirror", "mirror"),
    "plan_mirror": ("pipelines.mirror", "plan"),
    "replay": ("pipelines.replay", "replay"),
    "resend_letters": ("pipelines.resend", "resend"),
    "sql": ("pipelines.sql", "sql"),
    "stats": ("pipelines.stats", "stats"),
    "trace": ("pipelines.trace", "trace"),
    "trace_frame": ("pipelines.trace_events", "trace_frame"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'downrange.spark' has no attribute {name!r}")
    import importlib

    module, its_name = _HOMES[name]
    value = getattr(importlib.import_module(f"downrange.spark.{module}"), its_name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
