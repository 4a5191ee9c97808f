"""NamesrvConfig: the keys of a name server's configuration file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from downrange.settings import setting
from downrange.transport.tls_config import NO_TLS, TlsConfig


@dataclass(frozen=True, slots=True)
class NamesrvConfig:
    listen_port: int = setting(9876, "Port to listen on; 0 takes a free one.", minimum=0, maximum=65535)
    bind_address: str = setting("127.0.0.1", "Address to listen on.")
    kv_config_path: Path = setting(
        Path.home() / "namesrv" / "kvConfig.json", "File that keeps the key-value configuration."
    )
    config_store_path: Path = setting(
        Path.home() / "namesrv" / "namesrv.properties", "File that keeps settings changed while running."
    )
    order_message_enable: bool = setting(False, "Add the ORDER_TOPIC_CONFIG of a topic to its route.")
    delete_topic_with_broker_registration: bool = setting(False, "Forget a topic when its broker registers without it.")
    scan_not_active_broker_interval: int = setting(
        10_000, "Pause between two searches for silent brokers.", unit="ms", minimum=100
    )
    server_channel_max_idle_time_seconds: int = setting(
        120, "Close a connection that was silent for this long.", unit="seconds", minimum=1
    )
    acl_enable: bool = setting(
        False,
        "Let only `admin` accounts of aclFile change what this name server knows, and brokers that sign with one or "
        "are in allowedBrokerAddresses. Not a key of RocketMQ.",
    )
    acl_file: Path | None = setting(
        None,
        "File with the accounts if aclEnable=true; more of them are in the directory `acl` beside it. "
        "Empty: plain_acl.yml beside namesrv.conf. Not a key of RocketMQ.",
    )
    anonymous_read_enable: bool = setting(
        True, "If aclEnable=true: let everybody ask for routes and lists of topics. Not a key of RocketMQ."
    )
    allowed_broker_addresses: str = setting(
        "",
        "Addresses from which brokers may register without an account, separated by semicolons, such as "
        "10.1.2.3;10.1.3.*. Empty: all, and with aclEnable=true none. Not a key of RocketMQ.",
    )
    failed_login_wait_mills: int = setting(
        1000,
        "How long a connection waits before each further login from an address with more than 20 failed ones; 0: not "
        "at all. Not a key of RocketMQ.",
        unit="ms",
        minimum=0,
        maximum=60_000,
    )
    audit_log_file: Path | None = setting(
        None,
        "File for the audit log: refused requests, and requests that change something. Only with access control. It "
        "has mode 600. Empty: only the ordinary log. Not a key of RocketMQ.",
    )
    audit_log_file_size: int = setting(
        64 << 20,
        "Size at which the audit log begins a new file; five older ones are kept. Not a key of RocketMQ.",
        unit="bytes",
        minimum=1 << 10,
    )
    tls: TlsConfig = NO_TLS


# Keys that may be changed while running (request 318): none that concerns files, ports or limits.
REMOTELY_CHANGEABLE: Final = frozenset({"orderMessageEnable", "deleteTopicWithBrokerRegistration"})
# Keys that are refused with RocketMQ's own words: changing them remotely is how two CVEs of RocketMQ worked.
BLACK_LIST: Final = frozenset({"configBlackList", "configStorePath", "kvConfigPath", "rocketmqHome"})

# Keys of a RocketMQ name server that have no effect here, where one event loop does what thread pools do there.
WITHOUT_EFFECT: Final = frozenset(
    {
        "rocketmqHome",
        "productEnvName",
        "clusterTest",
        "configBlackList",
        "serverWorkerThreads",
        "serverCallbackExecutorThreads",
        "serverSelectorThreads",
        "serverOnewaySemaphoreValue",
        "serverAsyncSemaphoreValue",
        "serverSocketSndBufSize",
        "serverSocketRcvBufSize",
        "serverSocketBacklog",
        "serverPooledByteBufAllocatorEnable",
        "writeBufferHighWaterMark",
        "writeBufferLowWaterMark",
        "useEpollNativeSelector",
        "defaultThreadPoolNums",
        "defaultThreadPoolQueueCapacity",
        "clientRequestThreadPoolNums",
        "clientRequestThreadPoolQueueCapacity",
        "unRegisterBrokerQueueCapacity",
        "supportActingMaster",
        "enableAllTopicList",
        "enableTopicList",
        "notifyMinBrokerIdChanged",
        "enableControllerInNamesrv",
        "needWaitForService",
        "waitSecondsForService",
        "returnOrderTopicConfigToBroker",
    }
)
