"""Who may send which request to a controller; `auth/server_access.py` decides by these tables.

RocketMQ's controllers let everybody do everything.
"""

from __future__ import annotations

from typing import Final

from downrange.auth.needs import CONTROLLER_NEEDS
from downrange.auth.server_access import Requests
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command

OF_BROKERS: Final = frozenset(
    {
        RequestCode.BROKER_HEARTBEAT,
        RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET,
        RequestCode.CONTROLLER_ELECT_MASTER,
        RequestCode.CONTROLLER_REGISTER_BROKER,
        RequestCode.CONTROLLER_GET_REPLICA_INFO,
        RequestCode.CONTROLLER_GET_NEXT_BROKER_ID,
        RequestCode.CONTROLLER_APPLY_BROKER_ID,
    }
)
"""The requests that brokers send."""
READS: Final = frozenset({RequestCode.CONTROLLER_GET_METADATA_INFO, RequestCode.CONTROLLER_GET_SYNC_STATE_DATA})
"""Views of operators, and of brokers that look for the leader, without any secret."""
_OF_OPERATORS: Final = ("designateElect", "uncleanElect")


def is_of_broker(command: Command) -> bool:
    """Whether brokers send such requests. Only operators say who wins an election, with an account."""
    if command.code not in OF_BROKERS:
        return False
    if command.code != RequestCode.CONTROLLER_ELECT_MASTER:
        return True
    return all(command.ext_fields.get(name, "false").lower() == "false" for name in _OF_OPERATORS)


REQUESTS: Final = Requests(CONTROLLER_NEEDS, is_of_broker, READS)
