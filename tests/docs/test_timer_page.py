"""The Python of docs/how-to/timer-messages.md runs as it stands, but for the address."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from downrange.testing import broker

PAGE = Path(__file__).parent.parent.parent / "docs" / "how-to" / "timer-messages.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("number", "output"), [(0, ""), (1, "True\n")])
def test_a_block_runs(number: int, output: str, tmp_path: Path) -> None:
    with broker({"recallMessageEnable": "true"}) as mq:
        file = tmp_path / "block.py"
        file.write_text(BLOCKS[number].replace("127.0.0.1:9876", mq.namesrv))
        done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=60, cwd=tmp_path)
        assert (done.returncode, done.stderr, done.stdout) == (0, "", output)
        assert len(mq.wait_for("rmq_sys_wheel_timer", 2, timeout=30)) == 2
