from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from tests.unit.client.fake_cluster import FakeCluster, fake_cluster


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    """Two brokers, a and b, and a name server."""
    async with fake_cluster(tmp_path, "broker-a", "broker-b") as running:
        yield running


@pytest.fixture
async def admin(cluster: FakeCluster) -> AsyncIterator[Admin]:
    async with Admin(ClientConfig((cluster.namesrv,), request_timeout_seconds=5)) as client:
        yield client
