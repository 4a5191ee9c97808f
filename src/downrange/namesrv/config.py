"""NamesrvConfig: the keys of a name server's configuration file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from downrange.auth.access_config import AccessConfig
from downrange.auth.remote_settings import RemotelyChangeable
from downrange.settings import setting
from downrange.transport.tls_config import NO_TLS, TlsConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesrvConfig(AccessConfig):
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
    tls: TlsConfig = NO_TLS


REMOTELY_CHANGEABLE: Final = RemotelyChangeable(
    frozenset({"orderMessageEnable", "deleteTopicWithBrokerRegistration"}),
    frozenset({"configBlackList", "configStorePath", "kvConfigPath", "rocketmqHome"}),
)
"""Request 318 changes nothing that concerns files, ports or limits: that is how two CVEs of RocketMQ worked."""

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
