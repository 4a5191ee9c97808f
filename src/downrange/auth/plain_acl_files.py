"""The files of access control 4.x: plain_acl.yml and the `acl` directory beside it, watched and rewritten.

All `*.yml` and `*.yaml` files below `acl` come first, in the order of their paths, then plain_acl.yml. Of an access key
that stands in several files the first entry counts; the global white lists add up. `acl/tools.yml` holds the account of
the command line and is skipped, as are hidden files and directories.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from downrange.auth.acl_yaml import MAX_SIZE, Yaml, YamlError, read_yaml, write_yaml
from downrange.auth.plain_accounts import (
    AccountChange,
    PlainAccount,
    PlainAcl,
    PlainAclError,
    read_acl,
    to_write,
    with_account,
    with_white_list,
    without_account,
)
from downrange.auth.plain_acl import PlainAccessControl
from downrange.auth.private_file import replace_file
from downrange.clock import Clock
from downrange.protocol.bodies.data_version import DataVersion
from downrange.settings import ConfigError

log = logging.getLogger(__name__)

PLAIN_ACL: Final = "plain_acl.yml"
_DIRECTORY: Final = "acl"
_SKIPPED: Final = "tools.yml"
_PAUSE_SECONDS: Final = 0.5

Stamp = tuple[int, int, int]
"""Time of change, size and inode of a file: another stamp means another content."""


class _File(NamedTuple):
    """A file as it was when it was last looked at."""

    stamp: Stamp
    acl: PlainAcl
    """The last content that could be used."""


class PlainAclFiles:
    """Keeps the accounts in force in step with the files.

    Holds always: a file whose new content is empty or wrong keeps its old accounts, until it is right or removed.
    """

    def __init__(self, plain_file: Path, clock: Clock) -> None:
        """Read the files. Raises a ConfigError that names file and account when one is wrong or none is there."""
        self.access_control = PlainAccessControl()
        self._plain_file = plain_file
        self._clock = clock
        self._files: dict[Path, _File] = {}
        for path in _paths(self._plain_file):
            try:
                self._files[path] = _File(_stamp(path), self._read(path))
            except (OSError, PlainAclError) as error:
                raise ConfigError(f"access control: {path}: {_reason(error)}") from None
        if not self._files:
            raise ConfigError(
                f"aclEnable=true: there is no file with accounts: neither {plain_file} nor *.yml in "
                f"{plain_file.parent / _DIRECTORY}"
            )
        self._put_in_force()

    def __repr__(self) -> str:
        return f"<PlainAclFiles {self._plain_file} {self.access_control!r}>"

    async def watch(self) -> None:
        """Look for changed, new and removed files again and again."""
        while True:
            await self._clock.sleep(_PAUSE_SECONDS)
            self.look()

    def look(self) -> None:
        """Read the files that changed since they were last looked at."""
        files: dict[Path, _File] = {}
        for path in _paths(self._plain_file):
            known = self._files.get(path)
            try:
                stamp = _stamp(path)
            except OSError:
                continue  # removed meanwhile
            if known is None or known.stamp != stamp:
                known = _File(stamp, self._changed(path, known))
            files[path] = known
        before, self._files = self._files, files
        for path in before.keys() - files.keys():
            log.warning("access control file removed file=%s", path)
        if [(path, file.acl) for path, file in before.items()] != [(path, file.acl) for path, file in files.items()]:
            self._put_in_force()

    def _changed(self, path: Path, known: _File | None) -> PlainAcl:
        """The new content of a file; the old one when the new one is empty or cannot be used."""
        try:
            new = self._read(path, may_be_empty=False)
        except (OSError, PlainAclError) as error:
            log.error("access control file not used file=%s reason=%s; what it said before stays", path, _reason(error))
            return known.acl if known is not None else PlainAcl((), (), None, ())
        log.info("access control file read file=%s accounts=%d", path, len(new.accounts))
        return new

    def update_account(self, change: AccountChange) -> None:
        """Add an account to plain_acl.yml, or change it in the file where it stands."""
        change.check()
        path = self._file_of(change.access_key) or self._plain_file
        self._rewrite(path, lambda content: with_account(content, change))

    def delete_account(self, access_key: str) -> bool:
        """Delete an account; False when there is none."""
        path = self._file_of(access_key)
        if path is None:
            return False
        self._rewrite(path, lambda content: without_account(content, access_key))
        return True

    def update_white_list(self, patterns: Sequence[str], file: str = "") -> None:
        """Replace the global white list of a file that is in use: its name as `versions` gives it, or its full path."""
        path = self._plain_file
        if file:
            named = [one for one in self._files if file in (str(one), self._name(one))]
            if not named:
                raise PlainAclError(f"{file[:255]!r} is no file of this broker's access control")
            path = named[0]
        self._rewrite(path, lambda content: with_white_list(content, patterns))

    @property
    def version(self) -> DataVersion:
        """The version of plain_acl.yml."""
        return self.versions().get(self._name(self._plain_file), DataVersion())

    def versions(self) -> dict[str, DataVersion]:
        """The version of each file by its name, beginning at the directory of plain_acl.yml."""
        return {self._name(path): file.acl.version or DataVersion() for path, file in self._files.items()}

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._plain_file.parent))

    def _file_of(self, access_key: str) -> Path | None:
        owners = (
            path for path, file in self._files.items() for one in file.acl.accounts if one.access_key == access_key
        )
        return next(owners, None)

    def _read(self, path: Path, *, may_be_empty: bool = True) -> PlainAcl:
        """The content of a file; entries that hardly mean what their writer wanted are logged."""
        content, mode = _content(path)
        if not content and not may_be_empty:
            raise PlainAclError("it is empty")
        acl = read_acl(content)
        if mode & stat.S_IRWXO:
            log.warning(
                "access control file can be read by others file=%s; to keep its secrets: chmod 600 %s", path, path
            )
        for warning in acl.warnings:
            log.warning("access control file=%s %s", path, warning)
        return acl._replace(version=acl.version or DataVersion(timestamp=self._clock.now()))

    def _rewrite(self, path: Path, edit: Callable[[Yaml], Yaml]) -> None:
        """Change what a file contains now, and put it in force. The new file is on the disk when this returns."""
        try:
            content, mode = _content(path) if os.path.exists(path) else (None, stat.S_IRUSR | stat.S_IWUSR)
            now = read_acl(content).version or DataVersion()
            content = to_write(edit(content), now.bumped(self._clock.now()))
            acl = read_acl(content)
            replace_file(path, write_yaml(content), mode & ~stat.S_IRWXO)
            self._files[path] = _File(_stamp(path), acl)
        except OSError as error:
            raise PlainAclError(f"{self._name(path)} cannot be written: {_reason(error)}") from None
        self._put_in_force()

    def _put_in_force(self) -> None:
        accounts: dict[str, PlainAccount] = {}
        for path, file in self._files.items():
            for account in file.acl.accounts:
                if accounts.setdefault(account.access_key, account) is not account:
                    log.warning(
                        "account stands in two files account=%s file=%s; the first counts", account.access_key, path
                    )
        if not accounts:
            log.warning("access control has no account: every request from an address on no white list is refused")
        self.access_control.put(
            accounts, tuple(one for file in self._files.values() for one in file.acl.white_addresses)
        )


def accounts_to_migrate(plain_file: Path) -> tuple[PlainAccount, ...]:
    """The accounts of all files. Raises a ConfigError for an entry of which it is not clear what it means."""
    found: dict[str, PlainAccount] = {}
    for path in _paths(plain_file):
        try:
            acl = read_acl(_content(path)[0])
        except (OSError, PlainAclError) as error:
            raise ConfigError(f"{path}: {_reason(error)}") from None
        if acl.warnings:
            raise ConfigError(f"{path}: {acl.warnings[0]}")
        for account in acl.accounts:
            found.setdefault(account.access_key, account)
    return tuple(found.values())


def _paths(plain_file: Path) -> Iterator[Path]:
    found = []
    for directory, names, files in os.walk(plain_file.parent / _DIRECTORY):
        names[:] = [name for name in names if not name.startswith(".")]
        found += [
            Path(directory, name)
            for name in files
            if name.endswith((".yml", ".yaml")) and not name.startswith(".") and name != _SKIPPED
        ]
    yield from sorted(found)
    if os.path.exists(plain_file):
        yield plain_file


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _content(path: Path) -> tuple[Yaml, int]:
    """The YAML in a file, and the file's mode."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise PlainAclError("not a file")
    with path.open("rb") as file:
        data = file.read(MAX_SIZE + 1)
    try:
        return read_yaml(data), stat.S_IMODE(mode)
    except YamlError as error:
        raise PlainAclError(str(error)) from None


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
