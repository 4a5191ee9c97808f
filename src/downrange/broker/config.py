"""BrokerConfig: the keys of a `broker.conf` that do not concern files; those that do are in store/config.py."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Final

from downrange.auth.access_config import AuditConfig
from downrange.auth.plain_acl_files import PLAIN_ACL
from downrange.settings import ConfigError, Property, masked, parse_properties, setting
from downrange.store.config import BrokerRole
from downrange.transport.own_address import EVERY_ADDRESS, is_loopback, own_address
from downrange.transport.tls_config import NO_TLS, TlsConfig


@dataclass(frozen=True, slots=True)
class BrokerConfig(AuditConfig):
    namesrv_addr: str | None = setting(None, "Name servers, separated by semicolons.")
    broker_name: str = setting(socket.gethostname(), "Name of this broker; a master and its slaves share one.")
    broker_cluster_name: str = setting("DefaultCluster", "Cluster this broker belongs to.")
    broker_id: int = setting(0, "0 for a master, more for a slave.", minimum=0)
    broker_ip1: str = setting(
        "",
        "Address at which clients reach this broker; empty: bindAddress, or for 0.0.0.0 the one that others see.",
        key="brokerIP1",
    )
    broker_ip2: str | None = setting(None, "Address for slaves of this broker; empty: brokerIP1.", key="brokerIP2")
    listen_port: int = setting(10911, "Port to listen on; the VIP port is two lower.", minimum=0, maximum=65535)
    bind_address: str = setting("127.0.0.1", "Address to listen on.")
    broker_permission: int = setting(6, "What clients may do here: 4 read, 2 write, 6 both.", minimum=0, maximum=7)
    default_topic_queue_nums: int = setting(8, "Most queues of an auto-created topic.", minimum=1, maximum=65536)
    auto_create_topic_enable: bool = setting(True, "Create a missing topic when a message for it arrives.")
    auto_create_subscription_group: bool = setting(True, "Create a missing group when its first consumer connects.")
    cluster_topic_enable: bool = setting(True, "Let clients use the topic named after the cluster.")
    broker_topic_enable: bool = setting(True, "Let clients use the topic named after the broker.")
    trace_topic_enable: bool = setting(False, "Create the trace topic at start.")
    msg_trace_topic_name: str = setting("RMQ_SYS_TRACE_TOPIC", "Name of the trace topic.")
    trace_on: bool = setting(True, "Ask producers to send message traces.")
    region_id: str = setting("DefaultRegion", "Region name that producers put into their traces.")
    flush_consumer_offset_interval: int = setting(
        5000, "How often the offsets that consumers committed are saved.", unit="ms", minimum=10
    )
    reject_transaction_message: bool = setting(False, "Refuse transactional messages.")
    long_polling_enable: bool = setting(True, "Let a pull that finds nothing wait as long as its client asks.")
    short_polling_time_mills: int = setting(1000, "Wait of a pull if longPollingEnable=false.", unit="ms", minimum=1)
    max_transfer_bytes_on_bulk_pull: int = setting(
        4 << 20,
        "Most bytes in the answer to a bulk pull, as our Spark readers send; 0 treats it as any other pull. "
        "Not a key of RocketMQ: readers recognise a Downrange broker by it.",
        unit="bytes",
        minimum=0,
        maximum=12 << 20,
    )
    notify_consumer_ids_changed_enable: bool = setting(True, "Tell the consumers of a group when its members change.")
    slave_read_enable: bool = setting(False, "Advise consumers that are far behind to read from a slave.")
    broker_fast_failure_enable: bool = setting(True, "Refuse requests that waited too long to be served.")
    wait_time_mills_in_send_queue: int = setting(200, "Refuse sends that waited longer.", unit="ms", minimum=1)
    wait_time_mills_in_pull_queue: int = setting(5000, "Refuse pulls that waited longer.", unit="ms", minimum=1)
    wait_time_mills_in_heartbeat_queue: int = setting(
        31_000, "Refuse heartbeats that waited longer.", unit="ms", minimum=1
    )
    wait_time_mills_in_transaction_queue: int = setting(
        3000, "Refuse ends of transactions that waited longer.", unit="ms", minimum=1
    )
    start_accept_send_request_time_stamp: int = setting(0, "Refuse sends before this time.", unit="ms since 1970")
    enable_property_filter: bool = setting(True, "Let consumers filter by SQL92 expressions.")
    filter_support_retry: bool = setting(False, "Filter the retry topic of a group by the group's expressions, too.")
    enable_calc_filter_bit_map: bool = setting(
        False, "Note beside each queue entry which groups' SQL92 filters match it; needs enableConsumeQueueExt."
    )
    expect_consumer_num_use_filter: int = setting(
        32, "Groups with an SQL92 filter per topic that enableCalcFilterBitMap plans for.", minimum=1, maximum=10_000
    )
    max_error_rate_of_bloom_filter: int = setting(
        20, "Share of messages that such a note may offer a group in vain.", unit="percent", minimum=1, maximum=99
    )
    filter_data_clean_time_span: int = setting(
        86_400_000, "How long the SQL92 filters of a group are kept after its last consumer left.", unit="ms", minimum=1
    )
    enable_controller_mode: bool = setting(
        False,
        "Let a controller choose the master among the brokers of this name, whatever brokerRole and brokerId say.",
    )
    controller_addr: str = setting("", "Controllers, separated by semicolons, if enableControllerMode=true.")
    broker_heartbeat_interval: int = setting(
        300, "Pause between two heartbeats to the controllers.", unit="ms", minimum=10, maximum=60_000
    )
    controller_heart_beat_timeout_mills: int = setting(
        1500, "The controllers count a broker as dead that was silent for this long.", unit="ms", minimum=100
    )
    sync_broker_metadata_period: int = setting(
        1000, "How often a broker asks the controller who is master.", unit="ms", minimum=10
    )
    sync_controller_metadata_period: int = setting(
        10_000, "How often a broker asks which controller leads, if nothing went wrong.", unit="ms", minimum=10
    )
    broker_election_priority: int = setting(
        0x7FFFFFFF, "Of two equally good replicas that with the smaller number is elected.", maximum=0x7FFFFFFF
    )
    compressed_register: bool = setting(False, "Compress registrations with the name servers.")
    force_register: bool = setting(True, "Register with the name servers in every round, not only when topics changed.")
    register_name_server_period: int = setting(
        30_000, "Pause between two registrations; values outside 10 s to 60 s count as those.", unit="ms", minimum=1
    )
    register_broker_timeout_mills: int = setting(6000, "Longest wait for a name server.", unit="ms", minimum=1)
    transaction_time_out: int = setting(6000, "Ask producers about half messages this old.", unit="ms", minimum=1)
    transaction_check_max: int = setting(15, "Drop a half message after asking this often.", minimum=1)
    transaction_check_interval: int = setting(60_000, "Pause between rounds of asking.", unit="ms", minimum=1)
    enable_retry_topic_v2: bool = setting(
        False, "Name the retry topics of POP %RETRY%group+topic, which cannot be mistaken, not %RETRY%group_topic."
    )
    enable_pop_message_threshold: bool = setting(
        False, "Give no more messages of a queue to a POP group that holds popInflightMessageThreshold of them."
    )
    pop_inflight_message_threshold: int = setting(
        10_000, "Messages of one queue that a POP group may hold if enablePopMessageThreshold=true.", minimum=1
    )
    store_reply_message_enable: bool = setting(True, "Store the replies of request-reply as messages, too.")
    recall_message_enable: bool = setting(False, "Let producers recall timer messages that are not due yet.")
    allow_recall_when_broker_not_writeable: bool = setting(
        True, "Let them do that also while brokerPermission forbids to write."
    )
    server_channel_max_idle_time_seconds: int = setting(
        120, "Close a connection that was silent for this long.", unit="seconds", minimum=1
    )
    busy_poll_micros: int = setting(
        200,
        "How long the broker polls for the next request of a lone client, who sends one at a time, before it sleeps: "
        "waking up takes longer than answering. 0: it sleeps at once. Not a key of RocketMQ.",
        unit="µs",
        minimum=0,
        maximum=1000,
    )
    acl_enable: bool = setting(
        False, "Ask every client for a signature, and allow only what the accounts in aclFile may do."
    )
    acl_file: Path | None = setting(
        None,
        "File with the accounts if aclEnable=true; more of them are in the directory `acl` beside it. "
        "Empty: plain_acl.yml beside broker.conf. Not a key of RocketMQ.",
    )
    grpc_server_port: int = setting(
        8081,
        "Port for gRPC clients, which is served beside the broker; 0 takes a free one, -1 is none.",
        minimum=-1,
        maximum=65535,
    )
    authentication_enabled: bool = setting(
        False, "ACL 2.0: serve only requests that a known user signed. See docs/how-to/use-access-control-2.md."
    )
    authorization_enabled: bool = setting(
        False, "ACL 2.0: serve only requests for which a policy gives the user the right; needs authenticationEnabled."
    )
    authentication_whitelist: str = setting("", "Codes of requests that need no signature, separated by commas.")
    authorization_whitelist: str = setting("", "Codes of requests that need no right, separated by commas.")
    init_authentication_user: str = setting(
        "", 'First Super user, made if it does not exist: {"username":"…","password":"…"}.', is_secret=True
    )
    inner_client_authentication_credentials: str = setting(
        "",
        'Account of the brokers themselves, a Super user: {"accessKey":"…","secretKey":"…"}. A broker signs its own '
        "requests with it; a slave with authenticationEnabled needs it.",
        is_secret=True,
    )
    migrate_auth_from_v1_enabled: bool = setting(
        False, "Make users and ACLs of the accounts in plain_acl.yml and acl/*.yml that are no users yet, at start."
    )
    metrics_port: int = setting(
        5557, "Port of /metrics and /healthz; 0 takes a free one, -1 turns them off.", minimum=-1, maximum=65535
    )
    tls: TlsConfig = NO_TLS
    without_effect: Mapping[str, str] = field(default_factory=dict)
    """The keys of RocketMQ without effect here that the file has: shown to operators as they were given."""

    @property
    def namesrv_addresses(self) -> tuple[str, ...]:
        return tuple(part for piece in (self.namesrv_addr or "").split(";") if (part := piece.strip()))

    @property
    def controller_addresses(self) -> tuple[str, ...]:
        return tuple(part for piece in self.controller_addr.split(";") if (part := piece.strip()))

    @property
    def address(self) -> str:
        """The address at which clients find this broker; it is also its name in every route."""
        return f"{self.broker_ip1}:{self.listen_port}"


# Keys that may be changed while running (request 25): none that sets a path, a port or the identity of the broker.
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
        "recallMessageEnable",
        "allowRecallWhenBrokerNotWriteable",
        "enableRetryTopicV2",
        "enablePopMessageThreshold",
        "popInflightMessageThreshold",
        # keys of StoreConfig
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
        "timerWheelEnable",
        "timerMaxDelaySec",
        "timerFlushIntervalMs",
        "timerCongestNumEachSlot",
        "timerStopEnqueue",
        "timerStopDequeue",
    }
)
# Keys that are refused with RocketMQ's own words: changing them remotely is how CVE-2023-33246 and its kin worked.
BLACK_LIST: Final = frozenset({"brokerConfigPath", "rocketmqHome", "configBlackList"})

# Features this broker does not have. A file that switches one on stops the start: ignoring it would be dangerous.
_NOT_SERVED: Final = {
    "enableDLegerCommitLog": "DLedger",
    "enableSlaveActingMaster": "a slave that acts as master",
}
# Keys that name a class of RocketMQ, and the one class whose work this broker does. Its name may stand in a file.
_AUTH: Final = "org.apache.rocketmq.auth"
_CLASSES: Final = {
    "authenticationProvider": f"{_AUTH}.authentication.provider.DefaultAuthenticationProvider",
    "authenticationMetadataProvider": f"{_AUTH}.authentication.provider.LocalAuthenticationMetadataProvider",
    "authenticationStrategy": f"{_AUTH}.authentication.strategy.StatelessAuthenticationStrategy",
    "authorizationProvider": f"{_AUTH}.authorization.provider.DefaultAuthorizationProvider",
    "authorizationMetadataProvider": f"{_AUTH}.authorization.provider.LocalAuthorizationMetadataProvider",
    "authorizationStrategy": f"{_AUTH}.authorization.strategy.StatelessAuthorizationStrategy",
}


def keys_without_effect() -> frozenset[str]:
    """Keys of RocketMQ 4.x and 5.x brokers that have no effect here: thread pools, Netty, RocksDB, POP and others."""
    return frozenset(resources.files("downrange.broker").joinpath("rocketmq_keys.txt").read_text("utf-8").split())


def shown_without_effect(properties: Mapping[str, str]) -> dict[str, str]:
    """Every key of RocketMQ 4.9.8 that has no effect here, and those that the file has: the given value or the default.

    A secret may stand in such a key, too: the values of the file are masked like any other.
    """
    text = resources.files("downrange.broker").joinpath("rocketmq_defaults.properties").read_text("utf-8")
    return {key: given.value for key, given in parse_properties(text).items()} | masked(properties)


def advertised_host(config: BrokerConfig) -> str:
    """The address that clients and name servers are told: brokerIP1, bindAddress, or that which others see.

    Names are looked up here: every stored message has the address of its broker in numbers.
    """
    if not config.broker_ip1 and config.bind_address in EVERY_ADDRESS:
        return own_address(config.namesrv_addresses)
    key, host = ("brokerIP1", config.broker_ip1) if config.broker_ip1 else ("bindAddress", config.bind_address)
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return socket.gethostbyname(host)
    except OSError:
        raise ConfigError(f"{key}={host}: there is no host of this name") from None


def address_warnings(config: BrokerConfig) -> list[str]:
    """Warnings about the address that clients are told and the one that is listened on."""
    bind, told = config.bind_address, advertised_host(config)
    if is_loopback(bind) and not is_loopback(told):
        return [
            f"clients are told to connect to brokerIP1={told}, but this broker listens on {bind} only: "
            "set bindAddress=0.0.0.0 (--bind), or remove brokerIP1"
        ]
    if is_loopback(told) and not is_loopback(bind):
        return [
            f"this broker listens on {bind}, but tells clients of other machines to connect to {told}: "
            "give the address by which they reach it with brokerIP1 (--advertise)"
        ]
    if bind not in (*EVERY_ADDRESS, told) and not is_loopback(bind):
        return [f"this broker listens on {bind} only, and tells clients to connect to {told}: right only behind NAT"]
    return []


def refuse_unserved(properties: Mapping[str, Property]) -> None:
    """Raise ConfigError when the file switches on a feature that this broker does not have."""
    for key, feature in _NOT_SERVED.items():
        given = properties.get(key)
        if given is not None and given.value.strip().lower() == "true":
            raise ConfigError(f"{key}=true: {feature} is not served yet; remove the key to start without{given.place}")


def without_class_names(properties: Mapping[str, Property]) -> dict[str, Property]:
    """The properties without names of classes; raises ConfigError for a class whose work is not done here."""
    for key, served in _CLASSES.items():
        given = properties.get(key)
        if given is not None and given.value.strip() != served:
            raise ConfigError(f"{key}={given.value}: this class is not served, expected {served}{given.place}")
    return {key: given for key, given in properties.items() if key not in _CLASSES}


def with_acl_file(config: BrokerConfig, config_file: Path | None) -> BrokerConfig:
    """Return the configuration with the full path of the file with accounts, if it is to be read."""
    is_read = config.acl_enable or config.migrate_auth_from_v1_enabled
    if not is_read or (config.acl_file is None and config_file is None):
        return config
    directory = config_file.parent if config_file is not None else Path()
    return replace(config, acl_file=(directory / (config.acl_file or PLAIN_ACL)).absolute())


def check_controller(config: BrokerConfig) -> None:
    """Raise ConfigError when a broker is to ask a controller and does not know where."""
    if config.enable_controller_mode and not config.controller_addresses:
        raise ConfigError("enableControllerMode=true needs controllerAddr: host:port of each controller, joined by ;")


def check_role(config: BrokerConfig, role: BrokerRole) -> BrokerConfig:
    """Return the configuration with the broker id that fits the role: a master has 0, whatever the file says."""
    if config.enable_controller_mode:
        return config
    if role is not BrokerRole.SLAVE:
        return replace(config, broker_id=0)
    if config.broker_id == 0:
        raise ConfigError("brokerRole=SLAVE needs a brokerId of its own: 1 or more, 0 is the master's")
    return config
