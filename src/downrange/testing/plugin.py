"""The pytest fixture. pytest loads this module wherever downrange is installed, so it imports next to nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from downrange.testing.embedded import EmbeddedBroker, broker


@pytest.fixture
def rocketmq() -> Iterator[EmbeddedBroker]:
    """An empty RocketMQ broker with a name server, for this test alone, on free ports of this machine."""
    with broker() as running:
        yield running
