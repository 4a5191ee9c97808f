"""The examples of these pages run as they stand, but for the address."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from downrange.cli.main import app
from downrange.testing import broker
from tests.docs.test_docs import ROOT, example

HOW_TO = ROOT / "docs" / "how-to"


def block(page: str) -> str:
    found = re.search(r"^```python\n(.*?)^```", (HOW_TO / page).read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def run(program: str, directory: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=directory, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_question_is_answered(tmp_path: Path) -> None:
    page = HOW_TO / "request-reply.md"
    with broker() as mq:
        mq.create_topic("questions")
        ask, answer = (example(page, name).replace("127.0.0.1:9876", mq.namesrv) for name in ("ask", "answer"))
        answering = subprocess.Popen(
            [sys.executable, "-c", answer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
        )
        try:
            assert answering.stdout is not None
            assert answering.stdout.readline() == "Enter ends it\n"
            assert run(ask.replace("timeout=5", "timeout=30"), tmp_path) == "b'WHO IS THERE?'"
        finally:
            answering.communicate("\n", timeout=20)
        assert answering.returncode == 0
        timed_out = run(ask.replace("timeout=5", "timeout=2"), tmp_path)
        assert timed_out == "request to questions: no reply within 2 s"


def test_a_trace_is_drawn(tmp_path: Path) -> None:
    with broker() as mq:
        mq.create_topic("orders", queues=1)
        message_id = run(block("trace-a-message.md").replace("127.0.0.1:9876", mq.namesrv), tmp_path)
        drawn = CliRunner().invoke(app, ["trace", message_id, "-n", mq.namesrv]).stdout
    assert "by shop at 127.0.0.1, success after" in drawn
    assert "└ consumed by billing\n    delivery 1  " in drawn


def test_a_signed_message_is_sent(tmp_path: Path) -> None:
    with broker() as mq:
        program = block("use-access-control.md").replace("127.0.0.1:9876", mq.namesrv)
        assert run(program, tmp_path) == "SEND_OK"
