"""Turns errors of Spark, which have many lines, into errors with one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from downrange.model.errors import MQError
from downrange.spark.errors import OptionError, SparkSourceError

# One of our errors in Spark's report about a Python process: `downrange.spark.errors.NothingToRead: no topic …`.
_OURS: Final = re.compile(r"\bdownrange\.[\w.]+\.(\w+): (.+)")
# The last line of any other error of a Python process, behind the indented lines of its traceback.
_PYTHON: Final = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)*(\S.*)", re.MULTILINE)
_WRONGLY_ASKED: Final = {"OptionError", "NothingToRead", "SchemaMismatch"}
_CODES: Final = re.compile(r"^\[[A-Z_0-9.]+\]\s*|\s*SQLSTATE: \w+|;$")


class PipelineError(MQError):
    """A pipeline was called wrongly; the text says what to change."""


class PipelineFailed(MQError):
    """A running pipeline failed; started again, it continues where it was."""


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """Turn errors of Spark into ours: PipelineError for a wrong call, PipelineFailed for any other error."""
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
    from pyspark.errors import AnalysisException, IllegalArgumentException, ParseException, PySparkException

    try:
        yield
    except OptionError:  # its text names the option and is clear enough
        raise
    except SparkSourceError as error:  # raised in the driver itself
        raise _kind(type(error).__name__)(str(error)) from None
    except (AnalysisException, ParseException, IllegalArgumentException) as error:
        raise _told(str(error), PipelineError) from None
    except PySparkException as error:
        raise _told(str(error), PipelineFailed) from None
    except Py4JJavaError as error:
        raise _told(str(error.java_exception), PipelineFailed) from None


def _kind(name: str) -> type[MQError]:
    """Whether one of our errors means a wrong call or a failure of the pipeline."""
    return PipelineError if name in _WRONGLY_ASKED else PipelineFailed


def _told(text: str, otherwise: type[MQError]) -> MQError:
    """The error of which a Python process died, else the first line of Spark's report."""
    if found := list(_OURS.finditer(text)):
        name, reason = found[-1].groups()
        return _kind(name)(reason.strip())
    if died_of := _PYTHON.findall(text):
        return otherwise(died_of[-1].strip())
    line = next((line.strip() for line in text.splitlines() if line.strip()), "Spark gave no reason")
    return otherwise(_CODES.sub("", line))
