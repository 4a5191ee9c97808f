"""AccessConfig: the keys about access that name servers and controllers have. Brokers share those of AuditConfig."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from downrange.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """Where the audit log of a server is, and how much failed logins slow a client down."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig(AuditConfig):
    """Which accounts may ask a server, and where its audit log is. Access control is off by default."""

    acl_enable: bool = setting(
        False,
        "Let only `admin` accounts of aclFile change what this server knows, and brokers that sign with one or are "
        "in allowedBrokerAddresses. Not a key of RocketMQ.",
    )
    authentication_enabled: bool = setting(
        False,
        "Like aclEnable=true, but the accounts are initAuthenticationUser and innerClientAuthenticationCredentials of "
        "this file, with the values that they have in broker.conf. RocketMQ has this key for brokers only.",
    )
    init_authentication_user: str = setting(
        "",
        'Account of operators if authenticationEnabled=true: {"username":"…","password":"…"}. RocketMQ has this key '
        "for brokers only.",
        is_secret=True,
    )
    inner_client_authentication_credentials: str = setting(
        "",
        'Account with which servers sign their requests to each other: {"accessKey":"…","secretKey":"…"}. With '
        "authenticationEnabled=true, brokers that sign with it may register.",
        is_secret=True,
    )
    acl_file: Path | None = setting(
        None,
        "File with the accounts if aclEnable=true; more of them are in the directory `acl` beside it. "
        "Empty: plain_acl.yml beside the configuration file. Not a key of RocketMQ.",
    )
    anonymous_read_enable: bool = setting(
        True,
        "With access control: let everybody ask what every client must know. Not a key of RocketMQ.",
    )
    allowed_broker_addresses: str = setting(
        "",
        "Addresses from which brokers may register without an account, separated by semicolons, such as "
        "10.1.2.3;10.1.3.*. Empty: all, and with access control none. Not a key of RocketMQ.",
    )
