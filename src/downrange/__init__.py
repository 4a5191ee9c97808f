"""Downrange: a message platform that speaks Apache RocketMQ."""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers take it for True; importing `typing` would be most of the time this module takes
if TYPE_CHECKING:
    from typing import Any

    from downrange.client.blocking import Producer
    from downrange.client.config import ClientConfig, ProducerConfig
    from downrange.client.errors import SendFailed
    from downrange.client.producer import AsyncProducer
    from downrange.client.send_result import SendResult, SendStatus
    from downrange.model.errors import MessageError, MQError
    from downrange.model.message import Message, MessageQueue

__version__ = "0.1.0"

__all__ = [
    "AsyncProducer",
    "ClientConfig",
    "MQError",
    "Message",
    "MessageError",
    "MessageQueue",
    "Producer",
    "ProducerConfig",
    "SendFailed",
    "SendResult",
    "SendStatus",
]

# Where each name lives. Imported when first asked for: the servers and the command line must start fast.
_HOMES = {
    "AsyncProducer": "downrange.client.producer",
    "ClientConfig": "downrange.client.config",
    "MQError": "downrange.model.errors",
    "Message": "downrange.model.message",
    "MessageError": "downrange.model.errors",
    "MessageQueue": "downrange.model.message",
    "Producer": "downrange.client.blocking",
    "ProducerConfig": "downrange.client.config",
    "SendFailed": "downrange.client.errors",
    "SendResult": "downrange.client.send_result",
    "SendStatus": "downrange.client.send_result",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'downrange' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
