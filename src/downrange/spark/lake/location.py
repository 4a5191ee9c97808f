"""The place of a lake, a directory or a URL of an object store, and the file system that fits it.

A file that `open_output` opened is safe when it was closed: on a local disk it was synced then. Its name is safe after
`sync_names`, which a commit calls first; object stores have no such step.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from downrange.spark.lake.layout import LakeError

if TYPE_CHECKING:
    import pyarrow.fs

_SCHEME: Final = re.compile(r"([a-z][a-z0-9+.-]*)://")
_OBJECT_STORES: Final = frozenset({"s3", "s3a", "gs", "az", "abfs", "abfss"})
# Colours, arrows and line breaks of the library's messages; and queries of URLs, in which a signature may be.
_DECORATION: Final = re.compile(r"\x1b\[[0-9;]*m|↳|\s+")
_QUERY: Final = re.compile(r"\?\S+")


class Output:
    """A new file in an object store. It appears, as a whole, when it is closed."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._written = 0

    def write(self, data: Any) -> int:
        count: int = self._file.write(bytes(data))  # the library takes nothing else
        self._written += count
        return count

    def tell(self) -> int:
        return self._written

    def flush(self) -> None:
        """Parts are uploaded as they come."""

    @property
    def closed(self) -> bool:
        return bool(self._file.closed)

    def close(self) -> None:
        if not self.closed:
            self._file.close()


class LocalOutput(Output):
    """A new file on a local disk, synced when it is closed."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path.open("wb"))

    def write(self, data: Any) -> int:
        count: int = self._file.write(data)
        self._written += count
        return count

    def flush(self) -> None:
        """Start writing to the disk without waiting for it; pages that were written leave the page cache."""
        self._file.flush()
        if hasattr(os, "posix_fadvise"):  # not on every system
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        if not self.closed:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())


@dataclass(frozen=True, slots=True)
class Location:
    """The URL of a lake, and options for its object store, which may be secret. Spark pickles it for workers."""

    url: str
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, place: str | Path, storage_options: Mapping[str, str] | None = None) -> Location:
        text = str(place).removeprefix("file://")
        scheme = _SCHEME.match(text)
        if scheme is None:
            # Absolute: Spark's processes have working directories of their own.
            return cls(str(Path(text).absolute()), dict(storage_options or {}))
        if scheme[1] not in _OBJECT_STORES:
            known = ", ".join(f"{one}://" for one in sorted(_OBJECT_STORES))
            raise LakeError(f"a lake cannot be at {text}: expected a directory, or a URL with {known}")
        return cls(text.rstrip("/"), dict(storage_options or {}))

    def __str__(self) -> str:
        return self.url

    @property
    def directory(self) -> Path | None:
        """The directory of a lake on a local disk; None for an object store."""
        return None if _SCHEME.match(self.url) else Path(self.url)

    def filesystem(self) -> pyarrow.fs.FileSystem:
        """The files of the lake, by their paths in it."""
        import pyarrow.fs

        if self.directory is not None:
            return pyarrow.fs.SubTreeFileSystem(self.url, pyarrow.fs.LocalFileSystem())
        from deltalake.fs import DeltaStorageHandler  # only here: workers that write to a disk need not wait for it

        return pyarrow.fs.PyFileSystem(DeltaStorageHandler(self.url, dict(self.storage_options)))

    def open_output(self, path: str) -> Output:
        """A new file, to be written from start to end."""
        with storage_errors(self):
            if self.directory is not None:
                return LocalOutput(self.directory / path)
            from deltalake._internal import DeltaFileSystemHandler

            handler = DeltaFileSystemHandler(self.url, dict(self.storage_options))
            return Output(handler.open_output_stream(path, None))

    def read_whole(self, path: str) -> bytes | None:
        """The content of a small file; None when it is missing."""
        try:
            with storage_errors(self), self.filesystem().open_input_stream(path) as file:
                content: bytes = file.read()
                return content
        except LakeError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def write_whole(self, path: str, content: bytes) -> None:
        """Write a small file that, even after a crash, has its old content or its new one."""
        with storage_errors(self):
            temporary = path if self.directory is None else f"{path}.{os.getpid()}"
            output = self.open_output(temporary)
            output.write(content)
            output.close()
            if self.directory is not None:
                os.replace(self.directory / temporary, self.directory / path)
                self.sync_names([path], set())

    def remove(self, path: str) -> None:
        """Delete a file that does not count, if it is there."""
        with storage_errors(self), suppress(FileNotFoundError):
            self.filesystem().delete_file(path)

    def has_files(self) -> bool:
        """Whether anything is there."""
        import pyarrow.fs

        with storage_errors(self):
            return bool(self.filesystem().get_file_info(pyarrow.fs.FileSelector("", allow_not_found=True)))

    def sync_names(self, paths: Iterable[str], known: set[Path]) -> None:
        """Sync the directories of files: a new file name survives a power cut only after this.

        `known` are directories whose own names are safe already; those that are found are added.
        """
        if self.directory is None:
            return
        for directory in {(self.directory / path).parent for path in paths}:
            _sync(directory)
            while directory not in known and directory != self.directory:
                known.add(directory)
                directory = directory.parent
                _sync(directory)

    def sync_file(self, path: str) -> None:
        """Sync a file that was written by others, and its name in a directory that was there before."""
        if self.directory is not None:
            _sync(self.directory / path)
            _sync((self.directory / path).parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def storage_errors(location: Location) -> Iterator[None]:
    """Turn errors of file systems, object stores and the Delta library into a LakeError."""
    try:
        yield
    except LakeError:
        raise
    except Exception as error:
        if not isinstance(error, OSError | pa.ArrowException) and type(error).__module__ != "_internal":
            raise
        text = _QUERY.sub("?…", _DECORATION.sub(" ", str(error))).strip()
        if "no credentials found" in text:  # a sentence for each place where the library has looked
            text = "no credentials: give them with --storage-option or in the environment"
        raise LakeError(f"{location}: {text}") from error
