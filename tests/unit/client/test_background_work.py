"""Tasks beside a client's calls: errors are told, the end leaves none."""

from __future__ import annotations

import asyncio

import pytest

from downrange.client.background_work import BackgroundWork


async def test_work_that_fails_is_logged_and_told(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise LookupError("lost")

    told: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    work = BackgroundWork(told.set_result)
    work.start(fail(), "errand")
    assert str(await told) == "lost"
    assert "background work ended task=downrange errand" in caplog.text
    assert repr(work) == "<BackgroundWork >", "it is not kept"


async def test_work_that_is_cancelled_has_ended_and_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    problems: list[BaseException] = []
    ended: list[bool] = []
    work = BackgroundWork(problems.append)
    tasks = [work.start(wait(), name) for name in ("b", "a")]
    assert repr(work) == "<BackgroundWork downrange a, downrange b>"
    await asyncio.sleep(0)  # they have begun
    await work.cancel()
    assert [task.cancelled() for task in tasks] == ended == [True, True]
    assert not problems
    assert not caplog.records
