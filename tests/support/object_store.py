"""A real S3 server process with a bucket, for lakes that are not on a disk; and places of either kind for a lake."""

from __future__ import annotations

import http.client
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from uuid import uuid4

from downrange.spark.lake.lake import Lake
from tests.support.processes import Running

BUCKET = "lakes"
SECRET = "very-secret"  # noqa: S105


class LakePlace(NamedTuple):
    """Where a test has its lake, and the storage options with which to find it."""

    url: str
    options: dict[str, str]

    @property
    def is_local(self) -> bool:
        return "://" not in self.url

    def create(self) -> Lake:
        return Lake.create(self.url, self.options)

    def open(self) -> Lake:
        return Lake.open(self.url, self.options)


class ObjectStore(NamedTuple):
    """The server and the options with which a lake finds it."""

    port: int

    @property
    def options(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }

    def new_place(self) -> LakePlace:
        return LakePlace(f"s3://{BUCKET}/{uuid4().hex}/lake", self.options)


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    server = Running("-H", "127.0.0.1", "-p", "0", program=(sys.executable, "-m", "moto.server"))
    try:
        deadline = time.monotonic() + 60
        while (found := re.search(r"Running on http://127\.0\.0\.1:(\d+)", server.errors)) is None:
            assert time.monotonic() < deadline, f"the S3 server does not start: {server.errors}"
            time.sleep(0.05)
        store = ObjectStore(int(found[1]))
        connection = http.client.HTTPConnection("127.0.0.1", store.port, timeout=60)
        connection.request("PUT", f"/{BUCKET}")
        assert connection.getresponse().status == 200
        yield store
    finally:
        server.kill()
        server.close()
