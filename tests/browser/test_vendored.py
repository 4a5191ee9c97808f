"""Files of other projects are as their packages have them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

VENDOR = Path(__file__).parent / "vendor"


def test_the_sums_of_vendored_files() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|.*\| `([0-9a-f]{64})` \|$", (VENDOR / "VENDORED.md").read_text(), re.MULTILINE)
    assert {name for name, _ in rows} == {path.name for path in VENDOR.iterdir()} - {"VENDORED.md"}
    for name, digest in rows:
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest, name
