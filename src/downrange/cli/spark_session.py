"""Spark for a command: started without its own output, ended in order, its errors shown in one line."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from downrange.cli.options import UsageError

_MASTERS: Final = ("local", "spark://", "yarn", "k8s://")

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from downrange.spark.pipelines.archive import ArchiveProgress


@contextmanager
def asked_rightly() -> Iterator[None]:
    """Turn errors about wrong input, and about an installation without Spark, into a UsageError."""
    os.environ.setdefault("RUST_LOG", "off")  # the Delta library logs at length about errors that it also raises
    try:
        import deltalake  # noqa: F401
        import pyarrow  # noqa: F401
        import pyspark  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"pipelines run on Spark, and {error.name} is not installed: pip install 'downrange[spark]'"
        ) from None
    from downrange.model.errors import MessageError
    from downrange.spark.errors import NothingToRead, OptionError
    from downrange.spark.lake.layout import LakeError
    from downrange.spark.pipelines.errors import PipelineError

    try:
        yield
    except (PipelineError, OptionError, NothingToRead, LakeError, MessageError) as error:
        raise UsageError(str(error)) from None


def check_java() -> None:
    """Raise a UsageError when Spark would find no Java."""
    home = os.environ.get("JAVA_HOME")
    if not home and shutil.which("java") is None:
        raise UsageError("Spark needs Java 17 or newer: install it, or set JAVA_HOME")
    if home and not os.access(Path(home, "bin", "java"), os.X_OK):  # Spark would not look on the path then
        raise UsageError(f"JAVA_HOME={home} has no bin/java: set it to the directory of Java 17 or newer, or unset it")


@contextmanager
def spark_session(master: str | None) -> Iterator[SparkSession]:
    """A Spark session that writes nothing to the terminal, but for a line that says that it starts."""
    check_java()
    if master is not None and not master.startswith(_MASTERS):
        raise UsageError(f"--master {master}: expected local, local[4], spark://HOST:PORT, yarn or k8s://HOST:PORT")
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    import downrange.spark
    from downrange.spark.pipelines.errors import PipelineFailed

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)  # it logs pages where we print one line
    try:
        with shown_line() as show, _no_jvm_left_behind():
            show("starting Spark …", 0)  # on a terminal only
            with _quiet_start():
                spark = downrange.spark.session("downrange pipeline", master=master, log_level="OFF")
    except (Py4JError, PySparkException) as error:
        where = "" if master is None else f" with --master {master}"
        raise PipelineFailed(f"Spark did not start{where}: {str(error).strip().splitlines()[0]}") from None
    try:
        yield spark
    finally:
        spark.stop()


@contextmanager
def _no_jvm_left_behind() -> Iterator[None]:
    """End the JVM when its start is interrupted.

    Spark forgets a JVM that has not told its port yet, and such a JVM would run until somebody kills it.
    """
    from pyspark import java_gateway

    gateway: Any = java_gateway
    start = gateway.Popen
    started = []

    def remembered(*arguments: Any, **settings: Any) -> Any:
        started.append(start(*arguments, **settings))
        return started[-1]

    gateway.Popen = remembered
    try:
        yield
    except BaseException:
        for process in started:
            process.kill()
            process.wait()
        raise
    finally:
        gateway.Popen = start


@contextmanager
def _quiet_start() -> Iterator[None]:
    """Hide standard error while Spark's JVM starts: it prints before its log level can be set."""
    sys.stderr.flush()
    kept = os.dup(2)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(silence)


@contextmanager
def stopped_by_signal() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C or SIGTERM sets; a second signal ends the process at once."""
    # Not an exception: it could interrupt a conversation with the JVM.
    asked = threading.Event()

    def ask(*_: object) -> None:
        if asked.is_set():
            os._exit(130)
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def shown_line() -> Iterator[Callable[[str, int], None]]:
    """Show a text and its count: one line that is rewritten on a terminal, else a line for each new count."""
    is_terminal = sys.stderr.isatty()
    last = 0

    def show(text: str, count: int) -> None:
        nonlocal last
        if count == last and not is_terminal:
            return
        last = count
        sys.stderr.write(f"\r\x1b[K{text}" if is_terminal else f"{text}\n")
        sys.stderr.flush()

    try:
        yield show
    finally:
        if is_terminal:
            sys.stderr.write("\r\x1b[K")


@contextmanager
def shown_progress(began: float) -> Iterator[Callable[[ArchiveProgress], None]]:
    """Show the progress of an archive."""
    with shown_line() as show:

        def tell(progress: ArchiveProgress) -> None:
            behind = "" if progress.behind is None else f", {progress.behind:,} to go"
            rate = progress.messages / max(time.monotonic() - began, 1e-9)
            text = f"archived {progress.messages:,} messages in {progress.files:,} files, {rate:,.0f}/s{behind}"
            show(text, progress.messages)

        yield tell
