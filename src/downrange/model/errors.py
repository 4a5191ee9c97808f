"""The root of every error Downrange raises on purpose.

MQError
├── ConfigError                  settings.py: names the key, the value and the file line
├── MessageError                 a message, topic or group that breaks a rule; nothing was sent or stored
├── ProtocolError                protocol/errors.py: LocalProtocolError: our fault; RemoteProtocolError: the peer's
├── BrokerError(code, remark)    protocol/errors.py: a peer answered with an error code; one class per code
├── TransportError               transport/errors.py: ConnectFailed, ConnectionLost, RequestTimedOut, …; retriable
└── StoreError                   store/errors.py: CorruptRecord, StoreLocked, DiskFull, …

An error carries what its catcher needs to decide: `retriable` says whether the same call may succeed later.
"""

from __future__ import annotations


class MQError(Exception):
    """Base of all errors raised on purpose; its text is one line an operator can act on."""

    retriable: bool = False


class MessageError(MQError):
    """A message, topic or group name breaks a rule; the text says which."""
