"""The one door of a broker: every request passes it before anything looks at what the request asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby

from downrange.broker.flow_control import FlowControl
from downrange.protocol.codes import RequestCode
from downrange.protocol.errors import BrokerError, SystemBusy
from downrange.protocol.framing import Frame, code_of
from downrange.transport.connection import Connection


class Admission:
    """Decides which requests are carried out: neither the broker nor the connection may have too much to do already."""

    def __init__(self, flow: FlowControl) -> None:
        self._flow = flow
        send, pull = flow.check_send, flow.check_pull
        self._checks: Mapping[int, Callable[[], None]] = {
            int(RequestCode.SEND_MESSAGE): send,
            int(RequestCode.SEND_MESSAGE_V2): send,
            int(RequestCode.SEND_BATCH_MESSAGE): send,
            int(RequestCode.PULL_MESSAGE): pull,
            int(RequestCode.LITE_PULL_MESSAGE): pull,
            int(RequestCode.END_TRANSACTION): flow.check_end_transaction,
            int(RequestCode.HEART_BEAT): flow.check_heartbeat,
        }

    def admitted(self, frames: list[Frame], origins: list[Connection], at: int, stop: int) -> int:
        """The position of the first request of `frames[at:stop]` that is refused; `stop` when all are admitted."""
        if self._flow.is_calm and not any(origin.is_overloaded for origin, _ in groupby(origins[at:stop])):
            return stop
        for position in range(at, stop):
            if self.refusal(frames[position], origins[position]) is not None:
                return position
        return stop

    def refusal(self, frame: Frame, origin: Connection) -> BrokerError | None:
        """Why a request is not carried out; None when it is."""
        if origin.is_overloaded:
            return SystemBusy("[OVERLOAD]system busy, start flow control for a while")
        check = self._checks.get(code_of(frame))
        try:
            if check is not None:
                check()
        except BrokerError as error:
            return error
        return None
