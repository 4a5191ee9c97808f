"""Files for those who run servers: units, containers, the dashboard, the licence."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from downrange.cli.main import app

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def assert_options_exist(words: list[str]) -> None:
    """The command of these words exists, and has all of the options."""
    command = get_command(app).commands[words[0]]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= known


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_are_verified_by_systemd(unit: Path, tmp_path: Path) -> None:
    """The program of the unit is replaced: it is not installed where tests run."""
    for one in UNITS:
        text = one.read_text().replace("/opt/downrange/bin/downrange", sys.executable)
        (tmp_path / one.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / unit.name], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_commands_of_units_exist(unit: Path) -> None:
    (line,) = re.findall(r"^ExecStart=\S+/downrange (.+)$", unit.read_text(), re.MULTILINE)
    assert_options_exist(line.split())


def test_the_commands_of_the_compose_file_exist() -> None:
    services = yaml.safe_load((DEPLOY / "container" / "compose.yaml").read_text())["services"]
    assert services.keys() == {"namesrv", "broker-a", "broker-b", "console"}
    for service in services.values():
        assert_options_exist(service["command"].split())


def test_the_dashboard_shows_metrics_that_exist() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text("utf-8")
    labels = {
        name: {"cluster", "node_id", *re.findall(r"\w+", more)}
        for name, more in re.findall(r"^\| `(rocketmq_\w+)` \|[^|]+\|([^|]*)\|", page, re.MULTILINE)
    }
    dashboard = json.loads((DEPLOY / "grafana" / "downrange.json").read_text("utf-8"))
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    shown += [one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    assert len(shown) > 10
    for expression in shown:
        (name,) = set(re.findall(r"rocketmq_\w+", expression))
        assert name in labels, f"{name} is no metric of a broker"
        for group in re.findall(r"by \(([^)]*)\)", expression):
            assert set(re.split(r",\s*", group)) <= labels[name], expression


def test_the_licence_is_in_the_metadata() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    notice = (ROOT / "NOTICE").read_text()
    for licence in (ROOT / "src" / "downrange" / "console" / "static" / "vendor").glob("*.LICENSE"):
        assert licence.name in notice
    for pattern in project["license-files"]:
        assert list(ROOT.glob(pattern)), pattern
