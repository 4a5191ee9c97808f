"""Checks 1, 2, 3 and 5: what is installed, how the console starts, and how little it sends."""

from __future__ import annotations

import asyncio
import socket
import time
import tomllib
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from packaging.requirements import Requirement

from tests.browser.conftest import Visits
from tests.support.console_process import ConsoleProcess, console_process
from tests.support.lasting_port import lasting_port
from tests.support.processes import running
from tests.support.standalone_process import standalone_process

pytestmark = pytest.mark.asyncio(loop_scope="package")

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
TRANSFERRED = """() => [...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]
  .map(one => one.transferSize).reduce((sum, one) => sum + one, 0)"""


def needed(requirements: list[str]) -> set[str]:
    """The packages that requirements bring with them, by the metadata of those installed here."""
    found: set[str] = set()
    for requirement in map(Requirement, requirements):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found |= {requirement.name.lower()} | needed(metadata.requires(requirement.name) or [])
    return found


async def test_01_the_extra_brings_at_most_nine_packages() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    plain, with_console = needed(project["dependencies"]), needed(project["optional-dependencies"]["console"])
    assert {"starlette", "uvicorn", "jinja2"} <= with_console
    assert len(with_console - plain) <= 9, with_console - plain


async def test_02_the_console_beside_a_broker_ends_when_its_parent_is_killed(visits: Visits, tmp_path: Path) -> None:
    ports = ("--namesrv-port", "0", "--broker-port", "0", "--metrics-port", "-1", "--grpc-port", "-1")
    with running("standalone", "--data", str(tmp_path), *ports, "--console", "--console-port", "0") as parent:
        address = parent.wait_for(r"console +(http://\S+)/")[1]
        visitor = await visits(address)
        began = time.monotonic()
        await visitor.opens("/")
        print(f"\nfirst page {time.monotonic() - began:.2f} s after the address was printed")
        assert await visitor.text("h1") == "Overview"
        parent.kill()
        where = urlsplit(address)
        async with asyncio.timeout(20):
            while can_connect(str(where.hostname), int(where.port or 0)):
                await asyncio.sleep(0.05)


def can_connect(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1).close()
    except OSError:
        return False
    return True


async def test_03_a_page_fills_in_by_itself_when_the_cluster_comes(visits: Visits, tmp_path: Path) -> None:
    port = lasting_port()
    with console_process(f"127.0.0.1:{port}") as console:
        visitor = await visits(console.address)
        await visitor.opens("/")
        assert "Nothing is known yet" in await visitor.text()
        assert f"127.0.0.1:{port}" in await visitor.text()
        with standalone_process(tmp_path, namesrv_port=port):
            await visitor.page.wait_for_selector('.table a:text-is("broker-a")', timeout=60_000)
            assert "Nothing is known yet" not in await visitor.text()


@pytest.mark.parametrize("locale", ["en-GB", "zh-CN"])
async def test_05_the_first_load_is_small_and_the_second_smaller(
    visits: Visits, console: ConsoleProcess, locale: str
) -> None:
    visitor = await visits(console.address)
    sizes = []
    await visitor.until("/c/local", "#rates .u-over")  # from now on the chart has something to draw
    visitor = await visits(console.address, locale=locale)
    for _ in range(2):
        await visitor.opens("/c/local")
        await visitor.page.wait_for_selector("#rates .uplot")
        sizes.append(await visitor.page.evaluate(TRANSFERRED))
    print(f"\ntransferred, {locale}: first load {sizes[0] / 1000:.1f} kB, second {sizes[1] / 1000:.1f} kB")
    assert sizes[0] < 150_000
    assert sizes[1] < 10_000


async def test_the_start_costs_little(console: ConsoleProcess) -> None:
    """Seconds are the business of the machine; the processor time of a start is that of the console."""
    seconds, processor = console.start_seconds, console.start_processor_seconds
    print(f"\nconsole: ready after {seconds:.2f} s and {processor:.2f} s of a processor")
    assert processor < 1.5
