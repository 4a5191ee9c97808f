"""Identity files: those of 5.3.3 are read, a crash loses no id, and the files of another broker are left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from downrange.broker.controller.identity import Application, IdentityFiles
from downrange.settings import ConfigError
from tests.support.golden import captured_file


def files(directory: Path, name: str = "broker-a", cluster: str = "DefaultCluster") -> IdentityFiles:
    return IdentityFiles(directory, cluster, name)


def test_the_file_of_java_is_read_and_written(tmp_path: Path) -> None:
    captured = captured_file("controller-533.tar.xz", "frames/controller-533/files/broker1/brokerIdentity")
    (tmp_path / "brokerIdentity").write_bytes(captured)
    assert files(tmp_path).broker_id() == 1
    files(tmp_path).accepted(1)
    assert (tmp_path / "brokerIdentity").read_bytes() == captured


def test_an_application_is_kept_until_its_answer_is_known(tmp_path: Path) -> None:
    application = Application(2, "127.0.0.1:10911;1700000000000")
    files(tmp_path).apply(application)
    assert (tmp_path / "brokerIdentity-temp").read_text() == ("DefaultCluster#broker-a#2#127.0.0.1:10911;1700000000000")
    assert files(tmp_path).application() == application
    assert files(tmp_path).broker_id() is None
    files(tmp_path).accepted(2)
    assert (files(tmp_path).broker_id(), files(tmp_path).application()) == (2, None)


@pytest.mark.parametrize("other", [{"name": "broker-b"}, {"cluster": "C2"}])
def test_the_files_of_another_broker_are_refused_and_stay(tmp_path: Path, other: dict[str, str]) -> None:
    files(tmp_path, **other).accepted(3)
    before = (tmp_path / "brokerIdentity").read_bytes()
    with pytest.raises(ConfigError, match="belongs to the broker"):
        files(tmp_path).broker_id()
    assert (tmp_path / "brokerIdentity").read_bytes() == before


@pytest.mark.parametrize("text", ["", "DefaultCluster#broker-a", "DefaultCluster#broker-a#one"])
def test_a_damaged_file_is_no_new_broker(tmp_path: Path, text: str) -> None:
    (tmp_path / "brokerIdentity").write_text(text)
    with pytest.raises(ConfigError, match="restore the file"):
        files(tmp_path).broker_id()
