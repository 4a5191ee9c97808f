"""ControllerConfig: the keys of a controller's configuration file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from downrange.auth.access_config import AccessConfig
from downrange.auth.remote_settings import RemotelyChangeable
from downrange.settings import setting
from downrange.transport.tls_config import NO_TLS, TlsConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig(AccessConfig):
    listen_port: int = setting(9878, "Port to listen on; 0 takes a free one.", minimum=0, maximum=65535)
    bind_address: str = setting("127.0.0.1", "Address to listen on.")
    advertised_address: str = setting(
        "",
        "host:port under which brokers and other controllers reach this one. Empty: the entry of "
        "controllerDLegerSelfId in controllerDLegerPeers, else bindAddress and listenPort. Not a key of RocketMQ.",
    )
    controller_dleger_group: str = setting(
        "downrange", "Name of the group of controllers, as request 1005 tells it.", key="controllerDLegerGroup"
    )
    controller_dleger_self_id: str = setting(
        "", "Name of this controller. Empty: its address.", key="controllerDLegerSelfId"
    )
    controller_dleger_peers: str = setting(
        "",
        "All controllers, such as n0-10.0.0.1:9878;n1-10.0.0.2:9878. Told to those who ask; etcd says which leads.",
        key="controllerDLegerPeers",
    )
    etcd_endpoints: str = setting(
        "http://127.0.0.1:2379", "Addresses of etcd, separated by semicolons. Not a key of RocketMQ."
    )
    etcd_prefix: str = setting(
        "/downrange/controller",
        "Beginning of all keys in etcd: controllers with equal prefixes are one group. Not a key of RocketMQ.",
    )
    etcd_timeout_mills: int = setting(
        1000, "How long a call to etcd may take. Not a key of RocketMQ.", unit="ms", minimum=100, maximum=60_000
    )
    etcd_user: str = setting("", "User at etcd; empty: none. Not a key of RocketMQ.")
    etcd_password: str = setting("", "Password of etcdUser. Not a key of RocketMQ.", is_secret=True)
    etcd_trust_cert_path: Path | None = setting(
        None, "Certificates that sign those of etcd, for https addresses. Not a key of RocketMQ."
    )
    etcd_cert_path: Path | None = setting(None, "Certificate to show to etcd. Not a key of RocketMQ.")
    etcd_key_path: Path | None = setting(None, "Key of etcdCertPath. Not a key of RocketMQ.")
    lease_millis: int = setting(
        2250,
        "Lease of a master, which acknowledges for two thirds of it after a heartbeat that was answered. Not a key of "
        "RocketMQ.",
        unit="ms",
        minimum=1000,
        maximum=60_000,
    )
    scan_not_active_broker_interval: int = setting(
        100, "Pause between two searches for silent brokers and sets without a master.", unit="ms", minimum=50
    )
    notify_broker_role_changed: bool = setting(True, "Tell brokers of each election; else they find out by asking.")
    is_process_read_event: bool = setting(
        True, "Ask etcd whether this controller still leads before answering request 1004."
    )
    refuse_unsafe_brokers: bool = setting(
        False,
        "Refuse brokers with allAckInSyncStateSet=false, which may lose acknowledged messages at a failover, instead "
        "of warning of them. Not a key of RocketMQ.",
    )
    metrics_port: int = setting(
        -1, "Port for /metrics and /healthz; -1: none. Not a key of RocketMQ.", minimum=-1, maximum=65535
    )
    server_channel_max_idle_time_seconds: int = setting(
        120, "Close a connection that was silent for this long.", unit="seconds", minimum=1
    )
    config_store_path: Path = setting(
        Path.home() / "controller" / "controller.properties", "File that keeps settings changed while running."
    )
    tls: TlsConfig = NO_TLS


REMOTELY_CHANGEABLE: Final = RemotelyChangeable(
    frozenset({"scanNotActiveBrokerInterval", "notifyBrokerRoleChanged", "isProcessReadEvent", "refuseUnsafeBrokers"}),
    frozenset({"configBlackList", "configStorePath", "rocketmqHome"}),
)
"""Request 1009 changes nothing that concerns files, ports, etcd or who may be elected."""

# Keys of a RocketMQ controller that have no effect here: etcd does what DLedger and jRaft do there, and one event loop
# does what thread pools do there.
WITHOUT_EFFECT: Final = frozenset(
    {
        "rocketmqHome",
        "configBlackList",
        "controllerType",
        "controllerStorePath",
        "mappedFileSize",
        "scanInactiveMasterInterval",
        "electMasterMaxRetryCount",
        "enableElectUncleanMaster",
        "controllerThreadPoolNums",
        "controllerRequestThreadPoolQueueCapacity",
        "jRaftElectionTimeoutMs",
        "jRaftScanWaitTimeoutMs",
        "jRaftSnapshotIntervalSecs",
        "jRaftGroupId",
        "jRaftServerId",
        "jRaftInitConf",
        "jRaftControllerRPCAddr",
        "metricsExporterType",
        "metricsGrpcExporterTarget",
        "metricsGrpcExporterHeader",
        "metricGrpcExporterTimeOutInMills",
        "metricGrpcExporterIntervalInMills",
        "metricLoggingExporterIntervalInMills",
        "metricsPromExporterPort",
        "metricsPromExporterHost",
        "metricsLabel",
        "metricsInDelta",
        "serverWorkerThreads",
        "serverCallbackExecutorThreads",
        "serverSelectorThreads",
        "serverOnewaySemaphoreValue",
        "serverAsyncSemaphoreValue",
        "serverSocketSndBufSize",
        "serverSocketRcvBufSize",
        "serverSocketBacklog",
        "serverPooledByteBufAllocatorEnable",
        "serverNettyWorkerGroupEnable",
        "writeBufferHighWaterMark",
        "writeBufferLowWaterMark",
        "useEpollNativeSelector",
        "enableShutdownGracefully",
        "shutdownWaitTimeSeconds",
    }
)
