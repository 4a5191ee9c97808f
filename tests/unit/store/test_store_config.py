from __future__ import annotations

from pathlib import Path

import pytest

from downrange.settings import ConfigError, Property, configure, settings_of
from downrange.store.config import FlushDiskType, StoreConfig


def configured(**keys: str) -> StoreConfig:
    return configure(StoreConfig, {key: Property(value, "broker.conf", 3) for key, value in keys.items()})


def test_defaults_are_those_of_rocketmq() -> None:
    config = StoreConfig()
    assert config.mapped_file_size_commit_log == 1_073_741_824
    assert config.consume_queue_file_size == 6_000_000
    assert config.delay_level_millis()[:5] == (1000, 5000, 10_000, 30_000, 60_000)
    assert len(config.delay_level_millis()) == 18
    assert config.delete_hours() == {4}
    assert config.commit_log_paths == (Path.home() / "store" / "commitlog",)


def test_keys_have_the_names_of_rocketmq() -> None:
    keys = {setting.key for setting in settings_of(StoreConfig)}
    for key in (
        "storePathRootDir", "mappedFileSizeCommitLog", "flushDiskType", "brokerRole", "checkCRCOnRecover",
        "osPageCacheBusyTimeOutMills", "warmMapedFileEnable", "haSlaveFallbehindMax", "maxTransferCountOnMessageInDisk",
        "fastFailIfNoBufferInStorePool", "accessMessageInMemoryMaxRatio",
    ):  # fmt: skip
        assert key in keys


def test_old_and_later_spellings_are_understood() -> None:
    assert configured(mapedFileSizeCommitLog="65536").mapped_file_size_commit_log == 65536
    assert configured(warmMappedFileEnable="true").warm_mapped_file_enable
    assert configured(haMaxGapNotInSync="7").ha_slave_fallbehind_max == 7


def test_the_size_of_a_queue_file_is_rounded_up_to_whole_entries() -> None:
    assert configured(mappedFileSizeConsumeQueue="1001").consume_queue_file_size == 1020


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("flushDiskType", "SOMETIMES", "flushDiskType=SOMETIMES: expected ASYNC_FLUSH or SYNC_FLUSH"),
        ("mappedFileSizeCommitLog", "12", "mappedFileSizeCommitLog=12: expected a whole number from 1024 to"),
        ("fileReservedTime", "-1", "fileReservedTime=-1: expected a whole number of at least 0"),
        ("messageDelayLevel", "1s 5x", "messageDelayLevel=1s 5x: '5x' is not a number followed by"),
        ("deleteWhen", "04;25", "deleteWhen=04;25: expected hours"),
    ],
)
def test_a_bad_value_is_named_with_what_would_be_right(key: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        configured(**{key: value})


def test_a_message_size_that_fits_no_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"maxMessageSize=65536.*mappedFileSizeCommitLog=65536"):
        configured(maxMessageSize="65536", mappedFileSizeCommitLog="65536")
    configured(mappedFileSizeCommitLog="65536")  # nobody chose the default of 4 MiB: the file is the limit


def test_the_transient_pool_needs_asynchronous_flushing_and_a_master() -> None:
    assert configured(transientStorePoolEnable="true").uses_transient_pool
    assert not configured(transientStorePoolEnable="true", flushDiskType="SYNC_FLUSH").uses_transient_pool
    assert not configured(transientStorePoolEnable="true", brokerRole="SLAVE").uses_transient_pool
    assert FlushDiskType("SYNC_FLUSH") is FlushDiskType.SYNC_FLUSH


def test_several_commit_log_directories() -> None:
    config = configured(storePathCommitLog="/a/log, /b/log", readOnlyCommitLogStorePaths="/b/log")
    assert config.commit_log_paths == (Path("/a/log"), Path("/b/log"))
    assert config.read_only_commit_log_paths == (Path("/b/log"),)
