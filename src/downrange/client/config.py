"""Where a client finds its cluster, and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass, field

from downrange.client.compression import Compression, check_compression
from downrange.client.producer.fault import STRATEGIES, StrategyName
from downrange.model.topics import AUTO_CREATE_TOPIC, TRACE_TOPIC, check_topic_name
from downrange.settings import ConfigError, client_tls_file, credentials, namesrv_addresses, wants_client_tls
from downrange.transport.errors import ConnectFailed
from downrange.transport.pool import split_address
from downrange.transport.tls_config import NO_TLS, TlsConfig

DEFAULT_NAMESRV = "127.0.0.1:9876"
_HINT = "set it with -n or NAMESRV_ADDR"  # which is no help where an address was given


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Settings of one session. `source` says where the addresses came from, for the error when none answers."""

    namesrv_addresses: tuple[str, ...]
    """`host:port` of each name server."""
    source: str = "given in the program"
    """Where the addresses come from, for errors."""
    connect_timeout_seconds: float = 3.0
    """The longest wait for a connection."""
    request_timeout_seconds: float = 5.0
    """The longest wait for an answer, unless a request says otherwise."""
    relay_timeout_seconds: float = 12.0
    """The time-out of requests that a broker hands on to a consumer; the broker itself gives up after 10 s."""
    route_seconds: float = 30.0
    """How long a route is used before it is looked up again."""
    route_lock_seconds: float = 3.0
    """How long to wait while another call looks up the same route."""
    heartbeat_seconds: float = 30.0
    """Pause between two heartbeats to brokers."""
    access_key: str | None = None
    """The user of a cluster with access control: every request is signed with the secret key."""
    secret_key: str | None = field(default=None, repr=False)
    """The key that signs requests; never shown."""
    security_token: str | None = field(default=None, repr=False)
    """The token of a temporary account; never shown."""
    use_tls: bool = False
    """Connect with TLS, to name servers and brokers; never without if that fails. [useTLS, tls.enable]"""
    tls: TlsConfig = NO_TLS
    """The servers to trust, and a certificate to show to them."""

    def __post_init__(self) -> None:
        if not self.namesrv_addresses:
            raise ConfigError(f"no name server address ({self.source}); expected host:port, several separated by ;")
        for address in self.namesrv_addresses:
            try:
                split_address(address)
            except ConnectFailed as error:
                raise ConfigError(f"name server: {error} ({self.source})") from None
        if bool(self.access_key) != bool(self.secret_key):
            missing = "access_key" if self.secret_key else "secret_key"
            raise ConfigError(f"access_key and secret_key belong together; {missing} is missing")

    @classmethod
    def of(cls, namesrv: str | ClientConfig | None = None) -> ClientConfig:
        """The name servers of the argument, else of NAMESRV_ADDR, else the one a quick start runs on this machine.

        A configuration is returned as it is. The user, if any, is that of ROCKETMQ_ACCESS_KEY and ROCKETMQ_SECRET_KEY.
        ROCKETMQ_TLS_ENABLE=true switches TLS on, and so does ROCKETMQ_TLS_CONFIG_FILE, which names a `tls.config.file`.
        """
        if isinstance(namesrv, ClientConfig):
            return namesrv
        if namesrv is not None:
            addresses, source = split_addresses(namesrv), "the one that was given"
        elif (from_environment := namesrv_addresses()) is not None:
            addresses, source = split_addresses(from_environment), f"from NAMESRV_ADDR, {_HINT}"
        else:
            addresses, source = (DEFAULT_NAMESRV,), f"the default, {_HINT}"
        tls = TlsConfig(config_file=client_tls_file())
        return cls(addresses, source, **credentials(), use_tls=wants_client_tls(), tls=tls)


def split_addresses(text: str) -> tuple[str, ...]:
    """`host:port;host:port`; a comma separates as well."""
    return tuple(part for piece in text.replace(",", ";").split(";") if (part := piece.strip()))


@dataclass(frozen=True, slots=True)
class ProducerConfig:
    """How a producer sends. Names are RocketMQ's, in seconds and bytes; so are defaults, but for `fault_strategy`."""

    send_timeout_seconds: float = 3.0
    """For a whole send, all attempts and the look-up of the route together."""
    attempt_timeout_seconds: float | None = None
    """The longest one attempt may take, so that there is time for another broker. [sendMsgMaxTimeoutPerRequest]

    `adaptive` learns a time-out for each broker; this one is then an upper limit.
    """
    retry_times_when_send_failed: int = 2
    """Further attempts of a send, each to another broker if there is one."""
    retry_times_when_send_async_failed: int = 2
    """Further attempts of a send with a callback, all to the same broker."""
    retry_another_broker_when_not_store_ok: bool = False
    """Whether a message that was stored, but not flushed or replicated in time, is sent again."""
    fault_strategy: StrategyName = "adaptive"
    """`round_robin` is RocketMQ's default, `latency` its sendLatencyFaultEnable=true."""
    max_message_size: int = 4 * 1024 * 1024
    """The longest body, before it is compressed, in bytes."""
    compress_over_bytes: int = 4096
    """Bodies of this size and larger are compressed. [compressMsgBodyOverHowmuch]"""
    compression: Compression = Compression.ZLIB
    """How bodies are compressed: ZLIB, LZ4 or ZSTD."""
    compression_level: int = 5
    """From 1, fast, to 9, small."""
    namespace: str = ""
    """Put before every topic and group, so that several users share a cluster."""
    create_topic_key: str = AUTO_CREATE_TOPIC
    """The topic whose route and settings a topic that does not exist is made from."""
    default_topic_queue_nums: int = 4
    """Queues that a topic gets when a send creates it."""
    trace: bool = False
    """Report every message sent to the trace topic."""
    trace_topic: str = TRACE_TOPIC
    """The topic for traces."""
    max_async_sends: int = 10_000
    """How many `send_async` may be on their way at once."""
    close_timeout_seconds: float = 5.0
    """How long `close` waits for sends on their way."""

    def __post_init__(self) -> None:
        for name in ("send_timeout_seconds", "max_message_size", "default_topic_queue_nums", "max_async_sends"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be positive")
        for name in ("retry_times_when_send_failed", "retry_times_when_send_async_failed", "compress_over_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must not be negative")
        if self.attempt_timeout_seconds is not None and self.attempt_timeout_seconds <= 0:
            raise ConfigError(f"attempt_timeout_seconds is {self.attempt_timeout_seconds}; it must be positive or None")
        if self.fault_strategy not in STRATEGIES:
            raise ConfigError(f"fault_strategy is {self.fault_strategy!r}; there are {', '.join(STRATEGIES)}")
        check_compression(self.compression, self.compression_level)
        check_topic_name(self.trace_topic)
