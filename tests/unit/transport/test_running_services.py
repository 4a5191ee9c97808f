from __future__ import annotations

import asyncio

import pytest

from downrange.transport.running_services import running_services


async def test_services_run_beside_the_block_and_stop_with_it() -> None:
    seen: list[str] = []

    async def service() -> None:
        try:
            seen.append("started")
            await asyncio.Event().wait()
        finally:
            seen.append("stopped")

    async with running_services(one=service()):
        await asyncio.sleep(0)
        assert seen == ["started"]
    assert seen == ["started", "stopped"]


async def test_a_service_that_fails_ends_the_block_with_its_error() -> None:
    async def service() -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError, match="a bug"):
        async with running_services(bad=service()):
            await asyncio.Event().wait()
    await asyncio.sleep(0)  # the cancellation that ended the block does not reach further


async def test_a_service_that_simply_ends_is_an_error_too() -> None:
    async def service() -> None:
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="the service short ended"):
        async with running_services(short=service()):
            await asyncio.Event().wait()


async def test_errors_of_the_block_stay_as_they_are() -> None:
    with pytest.raises(KeyError):
        async with running_services(idle=asyncio.Event().wait()):  # type: ignore[arg-type]
            raise KeyError("mine")


async def test_cancelling_from_outside_is_not_mistaken_for_a_failure() -> None:
    async def run() -> None:
        async with running_services(idle=asyncio.Event().wait()):  # type: ignore[arg-type]
            await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
