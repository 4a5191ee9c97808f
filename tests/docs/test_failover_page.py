"""The page about failover: its settings are read, its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from downrange.cli.main import app
from downrange.controller.app import load_config

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "failover.md").read_text("utf-8")


def test_the_settings_of_the_page_are_read(tmp_path: Path) -> None:
    found = re.search(r"<!-- config: controller -->\n```\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    path = tmp_path / "controller.conf"
    path.write_text(found[1])
    config, warnings = load_config(path, {})
    assert warnings == []
    assert config.acl_file == tmp_path / "plain_acl.yml"


def test_the_commands_of_the_page_exist() -> None:
    families = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    named = set(re.findall(r"downrange (controller|cluster) (\w[\w-]*)", PAGE))
    assert len(named) >= 5
    for family, command in named:
        assert command in families[family].commands, f"{family} {command}"
