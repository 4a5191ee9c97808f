"""What the site does differently from the pages in the repository; `mkdocs.yml` names this file.

A link that leaves docs/ leads to a file of the repository, which the site does not have. The site shows the name of the
file instead. Such links are tested where they work, in the repository (tests/docs/test_docs.py).

Browsers start no worker for a page that is read from a disk, and the search needs one. The theme loads a stand-in for
workers from another machine; the site takes the copy in docs/vendor instead.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from posixpath import normpath
from typing import Any

STAND_IN = "https://unpkg.com/iframe-worker/shim"
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#:]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text of a page, with the names of files in place of links to files outside of docs/."""
    return LINK.sub(lambda found: _shown(found, PurePosixPath(page.file.src_uri)), markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """The HTML of a page, which loads nothing from other machines."""
    return output.replace(STAND_IN, "../" * (page.file.dest_uri.count("/")) + "vendor/iframe-worker.js")


def on_post_template(output_content: str, template_name: str, **_: Any) -> str:
    """The page for addresses that do not exist."""
    return output_content.replace(STAND_IN, "/vendor/iframe-worker.js")


def _shown(link: re.Match[str], page: PurePosixPath) -> str:
    target = normpath(f"docs/{page.parent}/{link[2]}")
    if target.startswith("docs/"):
        return link[0]
    return f"`{target}`" if link[1].strip("`") == target else f"{link[1]} (`{target}` in the repository)"
