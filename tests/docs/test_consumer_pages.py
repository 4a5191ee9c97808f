"""The Python of these pages runs as it stands, but for the address."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from downrange import ClientConfig, Message
from downrange.client.session import Session
from downrange.testing import EmbeddedBroker, broker
from tests.support.dead_letters import give_up

HOW_TO = Path(__file__).parent.parent.parent / "docs" / "how-to"


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (HOW_TO / page).read_text("utf-8"), re.DOTALL | re.MULTILINE)


def run(program: str, directory: Path) -> str:
    """Run a block, or the tests in it."""
    file = directory / "test_page.py"
    file.write_text(program)
    is_test = "def test_" in program
    pytest_options = ["-m", "pytest", "-q", "-p", "downrange.testing.plugin", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, *(pytest_options if is_test else ()), str(file)],
        capture_output=True,
        text=True,
        timeout=240,  # one block starts Spark
        cwd=directory,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def prepare(mq: EmbeddedBroker) -> None:
    mq.create_topic("orders", 2)
    producer = mq.producer()
    first, *_ = producer.queues("orders")
    for number in range(5):
        producer.send(Message("orders", b"%d" % number))
    producer.send(Message("orders", b"last"), queue=first)

    async def dead_letter() -> None:
        async with Session(ClientConfig.of(mq.namesrv)) as session:
            await give_up(mq, session, Message("orders", b"hopeless"))

    asyncio.run(dead_letter())


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("page", "number"),
    [
        (page, number)
        for page in ("pull-messages.md", "pop.md", "dead-letters.md", "test-your-code.md")
        for number in range(len(blocks(page)))
    ],
)
def test_a_block_runs(page: str, number: int, tmp_path: Path) -> None:
    with broker() as mq:
        prepare(mq)
        output = run(blocks(page)[number].replace("127.0.0.1:9876", mq.namesrv), tmp_path)
    if page == "dead-letters.md":
        assert " sent" in output.splitlines()[-1]
    elif page in ("pull-messages.md", "pop.md"):
        assert output  # every block there prints what it read
