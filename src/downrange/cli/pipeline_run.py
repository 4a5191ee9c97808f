"""`downrange pipeline run`: a project of Spark's declarative pipelines."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from downrange.cli.account import client_config
from downrange.cli.options import Json, Namesrv, key_values
from downrange.cli.output import Answer, print_answer
from downrange.cli.pipeline import Master
from downrange.cli.spark_session import asked_rightly, check_java


def run(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="The file spark-pipeline.yml, or its directory.")],
    only: Annotated[list[str] | None, typer.Option("--refresh", help="Update this table only; repeatable.")] = None,
    full: Annotated[
        list[str] | None, typer.Option("--full-refresh", help="Compute this table anew; repeatable.")
    ] = None,
    full_all: Annotated[bool, typer.Option("--full-refresh-all", help="Compute all tables anew.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check that the definitions fit together.")] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--conf", help="Setting of the Spark session, name=value; any number of them.")
    ] = None,
    namesrv: Namesrv = None,
    master: Master = None,
    json: Json = False,
) -> None:
    """Run a project of Spark's declarative pipelines until its tables are up to date."""
    with asked_rightly():
        from downrange.client.pipeline_status import PipelineReporter, PipelineStatus
        from downrange.model.errors import MQError
        from downrange.spark.pipelines.declarative import Refresh, read_project, run_project

        refresh = Refresh(only or (), full or (), full_all)
        project = read_project(spec)
        check_java()
        config = client_config(namesrv)
        options = {"rocketmq.namesrv": ";".join(config.namesrv_addresses), **key_values(settings or [])}
        began = time.monotonic()
        status = PipelineStatus(project.spec.name, "declarative", str(spec), project.storage)
        with closing(PipelineReporter(config)) as reporter:

            def on_event(message: str) -> None:
                sys.stderr.write(f"{message}\n")
                if not dry_run:
                    reporter.tell(status)

            def on_lag(lag: Mapping[str, int]) -> None:
                nonlocal status
                status = replace(status, lag=lag)
                reporter.tell(status)

            try:
                told = run_project(
                    project,
                    master=master,
                    options=options,
                    refresh=refresh,
                    dry_run=dry_run,
                    on_event=on_event,
                    on_lag=None if dry_run else on_lag,
                )
            except MQError as error:
                if not dry_run:
                    reporter.tell_error(status, error)
                raise
            seconds = time.monotonic() - began
            if not dry_run:
                reporter.tell(replace(status, batch_seconds=seconds))
    document = {"name": project.spec.name, "events": told, "seconds": round(seconds, 3)}
    flows = sum(message.endswith("has COMPLETED.") for message in told)
    text = f"{project.spec.name}: checked" if dry_run else f"{project.spec.name}: {flows} flows completed"
    print_answer(Answer(document, [f"{text} in {seconds:.1f} s"]), as_json=json)
