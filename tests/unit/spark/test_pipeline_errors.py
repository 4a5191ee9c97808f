"""What is left of the pages Spark writes about a failure."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark")

from pyspark.errors import PySparkException

from downrange.spark.pipelines.errors import PipelineFailed, told_in_one_line

WORKER = """
  An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "worker.py", line 1, in <module>
    write(file)
    ^^^^^^^^^^^
OSError: [Errno 28] No space left on device: 'lake/1.parquet'
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (WORKER, "OSError: [Errno 28] No space left on device: 'lake/1.parquet'"),
        ("[SOME_CODE] It went wrong. SQLSTATE: 42000\nmore", "It went wrong."),
        ("", "Spark gave no reason"),
    ],
)
def test_an_error_of_spark_is_one_line(text: str, told: str) -> None:
    with pytest.raises(PipelineFailed) as failed, told_in_one_line():
        raise PySparkException(text)
    assert str(failed.value) == told
