from __future__ import annotations

import asyncio

import pytest

from downrange.broker.role_services import RoleServices


async def test_services_run_only_between_start_and_stop() -> None:
    running: list[str] = []

    async def service() -> None:
        running.append("a")
        try:
            await asyncio.Event().wait()
        finally:
            running.remove("a")

    services = RoleServices(a=service)
    for _ in range(2):
        services.start()
        services.start()
        await asyncio.sleep(0)
        assert running == ["a"]
        await services.stop()
        assert running == []


async def test_a_service_that_fails_ends_the_whole() -> None:
    async def failing() -> None:
        raise OSError("broken")

    services = RoleServices(failing=failing)
    services.start()
    with pytest.raises(OSError, match="broken"):
        await services.run()
