"""The Python of docs/how-to/transactions.md runs as it stands, but for the address."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from downrange.testing import broker

PAGE = Path(__file__).parent.parent.parent / "docs" / "how-to" / "transactions.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs(number: int, tmp_path: Path) -> None:
    with broker() as mq:
        file = tmp_path / "block.py"
        file.write_text(BLOCKS[number].replace("127.0.0.1:9876", mq.namesrv))
        done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=60, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        (message,) = mq.wait_for("orders", 1, timeout=30)
    assert done.stdout.split() == ["COMMIT", message.transaction_id]
