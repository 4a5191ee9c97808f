"""docs/coming-from-rocketmq.md and docs/coming-from-kafka.md: a genuine store is taken over, the programs run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from downrange.testing import broker
from tests.docs.test_docs import ROOT, example
from tests.support.golden_store import files_under, unpack
from tests.support.processes import DOWNRANGE, namesrv, running

PAGE = (ROOT / "docs" / "coming-from-rocketmq.md").read_text("utf-8")
STORE = "/var/lib/rocketmq/store"
SIZES = ("mappedFileSizeCommitLog", "mappedFileSizeConsumeQueue", "maxHashSlotNum", "maxIndexNum")


def downrange(*words: str) -> str:
    done = subprocess.run([*DOWNRANGE, *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_store_of_the_genuine_broker_is_taken_over(tmp_path: Path) -> None:
    """The two commands of the page, on a directory that RocketMQ 4.9 left behind; it stays a whole store."""
    golden = unpack("clean", tmp_path)
    check, start = re.findall(rf"^ {{8}}(downrange .*{STORE}.*)$", PAGE, re.MULTILINE)
    conf = tmp_path / "broker.conf"
    kept = {key: value for key, value in golden.manifest["config"].items() if key in SIZES}
    settings = {**kept, "brokerName": "broker-a", "listenPort": 0, "metricsPort": -1, "grpcServerPort": -1}
    settings["fileReservedTime"] = 87600  # the messages are old
    conf.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    before = files_under(golden.root)
    assert "problems      none" in downrange(*shlex.split(check.replace(STORE, str(golden.root)))[1:])
    assert files_under(golden.root) == before
    topic = "gsAlpha"
    stored = {one["msgId"] for one in golden.manifest["messages"] if one["topic"] == topic}
    with namesrv(tmp_path / "names") as (_, names):
        words = shlex.split(start.replace(STORE, str(golden.root)).replace("ns1:9876", names))[1:]
        words[words.index("broker.conf")] = str(conf)
        with running(*words) as process:
            process.wait_for(r"ready on \S+")
            shown = downrange("consume", topic, "-n", names, "--json").splitlines()
            assert {json.loads(line)["offsetMsgId"] for line in shown} >= stored  # and delayed ones that are due
            assert "SEND_OK" in downrange("message", "send", topic, "one more", "-n", names)
            assert process.stop() == 0
    assert "problems      none" in downrange("store", "check", str(golden.root))


def test_the_programs_for_people_from_kafka() -> None:
    page = ROOT / "docs" / "coming-from-kafka.md"
    with broker() as mq:
        mq.create_topic("orders", queues=1)
        shown = []
        for name in ("send", "poll"):
            program = example(page, name).replace("127.0.0.1:9876", mq.namesrv)
            done = subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, done.stderr
            shown.append(done.stdout.strip())
    assert shown == ["SEND_OK", "0 0 b'paid'"]
