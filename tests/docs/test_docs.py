"""What the documents show is true: their Python runs, their pages are up to date, their links lead somewhere."""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from downrange import Producer
from tests.support.standalone_process import standalone_process

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "src" / "downrange"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/*.md")])
# The name of a file in a text, with or without directories; not a part of an address, a pattern or a placeholder.
FILE = re.compile(r"(?<![\w/.~{<*-])((?:[\w-]+/)*[\w-]+\.(?:md|py|c|h|txt|toml))\b(?![(*])")
# Files that the examples of the pages read or write, and that a run of the benchmarks leaves behind.
PROGRAMS = {"ask.py", "job.py", "receive.py", "send.py", "transformations/orders.py"}
MADE_BY_THE_READER = PROGRAMS | {"lines.txt", "results/failover.md", "results/latest.md"}


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
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
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


@pytest.mark.parametrize("script", ["reference.py", "client_reference.py", "cli_reference.py", "api_reference.py"])
def test_a_reference_is_up_to_date(script: str) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / script, "--check"], check=True, timeout=100)


def test_every_setting_of_a_client_has_a_meaning() -> None:
    rows = (ROOT / "docs" / "reference" / "clients.md").read_text("utf-8").splitlines()
    assert [row for row in rows if row.startswith("| `") and row.endswith("|  |")] == []


def test_the_reference_of_settings_does_not_depend_on_the_machine(tmp_path: Path) -> None:
    code = (
        "import runpy, socket, sys; socket.gethostname = lambda: 'another-host'; "
        f"sys.argv = ['reference.py', '--check']; runpy.run_path({str(ROOT / 'scripts' / 'reference.py')!r}, "
        "run_name='__main__')"
    )
    elsewhere = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100, env=elsewhere)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_named_on_a_page_exist(page: Path) -> None:
    assert missing_files(page.read_text("utf-8"), page.parent) == []


def test_files_named_in_docstrings_and_comments_exist() -> None:
    missing = []
    for path in sorted(SOURCE.rglob("*.py")):
        for words in words_of(path.read_text("utf-8")):
            missing += [f"{path.relative_to(ROOT)}: {name}" for name in missing_files(words, path.parent)]
    for path in sorted([*SOURCE.rglob("*.c"), *SOURCE.rglob("*.h")]):
        for words in re.findall(r"/\*.*?\*/", path.read_text("utf-8"), re.DOTALL):
            missing += [f"{path.relative_to(ROOT)}: {name}" for name in missing_files(words, path.parent)]
    assert missing == []


def words_of(code: str) -> list[str]:
    """The comments of a Python file, and the strings that stand alone: docstrings, and notes below a field."""
    alone = [
        node.value.value
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    return alone + [token.string for token in tokens if token.type == tokenize.COMMENT]


def missing_files(text: str, near: Path) -> list[str]:
    """Names of files in `text` that exist neither from `near` upwards nor in the package."""
    return [name for name in FILE.findall(text) if name not in MADE_BY_THE_READER and not _exists(name, near)]


def _exists(name: str, near: Path) -> bool:
    is_there = any((directory / name).exists() for directory in (SOURCE, near, *near.parents))
    return is_there or ("/" not in name and any(SOURCE.rglob(name)))


def test_everything_the_package_offers_by_name_is_there() -> None:
    import downrange

    for name in downrange.__all__:
        assert getattr(downrange, name) is not None
    assert downrange.Producer is Producer
    with pytest.raises(AttributeError):
        downrange.nothing  # noqa: B018


@pytest.mark.parametrize("module", ["downrange", "downrange.errors", "downrange.testing", "downrange.spark"])
def test_every_public_name_has_a_docstring(module: str) -> None:
    """Also every method and property of a public class: the API reference shows them."""
    public = importlib.import_module(module)
    assert public.__doc__
    without = []
    for name in public.__all__:
        value = getattr(public, name)
        if not value.__doc__ or value.__doc__.startswith(f"{name}("):  # what a dataclass makes up for itself
            without.append(name)
        for member, static in inspect.getmembers_static(value) if inspect.isclass(value) else ():
            function = static.fget if isinstance(static, property) else getattr(static, "__func__", static)
            is_ours = inspect.isfunction(function) and function.__module__.startswith("downrange")
            if not is_ours or member.startswith("_"):
                continue
            text = inspect.getdoc(getattr(value, member))
            if not text or text.startswith("See "):  # nor is a reader sent elsewhere
                without.append(f"{name}.{member}")
    assert without == []


PUBLIC = {"downrange", "downrange.errors", "downrange.testing", "downrange.spark"}


IMPORT = re.compile(r"^(?:from|import) (downrange[\w.]*)(?: import (.+))?$", re.MULTILINE)


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))], ids=lambda page: page.stem)
def test_programs_on_pages_import_public_names_only(page: Path) -> None:
    for module, names in IMPORT.findall(page.read_text("utf-8")):
        assert module in PUBLIC
        assert {name.strip() for name in names.split(",") if name} <= set(importlib.import_module(module).__all__)
