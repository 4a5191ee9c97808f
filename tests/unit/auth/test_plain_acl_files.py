"""The files of access control 4.x: found, read again when they change, and rewritten."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from pathlib import Path

import pytest

from downrange.auth.plain_accounts import AccountChange, PlainAclError
from downrange.auth.plain_acl_files import PlainAclFiles
from downrange.clock import ManualClock
from downrange.protocol.bodies.data_version import DataVersion
from downrange.settings import ConfigError


def account(key: str, more: str = "") -> str:
    return f"- {{accessKey: {key}, secretKey: secret-of-{key}{more}}}\n"


def write(path: Path, *accounts: str, white: str = "") -> None:
    """Write a file as an editor does: a new one in place of the old."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(("accounts:\n" + "".join(accounts) if accounts else "") + white)
    new.chmod(0o600)
    new.replace(path)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "conf" / "plain_acl.yml"
    write(path, account("first-key"))
    return path


def opened(plain: Path) -> PlainAclFiles:
    return PlainAclFiles(plain, ManualClock())


def keys(files: PlainAclFiles) -> set[str]:
    return set(files.access_control.secrets)


def test_files_of_the_directory_come_first_and_the_first_entry_counts(
    plain: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(plain, account("first-key"), account("third-key"))
    write(plain.parent / "acl" / "b.yml", account("second-key"), "- {accessKey: first-key, secretKey: counts-here}\n")
    write(plain.parent / "acl" / "deep" / "a.yaml", account("fourth-key"))
    for ignored in ("tools.yml", "notes.txt", ".hidden.yml", ".git/x.yml"):
        write(plain.parent / "acl" / ignored, "nonsense")
    files = opened(plain)
    assert keys(files) == {"first-key", "second-key", "third-key", "fourth-key"}
    assert files.access_control.secrets["first-key"] == b"counts-here"
    assert list(files.versions()) == ["acl/b.yml", "acl/deep/a.yaml", "plain_acl.yml"]
    assert "account stands in two files account=first-key" in caplog.text
    assert "counts-here" not in caplog.text


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("accounts:\n- {accessKey: a, secretKey: my-secret}\n", r"plain_acl.yml: The accessKey=a and secretKey"),
        ("accounts: !!python/name:os.system\n", r"plain_acl.yml: type tags are not allowed \(line 1\)"),
        ("globalWhiteRemoteAddresses: [x]", r"plain_acl.yml: globalWhiteRemoteAddresses: 'x' is no address pattern"),
    ],
)
def test_a_wrong_file_stops_the_start(plain: Path, content: str, complaint: str) -> None:
    plain.write_text(content)
    with pytest.raises(ConfigError, match=complaint) as refused:
        opened(plain)
    assert "my-secret" not in str(refused.value)


def test_no_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"aclEnable=true: there is no file with accounts: neither .*plain_acl.yml"):
        opened(tmp_path / "plain_acl.yml")
    (tmp_path / "plain_acl.yml").mkdir()
    with pytest.raises(ConfigError, match=r"plain_acl\.yml: not a file"):
        opened(tmp_path / "plain_acl.yml")


def test_a_file_without_accounts_lets_nobody_in(plain: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain.write_text("")
    assert keys(opened(plain)) == set()
    assert "access control has no account" in caplog.text


def test_changed_new_and_removed_files_are_noticed(plain: Path) -> None:
    files = opened(plain)
    generation = files.access_control.generation
    files.look()
    assert files.access_control.generation == generation
    write(plain, account("changed-key"))
    files.look()
    assert keys(files) == {"changed-key"}
    team = plain.parent / "acl" / "team.yml"
    write(team, account("team-key"))
    files.look()
    assert keys(files) == {"changed-key", "team-key"}
    team.unlink()
    files.look()
    assert keys(files) == {"changed-key"}
    assert files.access_control.generation == generation + 3
    plain.unlink()
    files.look()
    assert keys(files) == set()


@pytest.mark.parametrize("new", ["", "# nothing\n", "accounts: [", "accounts: [{accessKey: a}]", "- x", "\0"])
def test_a_file_that_becomes_wrong_keeps_its_accounts_and_says_so_once(
    plain: Path, new: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = opened(plain)
    plain.write_text(new)
    for _ in range(3):
        files.look()
    assert keys(files) == {"first-key"}
    assert caplog.text.count("what it said before stays") == 1
    write(plain, account("mended-key"))
    files.look()
    assert keys(files) == {"mended-key"}


def test_the_last_account_can_be_taken_away(plain: Path) -> None:
    files = opened(plain)
    plain.write_text("accounts: []\n")
    files.look()
    assert keys(files) == set()


def test_a_new_file_that_is_wrong_disturbs_no_other(plain: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = opened(plain)
    team = plain.parent / "acl" / "team.yml"
    write(team, account("short"))
    files.look()
    assert keys(files) == {"first-key"}
    assert "file not used" in caplog.text
    write(team, account("team-key"))
    files.look()
    assert keys(files) == {"first-key", "team-key"}


def test_a_file_that_cannot_be_read_keeps_its_accounts(plain: Path) -> None:
    files = opened(plain)
    plain.unlink()
    os.mkfifo(plain)  # opening it would wait for a writer
    files.look()
    assert keys(files) == {"first-key"}


async def test_the_service_looks_every_half_second(plain: Path) -> None:
    clock = ManualClock()
    files = PlainAclFiles(plain, clock)
    watching = asyncio.create_task(files.watch())
    while not clock.sleeping:
        await asyncio.sleep(0)
    write(plain, account("changed-key"))
    await clock.advance(0.4)
    assert keys(files) == {"first-key"}
    await clock.advance(0.2)
    assert keys(files) == {"changed-key"}
    watching.cancel()


def test_a_file_that_others_can_read_is_a_warning(plain: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened(plain)
    assert "can be read by others" not in caplog.text
    plain.chmod(0o644)
    opened(plain)
    assert "can be read by others" in caplog.text


def test_a_change_is_in_force_and_in_the_file_at_once(plain: Path) -> None:
    clock = ManualClock(now=1_800_000_000_000)
    files = PlainAclFiles(plain, clock)
    assert files.version == DataVersion(counter=0, timestamp=1_800_000_000_000)
    files.update_account(AccountChange("second-key", "second-secret", admin=True, topic_perms=["t=PUB"]))
    assert keys(files) == keys(opened(plain)) == {"first-key", "second-key"}
    assert files.version == DataVersion(counter=1, timestamp=1_800_000_000_000)
    generation = files.access_control.generation
    files.look()
    assert files.access_control.generation == generation  # its own change is no news
    assert files.delete_account("first-key")
    assert not files.delete_account("first-key")
    assert keys(files) == keys(opened(plain)) == {"second-key"}
    files.update_white_list(["10.1.2.{3,4}", "10.2.*.*"])
    assert (files.version.counter, opened(plain).version.counter) == (3, 3)
    assert files.delete_account("second-key")
    assert keys(files) == keys(opened(plain)) == set()


def test_a_change_goes_to_the_file_where_the_account_stands(plain: Path) -> None:
    team = plain.parent / "acl" / "team.yml"
    write(team, account("team-key"))
    files = opened(plain)
    before = plain.read_bytes()
    files.update_account(AccountChange("team-key", "new-secret", admin=False))
    assert plain.read_bytes() == before
    assert "new-secret" in team.read_text()
    files.update_white_list(["10.0.0.1"], "acl/team.yml")
    files.update_white_list(["10.0.0.2"], str(team))
    assert "10.0.0.2" in team.read_text()
    assert plain.read_bytes() == before


def test_a_change_keeps_what_was_edited_meanwhile(plain: Path) -> None:
    files = opened(plain)
    write(plain, account("first-key"), account("edited-key"))
    files.update_account(AccountChange("second-key", "second-secret", admin=False))
    assert keys(files) == keys(opened(plain)) == {"first-key", "edited-key", "second-key"}


@pytest.mark.parametrize(
    "change",
    [
        AccountChange("short", "long-enough", admin=False),
        AccountChange("second-key", "short", admin=False),
        AccountChange("second-key", "long-enough", admin=False, white_remote_address="999.1.1.1"),
        AccountChange("second-key", "long-enough", admin=False, topic_perms=["t=ALL"]),
        AccountChange("second\nkey", "long-enough", admin=False),
    ],
)
def test_a_wrong_change_changes_nothing(plain: Path, change: AccountChange) -> None:
    files = opened(plain)
    before, generation = plain.read_bytes(), files.access_control.generation
    with pytest.raises(PlainAclError) as refused:
        files.update_account(change)
    assert "long-enough" not in str(refused.value)
    with pytest.raises(PlainAclError):
        files.update_white_list(["nonsense"])
    assert (plain.read_bytes(), files.access_control.generation) == (before, generation)
    plain.write_text("accounts: [")
    with pytest.raises(PlainAclError, match="not YAML"):
        files.update_account(AccountChange("second-key", "long-enough", admin=False))
    assert plain.read_text() == "accounts: ["


@pytest.mark.parametrize(
    "name",
    ["../elsewhere.yml", "acl/../../elsewhere.yml", "/etc/passwd", "acl/tools.yml", "plain_acl.yml\0", "acl", "."],
)
def test_a_white_list_goes_into_no_file_but_those_in_use(plain: Path, name: str) -> None:
    elsewhere = plain.parent.parent / "elsewhere.yml"
    for path in (elsewhere, plain.parent / "acl" / "tools.yml"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("accounts: []\n")
    files = opened(plain)
    for one in (name, str(elsewhere), str(plain.parent / ".." / "elsewhere.yml")):
        with pytest.raises(PlainAclError, match="is no file of this broker's access control"):
            files.update_white_list(["*"], one)
    assert elsewhere.read_text() == "accounts: []\n"


def test_a_rewritten_file_is_not_readable_by_others(plain: Path, tmp_path: Path) -> None:
    files = opened(plain)
    for before, after in ((0o600, 0o600), (0o640, 0o640), (0o644, 0o640)):
        plain.chmod(before)
        files.update_white_list(["10.0.0.1"])
        assert stat.S_IMODE(plain.stat().st_mode) == after
    assert os.listdir(plain.parent) == ["plain_acl.yml"]


def test_a_file_is_made_when_the_first_account_needs_one(plain: Path) -> None:
    write(plain.parent / "acl" / "team.yml", account("team-key"))
    plain.unlink()
    files = opened(plain)
    assert files.version == DataVersion()
    files.update_account(AccountChange("second-key", "second-secret", admin=False))
    assert keys(files) == keys(opened(plain)) == {"team-key", "second-key"}
    assert stat.S_IMODE(plain.stat().st_mode) == 0o600


def test_a_link_goes_on_leading_to_the_file(plain: Path, tmp_path: Path) -> None:
    real = tmp_path / "real.yml"
    plain.rename(real)
    plain.symlink_to(real)
    files = opened(plain)
    files.update_account(AccountChange("second-key", "second-secret", admin=False))
    assert plain.is_symlink()
    assert "second-key" in real.read_text()


def test_a_change_that_cannot_be_written_is_not_in_force(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = opened(plain)
    before = plain.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PlainAclError, match=r"plain_acl\.yml cannot be written: No space left on device"):
        files.update_account(AccountChange("second-key", "second-secret", admin=False))
    assert keys(files) == {"first-key"}
    assert plain.read_bytes() == before
    assert os.listdir(plain.parent) == ["plain_acl.yml"]


def test_no_secret_is_logged(plain: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    files = opened(plain)
    files.update_account(AccountChange("second-key", "another-secret", admin=False))
    write(plain, account("first-key", ", topicPerms: [a=b=c]"))
    files.look()
    write(plain, account("first-key", ", topicPerms: [a=MAYBE], nonsense: 1"))
    files.look()
    assert "a=b=c" in caplog.text
    assert "means DENY" in caplog.text
    assert "secret-of" not in caplog.text + repr(files) + repr(files.access_control)
    assert "another-secret" not in caplog.text
