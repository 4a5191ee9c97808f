"""Runs a project of Spark's declarative pipelines (`pyspark.pipelines`) with `rocketmq` as a source and a sink.

Spark's own command, `spark-pipelines` of 4.3, ends with exit code 1 after a run that succeeded: see `_without_metrics`.
This runner gives the steps of a run to Spark itself. The session is one of Spark Connect, with its server in this
process unless the master is an address `sc://…`; a process that has another kind of session cannot run a project.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from downrange.spark.pipelines.errors import PipelineError, PipelineFailed, told_in_one_line

if TYPE_CHECKING:
    from pyspark.pipelines.cli import PipelineSpec

    from downrange.spark.progress import Lag

_SETTINGS: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "OFF",
    "spark.sql.connect.serverStacktrace.enabled": "false",
    "spark.sql.shuffle.partitions": str(os.cpu_count() or 2),
}


@dataclass(frozen=True, slots=True)
class Refresh:
    """Which tables a run updates: all unless named. Those in `full`, or all with `full_all`, are computed anew."""

    only: Sequence[str] = ()
    full: Sequence[str] = ()
    full_all: bool = False

    def __post_init__(self) -> None:
        if self.full_all and (self.only or self.full):
            raise PipelineError("everything anew excludes single tables: give one of them")


@dataclass(frozen=True, slots=True)
class Project:
    """A project that was read: its specification, and the directory it lies in."""

    path: Path
    spec: PipelineSpec

    @property
    def storage(self) -> str:
        """The place of checkpoints and of the catalog; a path without a scheme is relative to the project."""
        return _place(self.path, self.spec.storage)

    @property
    def settings(self) -> dict[str, str]:
        """Settings of the session. Tables and their catalog are in the storage, so that the next run finds them."""
        own: dict[str, str] = {}
        if self.storage.startswith("file:"):
            directory = self.storage.removeprefix("file://")
            own = {
                "spark.sql.warehouse.dir": f"{self.storage}/tables",
                "spark.sql.catalogImplementation": "hive",
                "spark.hadoop.javax.jdo.option.ConnectionURL": f"jdbc:derby:{directory}/catalog;create=true",
                "spark.driver.extraJavaOptions": f"-Dderby.stream.error.file={directory}/derby.log",
            }
        return {**_SETTINGS, **own, **self.spec.configuration}


def read_project(path: Path) -> Project:
    """The project of a specification, or of the directory with its `spark-pipeline.yml`; raises PipelineError."""
    with _quiet_imports():
        import yaml
        from pyspark.errors import PySparkException
        from pyspark.pipelines.cli import PIPELINE_SPEC_FILE_NAMES, load_pipeline_spec

    if path.is_dir():
        found = [path / name for name in PIPELINE_SPEC_FILE_NAMES if (path / name).is_file()]
        path = found[0] if found else path / PIPELINE_SPEC_FILE_NAMES[0]
    if not path.is_file():
        raise PipelineError(f"{path} does not exist: expected the specification of a pipeline")
    try:
        spec = load_pipeline_spec(path)
    except (PySparkException, yaml.YAMLError, KeyError, TypeError) as error:
        raise PipelineError(f"{path}: {' '.join(str(error).split())}") from None
    return Project(path.absolute(), spec)


def run_project(
    project: Project,
    *,
    master: str | None = None,
    options: Mapping[str, str] | None = None,
    refresh: Refresh | None = None,
    dry_run: bool = False,
    on_event: Callable[[str], None] | None = None,
    on_lag: Callable[[Mapping[str, int]], None] | None = None,
) -> list[str]:
    """Run a project until its tables are up to date, and return what Spark told on the way.

    `on_lag` is called from another thread, after every batch of a streaming flow that reads topics, with the number of
    messages of each topic that all flows together have yet to read.

    `options` are further settings of the session, which definitions read by `spark.conf.get`. A dry run only checks
    that the definitions fit together.
    """
    wanted = refresh or Refresh()
    told: list[str] = []
    try:
        with (
            told_in_one_line(),
            _session(master or "local[*]", {**project.settings, **(options or {})}) as spark,
            _lag_told(spark, on_lag),
        ):
            for message in _events(spark, project, wanted, dry_run=dry_run):
                told.append(message)
                if on_event is not None:
                    on_event(message)
    except (PipelineError, PipelineFailed) as error:
        raise type(error)(" ".join([str(error), *_reasons(told)])) from None
    return told


@contextmanager
def _lag_told(spark: Any, on_lag: Callable[[Mapping[str, int]], None] | None) -> Iterator[None]:
    """Call `on_lag` while flows run; all they have told was passed on when this ends."""
    if on_lag is None:
        yield
        return
    from downrange.spark.progress import LagListener, lag_by_topic

    by_flow: dict[str, Mapping[str, int]] = {}

    def report(flow: str, lag: Lag) -> None:
        by_flow[flow] = lag_by_topic(lag)
        topics = sorted({topic for one in by_flow.values() for topic in one})
        on_lag({topic: sum(one.get(topic, 0) for one in by_flow.values()) for topic in topics})

    listener = LagListener(report)
    spark.streams.addListener(listener)
    try:
        yield
    finally:
        spark.streams.removeListener(listener)


def _reasons(told: Sequence[str]) -> list[str]:
    """Why flows failed: Spark's own error says only that some did."""
    lines = [line for message in told for line in message.splitlines()]
    return [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]


def _events(spark: Any, project: Project, refresh: Refresh, *, dry_run: bool) -> Iterator[str]:
    from pyspark.pipelines.cli import register_definitions
    from pyspark.pipelines.spark_connect_graph_element_registry import SparkConnectGraphElementRegistry
    from pyspark.pipelines.spark_connect_pipeline import create_dataflow_graph, start_run

    spec = project.spec
    graph = create_dataflow_graph(spark, spec.catalog, spec.database, spec.configuration)
    with redirect_stdout(sys.stderr):  # Spark tells there which files it reads
        register_definitions(project.path, SparkConnectGraphElementRegistry(spark, graph), spec, spark, graph)
    results = start_run(
        spark,
        graph,
        full_refresh=list(refresh.full),
        full_refresh_all=refresh.full_all,
        refresh=list(refresh.only),
        dry=dry_run,
        storage=project.storage,
    )
    with _without_metrics(spark.client):
        for result in results:
            if "pipeline_event_result" in result:
                yield str(result["pipeline_event_result"].event.message)


@contextmanager
def _without_metrics(client: Any) -> Iterator[None]:
    """Leave out the metrics of Python workers among the answers to a command, of which Spark's client makes an error.

    A source or a sink in Python has such metrics. This is why `spark-pipelines` fails after a run that succeeded.
    """
    fetch = client._execute_and_fetch_as_iterator
    client._execute_and_fetch_as_iterator = lambda *given, **named: (
        answer for answer in fetch(*given, **named) if isinstance(answer, dict)
    )
    try:
        yield
    finally:
        del client._execute_and_fetch_as_iterator


@contextmanager
def _session(master: str, settings: Mapping[str, str]) -> Iterator[Any]:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from downrange.spark.session import register

    if SparkContext._active_spark_context is not None:
        raise PipelineFailed("this process has a Spark session already: a project needs a process of its own")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    with _quiet_imports():  # also about settings that a server has from its start, and cannot be given again
        builder = SparkSession.builder.remote(master)
        for name, value in settings.items():
            builder = builder.config(name, value)
        spark = builder.getOrCreate()
        register(spark)
    try:
        yield spark
    finally:
        spark.stop()


@contextmanager
def _quiet_imports() -> Iterator[None]:
    """Without the warnings of Spark about releases of pandas, which nothing here uses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _place(spec: Path, storage: str) -> str:
    return storage if "://" in storage else f"file://{(spec.parent / storage).absolute()}"
