"""StoreConfig: every key of RocketMQ's MessageStoreConfig that a store, its flushing, retention or replication reads.

`settings.configure` fills it from a `broker.conf`. A store directory does not record the sizes of its files: every
program that opens the directory must be given the same sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from downrange.model.delay_levels import DEFAULT_DELAY_LEVELS, parse_delay_levels
from downrange.model.errors import MessageError
from downrange.settings import ConfigError, setting

DEFAULT_MAX_MESSAGE_SIZE: Final = 4 << 20
# Bytes of a record beside its body: hosts, topic, properties. RocketMQ, too, adds 64 KiB to maxMessageSize.
RECORD_OVERHEAD: Final = 64 << 10
# Every commit-log file keeps this many bytes free at its end, for the blank record.
BLANK_SIZE: Final = 8
_ENTRY_SIZE: Final = 20


class FlushDiskType(Enum):
    """When a send counts as stored."""

    ASYNC_FLUSH = "ASYNC_FLUSH"
    SYNC_FLUSH = "SYNC_FLUSH"


class BrokerRole(Enum):
    """Whether this broker writes its log itself (as a master) or copies the log of its master (as a slave)."""

    ASYNC_MASTER = "ASYNC_MASTER"
    SYNC_MASTER = "SYNC_MASTER"
    SLAVE = "SLAVE"


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """How a store lays out its files and when it syncs and deletes them."""

    store_path_root_dir: Path = setting(Path.home() / "store", "Directory in which the broker keeps all its files.")
    store_path_commit_log: str = setting(
        "", "Directory of the commit log, or several separated by commas; empty: commitlog in storePathRootDir."
    )
    read_only_commit_log_store_paths: str = setting(
        "", "Commit-log directories, separated by commas, that are read but get no new files."
    )
    mapped_file_size_commit_log: int = setting(
        1 << 30,
        "Size of one commit-log file.",
        unit="bytes",
        minimum=1024,
        maximum=(1 << 31) - 1,
        aliases=("mapedFileSizeCommitLog",),
    )
    mapped_file_size_consume_queue: int = setting(
        300_000 * _ENTRY_SIZE,
        "Size of one consume-queue file; rounded up to a multiple of 20.",
        unit="bytes",
        minimum=_ENTRY_SIZE,
        maximum=(1 << 31) - 20,
        aliases=("mapedFileSizeConsumeQueue",),
    )
    enable_consume_queue_ext: bool = setting(False, "Keep filter bit maps beside the consume queues.")
    mapped_file_size_consume_queue_ext: int = setting(
        48 << 20,
        "Size of one consume-queue-ext file.",
        unit="bytes",
        minimum=64,
        maximum=(1 << 31) - 1,
        aliases=("mapedFileSizeConsumeQueueExt",),
    )
    flush_disk_type: FlushDiskType = setting(
        FlushDiskType.ASYNC_FLUSH, "Answer a send at once (ASYNC_FLUSH), or when it is on disk (SYNC_FLUSH)."
    )
    broker_role: BrokerRole = setting(BrokerRole.ASYNC_MASTER, "Sends to a SYNC_MASTER wait for a slave.")
    flush_interval_commit_log: int = setting(500, "Pause between flushes of the commit log.", unit="ms", minimum=1)
    flush_commit_log_timed: bool = setting(
        True,
        "Flush every flushIntervalCommitLog only; false: also once flushCommitLogLeastPages pages are dirty.",
    )
    flush_commit_log_least_pages: int = setting(4, "A regular flush waits for this many unsaved pages.", minimum=0)
    flush_commit_log_thorough_interval: int = setting(
        10_000, "Every so often the log is flushed however little is unsaved.", unit="ms", minimum=1
    )
    commit_interval_commit_log: int = setting(
        200, "Pause between commits of the transient pool to the file.", unit="ms", minimum=1
    )
    commit_commit_log_least_pages: int = setting(4, "A regular commit waits for this many pages.", minimum=0)
    commit_commit_log_thorough_interval: int = setting(
        200, "Every so often the pool is committed however little is in it.", unit="ms", minimum=1
    )
    flush_interval_consume_queue: int = setting(1000, "Pause between consume-queue flushes.", unit="ms", minimum=1)
    flush_consume_queue_least_pages: int = setting(
        2, "A regular flush leaves out queues with fewer unsaved pages.", minimum=0
    )
    flush_consume_queue_thorough_interval: int = setting(
        60_000, "Every so often all queues are flushed and the checkpoint is written.", unit="ms", minimum=1
    )
    sync_flush_timeout: int = setting(5000, "Longest wait of a SYNC_FLUSH send for the disk.", unit="ms", minimum=1)
    slave_timeout: int = setting(3000, "Longest wait of a SYNC_MASTER send for a slave.", unit="ms", minimum=1)
    clean_resource_interval: int = setting(10_000, "Pause between searches for expired files.", unit="ms", minimum=1)
    delete_commit_log_files_interval: int = setting(
        100, "Pause between the deletions of two commit-log files in one clean-up round.", unit="ms", minimum=0
    )
    delete_when: str = setting("04", "Hours of the day, separated by ';', when expired files are deleted.")
    file_reserved_time: int = setting(72, "Age at which a commit-log file expires.", unit="hours", minimum=0)
    disk_max_used_space_ratio: int = setting(
        75, "Disk use above which expired files are deleted at any hour.", unit="percent", minimum=10, maximum=95
    )
    disk_space_clean_forcibly_ratio: int = setting(
        85,
        "Disk use above which the oldest files are deleted although not expired.",
        unit="percent",
        minimum=10,
        maximum=99,
    )
    disk_space_warning_level_ratio: int = setting(
        90, "Disk use above which every send is refused.", unit="percent", minimum=10, maximum=100
    )
    clean_file_forcibly_enable: bool = setting(True, "Obey diskSpaceCleanForciblyRatio.")
    max_message_size: int = setting(
        DEFAULT_MAX_MESSAGE_SIZE, "Largest message body.", unit="bytes", minimum=10, maximum=(1 << 31) - (1 << 20)
    )
    check_crc_on_recover: bool = setting(True, "Compare body checksums during recovery.", key="checkCRCOnRecover")
    max_transfer_bytes_on_message_in_memory: int = setting(
        256 << 10, "Most bytes in the answer to one pull of recent messages.", unit="bytes", minimum=1
    )
    max_transfer_count_on_message_in_memory: int = setting(32, "Most messages in such an answer.", minimum=1)
    max_transfer_bytes_on_message_in_disk: int = setting(
        64 << 10, "Most bytes in the answer to one pull of old messages.", unit="bytes", minimum=1
    )
    max_transfer_count_on_message_in_disk: int = setting(8, "Most messages in such an answer.", minimum=1)
    access_message_in_memory_max_ratio: int = setting(
        40,
        "The end of the log that would fill this share of the machine's memory counts as recent.",
        unit="percent",
        minimum=0,
        maximum=100,
    )
    message_index_enable: bool = setting(True, "Keep an index for searches by message key.")
    message_index_safe: bool = setting(False, "After a crash, replay the log from where the index is safe.")
    max_hash_slot_num: int = setting(5_000_000, "Hash slots of one index file.", minimum=1, maximum=100_000_000)
    max_index_num: int = setting(20_000_000, "Entries of one index file.", minimum=2, maximum=100_000_000)
    max_msgs_num_batch: int = setting(64, "Most messages in the answer to one query by key.", minimum=1)
    default_query_max_num: int = setting(32, "Most messages in the answer to a query by unique key.", minimum=1)
    ha_listen_port: int = setting(
        0,
        "Port at which slaves connect to this master; 0: listenPort + 1, or any free port if listenPort is 0.",
        minimum=0,
        maximum=65535,
    )
    ha_send_heartbeat_interval: int = setting(5000, "Pause between replication heartbeats.", unit="ms", minimum=1)
    ha_housekeeping_interval: int = setting(
        20_000, "A replication connection that was silent for longer is closed.", unit="ms", minimum=1
    )
    ha_transfer_batch_size: int = setting(
        32 << 10, "Most log bytes of one replication packet.", unit="bytes", minimum=1
    )
    ha_slave_fallbehind_max: int = setting(
        256 << 20,
        "A SYNC_MASTER does not wait for slaves that are further behind.",
        unit="bytes",
        minimum=0,
        aliases=("haMaxGapNotInSync",),
    )
    all_ack_in_sync_state_set: bool = setting(
        True,
        "Under a controller: a send is acknowledged when all members of the sync-state set have it. RocketMQ's default "
        "is false; then a failover may lose acknowledged messages.",
    )
    min_in_sync_replicas: int = setting(
        1, "Under a controller: sends are refused while the sync-state set has fewer members.", minimum=1
    )
    in_sync_replicas: int = setting(
        1, "With allAckInSyncStateSet=false: so many replicas, the master among them, must have a message.", minimum=1
    )
    ha_max_time_slave_not_catchup: int = setting(
        2_000,
        "Under a controller: a slave that lags for longer leaves the sync-state set.",
        unit="ms",
        minimum=1,
    )
    sync_from_last_file: bool = setting(
        False, "Under a controller: an empty slave begins with the last file of its master, not with the first."
    )
    async_learner: bool = setting(False, "Under a controller: this slave gets the log and is never elected.")
    ha_master_address: str = setting("", "Replication address of the master; empty: a name server tells it.")
    ha_allowed_slave_addresses: str = setting(
        "",
        "Addresses of slaves that get the log without a login, separated by semicolons, such as 10.1.2.3;10.1.3.*. "
        "Empty: all, and with haSecretFile none. Not a key of RocketMQ.",
    )
    ha_secret_file: Path | None = setting(
        None,
        "File with a secret that a master and its slaves share: slaves log in with it. For Downrange brokers only; "
        "slaves of RocketMQ need an address in haAllowedSlaveAddresses. Not a key of RocketMQ.",
    )
    message_delay_level: str = setting(DEFAULT_DELAY_LEVELS, "Delays of level 1, 2 and so on; units s, m, h, d.")
    flush_delay_offset_interval: int = setting(
        10_000, "Pause between writes of delayOffset.json.", unit="ms", minimum=1
    )
    timer_wheel_enable: bool = setting(True, "Take messages that are to be delivered at a time of their own.")
    timer_precision_ms: int = setting(
        1000,
        "Such messages are delivered at the first multiple of this that is not before their time; 100, 200, 500 or "
        "1000, any other value counts as the next lower one.",
        unit="ms",
        minimum=100,
    )
    timer_max_delay_sec: int = setting(
        3 * 86_400, "How far ahead the time of a message may be.", unit="seconds", minimum=1
    )
    timer_roll_window_slot: int = setting(
        2 * 86_400,
        "Messages that wait for more than so many times timerPrecisionMs are stored again on their way, so that they "
        "outlive the commit-log files.",
    )
    timer_flush_interval_ms: int = setting(
        1000, "Pause between two times that the progress of timer messages is saved.", unit="ms", minimum=1
    )
    timer_congest_num_each_slot: int = setting(
        2**31 - 1,
        "Refuse some messages for a tick that so many wait for already, and all when it is twice as many.",
        minimum=1,
    )
    timer_stop_enqueue: bool = setting(False, "Put no more timer messages on the wheel.")
    timer_stop_dequeue: bool = setting(False, "Deliver no timer messages.")
    mapped_file_size_timer_log: int = setting(
        100 << 20, "Size of one file of the timer log.", unit="bytes", minimum=1024, maximum=(1 << 31) - 1
    )
    offset_check_in_slave: bool = setting(False, "Let a slave correct pulls from offsets it does not have.")
    os_page_cache_busy_timeout_millis: int = setting(
        1000,
        "Refuse sends while an append takes longer than this: the page cache of the system is busy.",
        unit="ms",
        minimum=1,
        key="osPageCacheBusyTimeOutMills",
    )
    transient_store_pool_enable: bool = setting(
        False, "Append to a memory pool and commit it to the files later; only with ASYNC_FLUSH on a master."
    )
    transient_store_pool_size: int = setting(5, "Buffers of this pool, each as large as a commit-log file.", minimum=1)
    fast_fail_if_no_buffer_in_store_pool: bool = setting(
        False, "Refuse a new commit-log file for which the pool has no buffer left."
    )
    warm_mapped_file_enable: bool = setting(
        False,
        "Reserve the disk blocks and memory pages of a new commit-log file before it is used.",
        key="warmMapedFileEnable",
        aliases=("warmMappedFileEnable",),
    )

    def __post_init__(self) -> None:
        room = self.mapped_file_size_commit_log - BLANK_SIZE
        if self.max_message_size != DEFAULT_MAX_MESSAGE_SIZE and self.max_message_size + RECORD_OVERHEAD > room:
            raise ConfigError(
                f"maxMessageSize={self.max_message_size}: expected at most {max(room - RECORD_OVERHEAD, 0)}, so that a "
                f"record fits a commit-log file (mappedFileSizeCommitLog={self.mapped_file_size_commit_log})"
            )
        self.delay_level_millis()
        self.delete_hours()

    @property
    def timer_precision(self) -> int:
        """The precision of timer messages in milliseconds, as RocketMQ understands `timer_precision_ms`."""
        return max(allowed for allowed in (100, 200, 500, 1000) if allowed <= self.timer_precision_ms)

    @property
    def timer_roll_window(self) -> int:
        """`timer_roll_window_slot`; values out of reason count as the most that the wheel has room for."""
        most = 7 * 86_400 - 60
        return self.timer_roll_window_slot if 2 <= self.timer_roll_window_slot <= most else most

    @property
    def commit_log_paths(self) -> tuple[Path, ...]:
        paths = _path_list(self.store_path_commit_log)
        return paths or (self.store_path_root_dir / "commitlog",)

    @property
    def read_only_commit_log_paths(self) -> tuple[Path, ...]:
        return _path_list(self.read_only_commit_log_store_paths)

    @property
    def consume_queue_file_size(self) -> int:
        return -(-self.mapped_file_size_consume_queue // _ENTRY_SIZE) * _ENTRY_SIZE

    @property
    def uses_transient_pool(self) -> bool:
        return (
            self.transient_store_pool_enable
            and self.flush_disk_type is FlushDiskType.ASYNC_FLUSH
            and self.broker_role is not BrokerRole.SLAVE
        )

    def delay_level_millis(self) -> tuple[int, ...]:
        """The delay of level 1, 2, … in milliseconds."""
        try:
            return parse_delay_levels(self.message_delay_level)
        except MessageError as error:
            raise ConfigError(str(error)) from None

    def delete_hours(self) -> frozenset[int]:
        """The local hours in which expired files are deleted."""
        hours = set()
        for item in self.delete_when.split(";"):
            text = item.strip()
            if not text.isascii() or not text.isdigit() or int(text) > 23:
                raise ConfigError(f"deleteWhen={self.delete_when}: expected hours from 00 to 23 separated by ';'")
            hours.add(int(text))
        return frozenset(hours)


def _path_list(text: str) -> tuple[Path, ...]:
    return tuple(Path(part.strip()).expanduser() for part in text.split(",") if part.strip())
