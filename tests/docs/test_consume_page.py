"""The Python of docs/how-to/consume-messages.md runs as it stands, but for the address."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from downrange import Message
from downrange.testing import broker

PAGE = Path(__file__).parent.parent.parent / "docs" / "how-to" / "consume-messages.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs(number: int, tmp_path: Path) -> None:
    with broker() as mq:
        producer = mq.producer()
        for body in (b"first", b"last"):
            properties = {"amount": "150", "region": "eu"}
            producer.send(Message("orders", body, tags="paid", sharding_key="one", properties=properties))
        file = tmp_path / "block.py"
        file.write_text(BLOCKS[number].replace("127.0.0.1:9876", mq.namesrv))
        done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 2
