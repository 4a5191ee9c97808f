"""What a start of the console imports: the first page waits for nothing that other pages or commands need."""

from __future__ import annotations

import inspect
import subprocess
import sys

from downrange.console.views import ADDRESSES

IMPORTED = """
import sys
from typer.main import get_command
from downrange.cli.main import app
get_command(app).commands["console"]
import downrange.console.app
from downrange.console.views import ADDRESSES
[row.handler for row in ADDRESSES if row.view == "overview.overview"]
print(*sys.modules)
"""
LATER = (
    "downrange.broker",
    "downrange.cli.cluster",
    "downrange.cli.topic",
    "downrange.client.admin.messages",
    "downrange.client.dead_letters",
    "downrange.client.producer.producer",
    "downrange.console.views.messages",
    "downrange.model.sql",
    "downrange.spark",
    "downrange.store",
)


def test_the_first_page_does_not_wait_for_other_modules() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED], check=True, capture_output=True, text=True)
    imported = done.stdout.split()
    assert "downrange.console.views.overview" in imported
    assert [name for name in LATER if name in imported] == []


def test_every_address_has_its_view() -> None:
    for row in ADDRESSES:
        assert inspect.iscoroutinefunction(row.handler), row.view
