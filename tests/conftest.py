from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
from hypothesis import HealthCheck, settings

from downrange.transport.loop import loop_factory

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
