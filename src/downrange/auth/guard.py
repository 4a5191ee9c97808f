"""The check that every request of a server passes when access control is on: who asks, and may they?"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Final, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from downrange.auth.access_control import AccessControl, Account, Action, Need
from downrange.auth.needs import Rule, StoredTopics, topic_need
from downrange.auth.signed_requests import allowed_key, first_not_allowed, hmac_states
from downrange.model.errors import MQError
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError, NoPermission, RemoteProtocolError
from downrange.protocol.framing import Frame, decode_frame

_MOST_REMEMBERED: Final = 10_000
_PUB: Final = frozenset({Action.PUB})


class Origin(Protocol):
    """The connection that a request came over."""

    peer: str
    """Address and port of the peer."""
    peer_host: bytes
    """The address and port, packed."""


def address_of(origin: Origin) -> str:
    """The address of a peer, without its port."""
    return origin.peer.rpartition(":")[0]


class Outcome(NamedTuple):
    """What became of a request that was looked at: for the audit log."""

    command: Command
    origin: Origin
    account: str | None
    """The name of the account; None if nobody knows who asked: the login failed."""
    needs: tuple[Need, ...] | None
    """The rights that the request needs, as far as they are known; None for a code that is only for administrators."""
    refusal: BrokerError | None


class Guard:
    """Lets a request pass when its account may do everything that the request asks for.

    Requests that repeat (sends and pulls of an account that was allowed the same before) are decided by one compiled
    step. It remembers decisions, never signatures: each request's own signature is checked every time.
    """

    def __init__(
        self,
        control: AccessControl,
        rules: Mapping[int, Rule],
        stored: StoredTopics,
        served: Container[int],
        on_outcome: Callable[[Outcome], None],
        open_codes: Container[int] = frozenset(),
    ) -> None:
        """`served` has the codes that the server answers; `on_outcome` hears of each request looked at.

        Requests with one of `open_codes` pass from everybody and are not looked at.
        """
        self._control = control
        self._rules = rules
        self._stored = stored
        self._served = served
        self._on_outcome = on_outcome
        self._open = open_codes
        self._generation = -1
        self._allowed: set[bytes] = set()
        self._keys: dict[bytes, bytes] = {}
        self._clients: WeakKeyDictionary[Origin, Account] = WeakKeyDictionary()
        """The accounts of the last heartbeats."""

    def passed(self, frames: Sequence[Frame], origins: Sequence[Origin], at: int, stop: int) -> int:
        """The position of the first request of `frames[at:stop]` that must be looked at one by one."""
        if self._generation != self._control.generation:
            self._generation = self._control.generation
            self._allowed.clear()
            self._keys = {name.encode(): hmac_states(secret) for name, secret in self._control.secrets.items()}
        return first_not_allowed(frames, origins, at, stop, self._keys, self._allowed)

    def refusal(self, frame: Frame, origin: Origin) -> BrokerError | None:
        """Why a request is refused; None when it may be carried out."""
        try:
            command = decode_frame(frame)
        except RemoteProtocolError as error:
            return NoPermission(str(error))
        if command.is_response:
            return NoPermission("a reply is no request")  # nobody reads this: replies are not answered
        if command.code in self._open:
            return None
        outcome = self._look_at(command, origin)
        self._on_outcome(outcome)
        return outcome.refusal

    def may_publish(self, origin: Origin, topic: str) -> bool:
        """Whether the account that sends the heartbeats of a connection may publish to a topic, as things are now."""
        account = self._clients.get(origin)
        if account is None or (account.name and account.name not in self._control.secrets):
            return False
        send = Command(RequestCode.SEND_MESSAGE_V2)
        try:
            self._control.authorize(account, (topic_need(topic, _PUB),), send, address_of(origin))
        except BrokerError:
            return False
        return True

    def _look_at(self, command: Command, origin: Origin) -> Outcome:
        address = address_of(origin)
        name: str | None = None
        needs: tuple[Need, ...] | None = ()
        refusal: BrokerError | None = None
        try:
            account = self._control.authenticate(command, address)
            name = account.name
            rule = self._rules.get(command.code)
            needs = None if rule is None else tuple(rule(command, self._stored))
            self._authorize(account, needs, command, address)
            self._remember(account, command, origin)
        except BrokerError as error:
            refusal = error
        except MQError as error:  # the request cannot be read, so nobody knows what it would touch
            refusal = NoPermission(str(error))
        else:
            if command.code == RequestCode.HEART_BEAT:
                self._clients[origin] = account
        return Outcome(command, origin, name, needs, refusal)

    def _authorize(self, account: Account, needs: tuple[Need, ...] | None, command: Command, address: str) -> None:
        if needs is not None:
            self._control.authorize(account, needs, command, address)
        elif command.code in self._served and not account.is_admin:
            raise NoPermission(f"request code {command.code} needs an administrator")

    def _remember(self, account: Account, command: Command, origin: Origin) -> None:
        key = allowed_key(account.name, command, origin.peer_host)
        if key is not None and account.name:
            if len(self._allowed) >= _MOST_REMEMBERED:
                self._allowed.clear()
            self._allowed.add(key)
