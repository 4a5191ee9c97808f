"""Requests 3001 to 3010 for the handlers of a broker, without a socket."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from downrange.auth.user_access_control import UserAccessControl
from downrange.broker.access import user_access
from downrange.broker.config import BrokerConfig
from downrange.broker.handlers.users import UserHandlers
from downrange.broker.live_config import LiveConfig
from downrange.protocol.command import Command, request
from downrange.protocol.signing import Signer
from downrange.store.config import BrokerRole, StoreConfig
from downrange.transport.connection import Connection
from downrange.transport.serving import error_reply

ROOT = '{"username":"root","password":"rootSecret"}'
INNER = '{"accessKey":"brokers","secretKey":"innerSecret"}'
_PEER = cast(
    Connection, SimpleNamespace(peer="127.0.0.1:5", is_tls=False)
)  # all that the handlers want to know of a connection
SECRETS = {"root": "rootSecret", "brokers": "innerSecret"}


def settings(**more: object) -> BrokerConfig:
    """A configuration with ACL 2.0, a first user and the brokers' own account."""
    given: dict[str, object] = {
        "authentication_enabled": True,
        "authorization_enabled": True,
        "init_authentication_user": ROOT,
        "inner_client_authentication_credentials": INNER,
    }
    return BrokerConfig(**{**given, **more})  # type: ignore[arg-type]


class UserDesk:
    """The handlers on accounts in a directory. Requests come from `by`, whose signature a guard would have checked."""

    def __init__(self, root: Path, role: BrokerRole = BrokerRole.ASYNC_MASTER, **more: object) -> None:
        config = settings(**more)
        store = StoreConfig(store_path_root_dir=root, broker_role=role)
        self.access: UserAccessControl | None = (
            user_access(config, store).users if config.authentication_enabled else None
        )
        self.handlers = UserHandlers(LiveConfig(config, store), self.access)

    def ask(self, code: int, fields: Mapping[str, str] = {}, body: bytes = b"", *, by: str = "root") -> Command:
        command = Signer(by, SECRETS.get(by, by)).sign(request(code, ext_fields=fields, body=body))
        return self.answer(command)

    def answer(self, command: Command) -> Command:
        try:
            reply = self.handlers.routes[command.code](command, _PEER)
        except Exception as error:
            return error_reply(command, error)
        assert isinstance(reply, Command)
        return reply
