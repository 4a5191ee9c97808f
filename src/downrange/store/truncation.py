"""Cuts the end off a log so that it stays off. [truncateDirtyFiles, which only moves positions in memory]

A replica that has bytes which its master does not have cuts them off before it says where its log ends. If old bytes
stayed in the file, the next recovery would walk over them, and records that no master has would be back.

The steps, each on disk before the next one begins: note where the log is to end; remove later files; fill the rest of
the file with zeros; let queues and index forget what was cut (recovery does that again, if need be); remove the note. A
start that finds the note begins with the second step.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from downrange.model.message import PhysicalOffset
from downrange.store.errors import StoreCorrupt
from downrange.store.files import Files, opened, replace_synced
from downrange.store.log.segments import Segments

log = logging.getLogger(__name__)

NOTE: Final = "truncateTo"


class Truncation:
    """The note of where a log is to end, and the cutting of its files. For the store's own thread."""

    def __init__(self, root: Path, segments: Segments, files: Files) -> None:
        self._path = root / NOTE
        self._segments = segments
        self._files = files

    def noted(self) -> PhysicalOffset | None:
        """Where the log is to end according to a truncation that did not finish; None when there is none."""
        try:
            text = self._path.read_text("ascii")
        except FileNotFoundError:
            return None
        try:
            return PhysicalOffset(int(text))
        except ValueError:
            raise StoreCorrupt(f"{self._path}: it is not an offset") from None

    def note(self, offset: PhysicalOffset) -> None:
        replace_synced(self._files, self._path, b"%d\n" % offset)

    def clear(self, offset: PhysicalOffset) -> None:
        """Remove everything behind `offset` from the files of the log; `Segments.cut` has to follow."""
        directories = set()
        for segment in self._segments:
            if segment.start > offset:
                self._files.remove(segment.path)
                directories.add(segment.path.parent)
        for directory in directories:
            self._files.sync_directory(directory)
        torn = self._segments.find(offset)
        if torn is not None:
            self._files.clear_from(torn.path, offset - torn.start)
            with opened(self._files, torn.path) as descriptor:
                self._files.sync(descriptor)
        log.warning("log truncated offset=%d", offset)

    def finish(self) -> None:
        self._files.remove(self._path)
        self._files.sync_directory(self._path.parent)
