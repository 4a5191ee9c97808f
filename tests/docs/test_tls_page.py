"""The steps of docs/how-to/use-tls.md work as they are written."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from downrange.broker.app import load_config
from downrange.transport.tls import outgoing_tls, server_tls
from tests.docs.test_docs import example
from tests.support.processes import DOWNRANGE, running

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "use-tls.md"


def steps() -> list[str]:
    """The commands of the page, without their comments."""
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    return [line[2:].partition("  #")[0].strip() for block in blocks for line in block.splitlines()]


def downrange(step: str, directory: Path, env: dict[str, str] | None = None) -> str:
    words = shlex.split(step)
    assert words[0] == "downrange"
    ended = subprocess.run(
        [*DOWNRANGE, *words[1:]],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **(env or {})},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_steps_of_the_page(tmp_path: Path) -> None:
    install, init, start, send, export, listing = steps()
    assert install == "pip install 'downrange[tls]'"
    assert "server.properties" in downrange(init, tmp_path)
    serve = shlex.split(start)[1:]
    serve[serve.index("--tls-config") + 1] = str(tmp_path / "tls" / "server.properties")
    free = ("--namesrv-port", "0", "--broker-port", "0", "--metrics-port", "-1", "--grpc-port", "-1")
    with running(*serve, *free, "--data", str(tmp_path / "data")) as process:
        namesrv = process.wait_for(r"name server +(\S+)")[1]
        env = {"NAMESRV_ADDR": namesrv}
        assert "SEND_OK" in downrange(send, tmp_path, env)
        name, _, value = export.removeprefix("export ").partition("=")
        assert "orders" in downrange(listing, tmp_path, {**env, name: value}).split()
        program = example(PAGE, "send").replace("127.0.0.1:9876", namesrv)
        ended = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert ended.stdout.strip() == "SEND_OK", ended.stderr


def test_the_configuration_of_the_page(tmp_path: Path) -> None:
    downrange("downrange tls init tls", tmp_path)
    found = re.search(r"<!-- config: server -->\n```\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert found is not None
    conf = tmp_path / "broker.conf"
    conf.write_text(found[1].replace("/etc/downrange", str(tmp_path / "tls")))
    config, _, _ = load_config(conf, {})
    tls = server_tls(config.tls)
    assert tls is not None
    assert tls.is_enforced
    assert outgoing_tls(config.tls) is not None
