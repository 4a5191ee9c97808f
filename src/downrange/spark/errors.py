"""Errors of reads and streams, and how they are shown in one line.

SparkSourceError
├── OptionError       an option that is unknown, malformed or does not go with another
├── SchemaMismatch    a schema given by the user that is not made of our columns
├── NothingToRead     no topic of that name, or no queue that may be read
└── DataLost          messages that a query was to read are no longer there
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from downrange.model.errors import MQError


class SparkSourceError(MQError):
    """A read cannot be done; the text says what to change."""


class OptionError(SparkSourceError):
    """The text names the option, its value and what is expected."""


class SchemaMismatch(SparkSourceError):
    """The text names the column and its possible types."""


class NothingToRead(SparkSourceError):
    pass


class DataLost(SparkSourceError):
    """Raised with failOnDataLoss=true only; with false a warning is logged and the query continues after the gap."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Hide the traceback that Spark shows for an exception in a worker: the text of our own errors is enough."""
    try:
        yield
    except MQError:
        # The worker process reports this exception and ends, so the setting has no other effect.
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise
