"""BrokerConfig: the broker's own keys of a `broker.conf`. What concerns files is in store/config.py."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Final

from downrange.settings import ConfigError, Property, setting
from downrange.store.config import BrokerRole


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    namesrv_addr: str | None = setting(None, "Name servers, separated by semicolons.")
    broker_name: str = setting(socket.gethostname(), "Name of this broker; a master and its slaves share one.")
    broker_cluster_name: str = setting("DefaultCluster", "Cluster this broker belongs to.")
    broker_id: int = setting(0, "0 for a master, more for a slave.", minimum=0)
    broker_ip1: str = setting(
        "", "Address clients reach this broker at. [bindAddress, or this machine's own]", key="brokerIP1"
    )
    broker_ip2: str | None = setting(None, "Address slaves reach this broker at. [brokerIP1]", key="brokerIP2")
    listen_port: int = setting(10911, "Port to listen on; the VIP port is two lower.", minimum=0, maximum=65535)
    bind_address: str = setting("127.0.0.1", "Address to listen on.")
    broker_permission: int = setting(6, "4 read, 2 write, 6 both.", minimum=0, maximum=7)
    default_topic_queue_nums: int = setting(8, "Queues of the template topic TBW102.", minimum=1, maximum=65536)
    auto_create_topic_enable: bool = setting(True, "Create a topic when a message for it arrives.")
    auto_create_subscription_group: bool = setting(True, "Create a group when its first consumer arrives.")
    cluster_topic_enable: bool = setting(True, "Let the topic named after the cluster be used.")
    broker_topic_enable: bool = setting(True, "Let the topic named after the broker be used.")
    trace_topic_enable: bool = setting(False, "Create the trace topic at start.")
    msg_trace_topic_name: str = setting("RMQ_SYS_TRACE_TOPIC", "Name of the trace topic.")
    trace_on: bool = setting(True, "Tell producers that traces are welcome.")
    region_id: str = setting("DefaultRegion", "Region told to producers.")
    flush_consumer_offset_interval: int = setting(
        5000, "Pause between two savings of consumer offsets.", unit="ms", minimum=10
    )
    reject_transaction_message: bool = setting(False, "Refuse transactional messages.")
    long_polling_enable: bool = setting(True, "Hold pulls that find nothing until a message arrives.")
    short_polling_time_mills: int = setting(1000, "How long to hold them otherwise.", unit="ms", minimum=1)
    max_transfer_bytes_on_bulk_pull: int = setting(
        4 << 20,
        "Most bytes of one pull of a reader that takes many messages at a time, as Spark does; 0 gives it no more "
        "than any other. Not a key of RocketMQ: readers know this broker by it.",
        unit="bytes",
        minimum=0,
        maximum=12 << 20,
    )
    notify_consumer_ids_changed_enable: bool = setting(True, "Tell a group when its members change.")
    slave_read_enable: bool = setting(False, "Send consumers that fall behind to a slave.")
    broker_fast_failure_enable: bool = setting(True, "Refuse requests that waited too long.")
    wait_time_mills_in_send_queue: int = setting(200, "Longest wait of a send.", unit="ms", minimum=1)
    wait_time_mills_in_pull_queue: int = setting(5000, "Longest wait of a pull.", unit="ms", minimum=1)
    wait_time_mills_in_heartbeat_queue: int = setting(31_000, "Longest wait of a heartbeat.", unit="ms", minimum=1)
    wait_time_mills_in_transaction_queue: int = setting(
        3000, "Longest wait of an end of transaction.", unit="ms", minimum=1
    )
    start_accept_send_request_time_stamp: int = setting(0, "Refuse sends before this time.", unit="ms since 1970")
    enable_property_filter: bool = setting(True, "Let consumers filter by SQL92 expressions.")
    filter_support_retry: bool = setting(False, "Filter the retry topic of a group by its expressions, too.")
    enable_calc_filter_bit_map: bool = setting(
        False, "Note in the consume queue who wants a message; needs enableConsumeQueueExt."
    )
    expect_consumer_num_use_filter: int = setting(
        32, "Groups of one topic with expressions these notes have room for.", minimum=1, maximum=10_000
    )
    max_error_rate_of_bloom_filter: int = setting(
        20, "How many of these notes may be too many.", unit="percent", minimum=1, maximum=99
    )
    filter_data_clean_time_span: int = setting(
        86_400_000, "How long the expressions of a group are kept after it has gone.", unit="ms", minimum=1
    )
    compressed_register: bool = setting(False, "Compress registrations.")
    force_register: bool = setting(True, "Register always, not only when topics changed.")
    register_name_server_period: int = setting(
        30_000, "Pause between two registrations, at least 10 s and at most 60 s.", unit="ms", minimum=1
    )
    register_broker_timeout_mills: int = setting(6000, "Longest wait for a name server.", unit="ms", minimum=1)
    transaction_time_out: int = setting(6000, "Age at which a half message is checked.", unit="ms", minimum=1)
    transaction_check_max: int = setting(15, "Checks before a half message is given up.", minimum=1)
    transaction_check_interval: int = setting(60_000, "Pause between two check rounds.", unit="ms", minimum=1)
    store_reply_message_enable: bool = setting(True, "Keep replies of request-reply.")
    server_channel_max_idle_time_seconds: int = setting(
        120, "Close a connection that was idle for so long.", unit="seconds", minimum=1
    )
    busy_poll_micros: int = setting(
        200,
        "How long to look for the next request of a lone caller, who sends one at a time, before going to sleep: being "
        "woken up takes longer than answering. 0 never does. Not a key of RocketMQ.",
        unit="µs",
        minimum=0,
        maximum=1000,
    )
    metrics_port: int = setting(
        5557, "Port of /metrics and /healthz; 0 takes a free one, -1 turns them off.", minimum=-1, maximum=65535
    )

    @property
    def namesrv_addresses(self) -> tuple[str, ...]:
        return tuple(part for piece in (self.namesrv_addr or "").split(";") if (part := piece.strip()))

    @property
    def address(self) -> str:
        """Where clients find this broker, and the name it has in every route."""
        return f"{self.broker_ip1}:{self.listen_port}"


# What may be changed while running (request 25), beside the store keys named below: no path, no port, no identity.
REMOTELY_CHANGEABLE: Final = frozenset(
    {
        "brokerPermission",
        "autoCreateTopicEnable",
        "autoCreateSubscriptionGroup",
        "traceOn",
        "rejectTransactionMessage",
        "longPollingEnable",
        "shortPollingTimeMills",
        "maxTransferBytesOnBulkPull",
        "notifyConsumerIdsChangedEnable",
        "slaveReadEnable",
        "brokerFastFailureEnable",
        "waitTimeMillsInSendQueue",
        "waitTimeMillsInPullQueue",
        "waitTimeMillsInHeartbeatQueue",
        "waitTimeMillsInTransactionQueue",
        "startAcceptSendRequestTimeStamp",
        "enablePropertyFilter",
        "filterSupportRetry",
        "filterDataCleanTimeSpan",
        "transactionTimeOut",
        "transactionCheckMax",
        "flushConsumerOffsetInterval",
        # of the store
        "fileReservedTime",
        "deleteWhen",
        "diskMaxUsedSpaceRatio",
        "cleanFileForciblyEnable",
        "maxMessageSize",
        "flushIntervalCommitLog",
        "flushCommitLogLeastPages",
        "flushCommitLogThoroughInterval",
        "maxTransferBytesOnMessageInMemory",
        "maxTransferCountOnMessageInMemory",
        "maxTransferBytesOnMessageInDisk",
        "maxTransferCountOnMessageInDisk",
    }
)
# Never, whatever their value: changing them remotely is how CVE-2023-33246 and its kin worked.
BLACK_LIST: Final = frozenset({"brokerConfigPath", "rocketmqHome", "configBlackList"})

# What a broker must not pretend to do: a switch that is on and would silently not be obeyed stops the start.
_NOT_SERVED: Final = {
    "aclEnable": "access control",
    "authenticationEnabled": "access control",
    "authorizationEnabled": "access control",
    "enableDLegerCommitLog": "DLedger",
    "enableControllerMode": "the controller",
    "enableSlaveActingMaster": "a slave that acts as master",
}


def keys_without_effect() -> frozenset[str]:
    """Keys that brokers of RocketMQ 4.x or 5.x know and that mean nothing here: thread pools, Netty, RocksDB, POP, …"""
    return frozenset(resources.files("downrange.broker").joinpath("rocketmq_keys.txt").read_text("utf-8").split())


def refuse_unserved(properties: Mapping[str, Property]) -> None:
    """Raise ConfigError for a switch whose promise this broker cannot keep."""
    for key, feature in _NOT_SERVED.items():
        given = properties.get(key)
        if given is not None and given.value.strip().lower() == "true":
            raise ConfigError(f"{key}=true: {feature} is not served yet; remove the key to start without{given.place}")


def check_role(config: BrokerConfig, role: BrokerRole) -> BrokerConfig:
    """The configuration with the id that goes with the role: a master's is 0, whatever the file says."""
    if role is not BrokerRole.SLAVE:
        return replace(config, broker_id=0)
    if config.broker_id == 0:
        raise ConfigError("brokerRole=SLAVE needs a brokerId of its own: 1 or more, 0 is the master's")
    return config
