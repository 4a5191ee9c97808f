"""Broker and producers are killed at any step: each transaction ends as it was decided, and nothing shows before."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.transaction_torture import survive


async def test_no_transaction_is_left_open_or_shown_early(tmp_path: Path) -> None:
    await survive(tmp_path, random.randrange(1 << 32), transactions=300, broker_deaths=2)


@pytest.mark.slow
@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
async def test_thousands_of_transactions_survive_many_deaths(tmp_path: Path, flush: str) -> None:
    await survive(tmp_path, random.randrange(1 << 32), transactions=2500, broker_deaths=15, flush=flush)
