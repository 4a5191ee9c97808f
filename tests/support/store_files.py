"""What a store leaves on disk."""

from __future__ import annotations

import shutil
from pathlib import Path

_DIRECTORIES = ("commitlog", "consumequeue", "consumequeue_ext", "index")


def files_of(root: Path) -> dict[str, bytes]:
    """The messages, queues and keys of a store as they lie on disk: not what holds the times of the machine."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.relative_to(root).parts[0] in _DIRECTORIES
    }


def copied_at_once(root: Path, copy: Path) -> None:
    """Copy a directory as a process leaves it that is killed now. What is replaced meanwhile is copied again."""
    while True:
        try:
            shutil.copytree(root, copy)
        except shutil.Error:
            shutil.rmtree(copy)
        else:
            return
