"""Room ahead of the appends: the stretch of a log file whose blocks are claimed and whose pages are in memory."""

from __future__ import annotations

from pathlib import Path
from time import sleep
from typing import Final

from downrange.store.files import Files, opened

# So much is kept ready ahead of the appends, and after so much of it was used the rest is topped up.
AHEAD: Final = 16 << 20
STEP: Final = 4 << 20
# One write of zeros. The kernel keeps it as one piece, and a store to any byte of it makes the whole piece dirty:
# larger ones make syncs slower, smaller ones stores.
PIECE: Final = 64 << 10
_ZEROS: Final = memoryview(bytes(PIECE))
_PAUSE_SECONDS: Final = 0.0001


class Stretch:
    """A part of a log file that gets ready for appends through the mapping, by one thread that need not be the store's.

    Ready means written once, with zeros. The first store to a page that was only reserved makes the kernel read ahead,
    take a page fault and begin a transaction of the file system, and that waits for a sync that is going on; every
    sync then has to say in the journal that the blocks are in use now. After a write it is a store to memory.

    `ready` says how far it is, `is_over` that it will not go further; only `prepare` changes them.
    """

    __slots__ = ("_files", "_is_taken_back", "_is_writing", "_path", "_piece", "_stop", "is_over", "ready")

    def __init__(self, path: Path, begin: int, stop: int, files: Files, piece: int) -> None:
        self.ready = begin
        self._path = path
        self._stop = stop
        self._files = files
        self._piece = piece
        self._is_writing = False
        self._is_taken_back = False
        self.is_over = False

    def prepare(self) -> None:
        """Write it, piece by piece. Raises OSError when there is no room; what is ready by then stays so."""
        self._is_writing = True  # before the first look at whether it was taken back
        try:
            if not self._is_taken_back:
                self._write()
        finally:
            self.is_over = True
            self._is_writing = False

    def _write(self) -> None:
        with opened(self._files, self._path) as descriptor:
            self._files.reserve(descriptor, self.ready, self._stop - self.ready)
            while self.ready < self._stop and not self._is_taken_back:
                length = min(self._piece - self.ready % self._piece, self._stop - self.ready)
                self._files.write_at(descriptor, _ZEROS[:length], self.ready)
                self.ready += length

    def take_back(self) -> int:
        """See to it that nothing more is written, now or later; how far it is ready then. For the store's thread."""
        self._is_taken_back = True
        while self._is_writing:  # one piece at most
            sleep(_PAUSE_SECONDS)
        return self.ready


class Headroom:
    """How far one file is ready for appends. For the store's thread.

    Holds always: nothing before `end` is ever touched from here, and all after it may become zeros at any time, so an
    append must not go beyond it. A thread that prepares a stretch shares only numbers
    with the store's thread.
    """

    __slots__ = ("_end", "_files", "_path", "_piece", "_size", "_stretch")

    def __init__(self, path: Path, size: int, files: Files, *, piece: int) -> None:
        self._end = size  # until somebody knows where its data ends
        self._path = path
        self._size = size
        self._files = files
        self._piece = piece
        self._stretch: Stretch | None = None

    @property
    def end(self) -> int:
        return self._end if self._stretch is None else self._stretch.ready

    def begin_at(self, position: int) -> None:
        """Everything before `position` is data or ready, all after it zeros."""
        if self._stretch is not None:
            self._stretch.take_back()
        self._stretch = None
        self._end = position

    def next_stretch(self, upto: int) -> Stretch | None:
        """What is to be prepared for the headroom to reach so far; None when it does, or is being prepared."""
        if self._stretch is not None:
            if not self._stretch.is_over:
                return None
            self.begin_at(self._stretch.ready)
        upto = min(-(-upto // self._piece) * self._piece, self._size)
        if self._end >= upto:
            return None
        self._stretch = Stretch(self._path, self._end, upto, self._files, self._piece)
        return self._stretch

    def extend(self, upto: int) -> None:
        """Reach so far at once. Raises OSError when there is no room.

        Storing to a mapped page for which the disk has no block left would kill the process.
        """
        if min(upto, self._size) <= self.end:
            return
        if self._stretch is not None:
            self.begin_at(self._stretch.take_back())
        stretch = self.next_stretch(upto)
        if stretch is None:  # what was taken back got so far meanwhile
            return
        try:
            stretch.prepare()
        finally:
            self.begin_at(stretch.ready)
