"""The site of the pages: it builds without a warning, loads nothing from other machines, and shows its pictures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.docs.test_docs import ROOT

PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it. A link or anchor that leads nowhere is an error, and a page without a menu."""
    directory = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(directory)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return directory


def test_nothing_of_the_site_comes_from_other_machines(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        html = page.read_text("utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)\b[^>]*\bsrc=\"?([^\s\">]+)", html)
        loaded += re.findall(r"<link\b[^>]*\brel=\"?(?:stylesheet|preconnect|icon)\"?[^>]*\bhref=\"?([^\s\">]+)", html)
        assert loaded
        assert [one for one in loaded if re.match(r"(?:https?:)?//", one)] == [], page.name


def test_everything_that_pages_load_is_there(site: Path) -> None:
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # its addresses begin at the root of a server
            continue
        html = page.read_text("utf-8")
        for target in re.findall(r"\b(?:src|href)=\"?([^\s\">]+)", html):
            path = target.partition("#")[0].partition("?")[0]
            if path and not re.match(r"\w+:", path):
                assert (page.parent / path).exists(), f"{page.name} needs {target}"


def test_the_search_knows_the_pages(site: Path) -> None:
    index = (site / "search" / "search_index.js").read_text("utf-8")
    for words in ("tutorial.html", "coming-from-kafka.html", "reference/cli.html", "reference/api.html"):
        assert words in index


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_a_picture_is_whole_described_and_readable_on_dark_ground(picture: Path) -> None:
    root = ElementTree.fromstring(picture.read_text("utf-8"))  # noqa: S314  # a file of this repository
    name = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{name}svg"
    assert root.get("viewBox")
    assert len(root.findtext(f"{name}title") or "") > 10
    assert "prefers-color-scheme: dark" in picture.read_text("utf-8")
    assert len(list(root.iter(f"{name}text"))) > 5


def test_there_are_pictures_and_pages_show_each() -> None:
    assert len(PICTURES) >= 4
    pages = "".join(page.read_text("utf-8") for page in (ROOT / "docs").rglob("*.md"))
    assert [picture.name for picture in PICTURES if f"pictures/{picture.name})" not in pages] == []
