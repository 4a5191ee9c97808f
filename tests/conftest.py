from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from downrange.transport.loop import loop_factory
from tests.support.object_store import LakePlace, ObjectStore, object_store

# How long an example takes, to make or to try, is the machine's business.
settings.register_profile("downrange", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("downrange")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Async tests run on the loop that users get; those of the transport on both loops we support."""
    fastest = loop_factory() or asyncio.new_event_loop
    if item.path.name in ("test_transport.py", "test_sockets.py", "test_tls_server.py"):
        return {"asyncio": asyncio.new_event_loop, "fastest": fastest}
    return {"fastest": fastest}


@pytest.fixture(scope="session")
def s3() -> Iterator[ObjectStore]:
    """An S3 server process for all tests that need one; each takes its own place in it."""
    with object_store() as running:
        yield running


@pytest.fixture(params=["disk", "S3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> LakePlace:
    """A new place for a lake: tests that use it run on a disk and in an object store."""
    if request.param == "disk":
        return LakePlace(str(tmp_path / "lake"), {})
    store: ObjectStore = request.getfixturevalue("s3")
    return store.new_place()
