"""What the documents show is true: their Python runs, their pages are up to date, their links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from downrange import Producer
from tests.support.standalone_process import standalone_process

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/*.md")])


def example(page: Path, name: str) -> str:
    """The Python block that follows `<!-- example: NAME -->`."""
    found = re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    assert found is not None, f"{page.name} has no example {name}"
    return found[1]


def test_the_first_example_of_the_readme_runs(tmp_path: Path) -> None:
    code = example(ROOT / "README.md", "send")
    assert len(code.strip().splitlines()) <= 10
    with standalone_process(tmp_path) as running:
        program = code.replace("127.0.0.1:9876", running.namesrv)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["SEND_OK"] * 3


def test_the_second_example_of_the_readme_receives_what_the_first_sent(tmp_path: Path) -> None:
    sending, receiving = (example(ROOT / "README.md", name) for name in ("send", "receive"))
    with standalone_process(tmp_path) as running:
        for code in (sending, receiving):
            program = code.replace("127.0.0.1:9876", running.namesrv)
            program = program.replace("print(message.body)", "print(message.body, flush=True)")
            process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            lines = sorted(process.stdout.readline().strip() for _ in range(3))
            process.kill()
            process.communicate(timeout=10)
    assert lines == ["b'order 0'", "b'order 1'", "b'order 2'"]


def test_the_reference_of_settings_is_up_to_date() -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "reference.py", "--check"], check=True, timeout=30)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_everything_the_package_offers_by_name_is_there() -> None:
    import downrange

    for name in downrange.__all__:
        assert getattr(downrange, name) is not None
    assert downrange.Producer is Producer
    with pytest.raises(AttributeError):
        downrange.nothing  # noqa: B018
