"""What follows an attempt to send: return, try again, or raise. Pure; the producer does the sending.

    kind                       attempts                            tried again after
    sync, any queue            1 + retryTimesWhenSendFailed        transport failures; codes of RETRIABLE_CODES
    sync, given queue          1                                   nothing
    async                      1 + retryTimesWhenSendAsyncFailed   transport failures only, on the same broker
    one-way                    1                                   nothing

Times are seconds of a clock that does not go back. All attempts of a message share one deadline. They carry the same
unique id, so a message stored by an attempt that was taken for failed shows up twice with one id. Flow control is never
answered with more load.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import Final, assert_never

from downrange.client.errors import BrokerNotFound
from downrange.client.producer.fault.attempt import Outcome
from downrange.protocol.codes import ResponseCode
from downrange.protocol.errors import BrokerError
from downrange.transport.errors import ConnectFailed, ConnectionLost, RequestTimedOut

RETRIABLE_CODES: Final = frozenset(
    {
        int(ResponseCode.TOPIC_NOT_EXIST),
        int(ResponseCode.SERVICE_NOT_AVAILABLE),
        int(ResponseCode.SYSTEM_ERROR),
        int(ResponseCode.NO_PERMISSION),
        int(ResponseCode.NO_BUYER_ID),
        int(ResponseCode.NOT_IN_CURRENT_UNIT),
    }
)
LEAST_ATTEMPT_SECONDS: Final = 0.01
"""With less time left no attempt is begun: it would time out, and the broker would be blamed."""
SHARES: Final = 3
"""An attempt may take a third of the time that is left, however many could follow, ..."""
LEAST_SHARE_SECONDS: Final = 0.05
"""...and so long even if that is more."""
FLOW_CONTROL_CODES: Final = frozenset({int(ResponseCode.SYSTEM_BUSY), int(ResponseCode.FLOW_CONTROL)})
NOT_STORE_OK_CODES: Final = frozenset(
    {
        int(ResponseCode.FLUSH_DISK_TIMEOUT),
        int(ResponseCode.SLAVE_NOT_AVAILABLE),
        int(ResponseCode.FLUSH_SLAVE_TIMEOUT),
    }
)


_NOT_MASTER_CODES: Final = frozenset({int(ResponseCode.SERVICE_NOT_AVAILABLE), int(ResponseCode.NO_PERMISSION)})


class SendKind(StrEnum):
    SYNC = "sync"
    SYNC_GIVEN_QUEUE = "sync_given_queue"  # a queue or a selector: the caller wants this queue or none
    ASYNC = "async"
    ONEWAY = "oneway"


class Decision(Enum):
    """The next step. RAISE ends the send with the errors of the attempts, RETURN with a result."""

    RETURN = "return"
    RETRY = "retry"  # choose a queue again, on another broker
    RETRY_SAME_BROKER = "retry on the same broker"
    RAISE = "raise"


def attempts_allowed(
    kind: SendKind, retry_times_when_send_failed: int = 2, retry_times_when_send_async_failed: int = 2
) -> int:
    match kind:
        case SendKind.SYNC:
            return 1 + max(0, retry_times_when_send_failed)
        case SendKind.ASYNC:
            return 1 + max(0, retry_times_when_send_async_failed)
        case SendKind.SYNC_GIVEN_QUEUE | SendKind.ONEWAY:
            return 1
    assert_never(kind)


def attempt_timeout(
    now: float,
    deadline: float,
    per_attempt: float | None = None,
    patience: float | None = None,
    attempts_left: int = 1,
) -> float:
    """How long the attempt that starts now may take.

    Without `patience` (of the fault strategy, in seconds) it is RocketMQ's rule: without a limit per attempt, a silent
    broker eats all the time. With it, the attempts that are left share the time.
    """
    left = max(0.0, deadline - now)
    longest = left if per_attempt is None else min(left, per_attempt)
    if patience is None or attempts_left <= 1:
        return longest
    return min(longest, max(left / min(attempts_left, SHARES), LEAST_SHARE_SECONDS), patience)


def outcome_of_code(code: int) -> Outcome:
    """The outcome that a reply code of a send means."""
    if code == ResponseCode.SUCCESS:
        return Outcome.OK
    if code in NOT_STORE_OK_CODES:
        return Outcome.NOT_STORE_OK
    if code in FLOW_CONTROL_CODES:
        return Outcome.FLOW_CONTROL
    return Outcome.BROKER_ERROR if code in RETRIABLE_CODES else Outcome.REFUSED


def outcome_of_error(error: BaseException) -> Outcome:
    """The outcome that an error of an attempt means. A cancelled task, like an interrupted thread, is INTERRUPTED."""
    if isinstance(error, BrokerError):
        return outcome_of_code(error.code)
    if isinstance(error, RequestTimedOut | TimeoutError):
        return Outcome.TIMEOUT
    if isinstance(error, ConnectionLost):
        return Outcome.CONNECTION_LOST
    if isinstance(error, ConnectFailed):
        return Outcome.CONNECT_FAILED
    if not isinstance(error, Exception):
        return Outcome.INTERRUPTED
    # All other errors come before a broker is reached, such as a broker name without an address.
    return Outcome.CONNECT_FAILED


def is_not_master(error: BaseException | None) -> bool:
    """Whether a broker says with this error that it takes no messages, as the slave does that was the master before."""
    if not isinstance(error, BrokerError):
        return False
    return error.code in _NOT_MASTER_CODES or (
        error.code == ResponseCode.SYSTEM_BUSY and "[REJECTREQUEST]" in (error.remark or "")
    )


def may_have_moved(error: BaseException | None) -> bool:
    """Whether the broker that failed may have another master, or will have one soon."""
    return is_not_master(error) or isinstance(error, ConnectionLost | ConnectFailed | BrokerNotFound)


def after_attempt(
    attempt_number: int,
    attempts_allowed: int,
    outcome: Outcome,
    response_code: int | None,
    now: float,
    deadline: float,
    retry_another_broker_when_not_store_ok: bool = False,
    *,
    has_result: bool = False,
) -> Decision:
    """The step of a synchronous send after attempt `attempt_number`, counted from 1.

    `has_result` says that an earlier attempt stored the message though not safely: that result beats a later error.
    """
    may_retry = attempt_number < attempts_allowed and deadline - now >= LEAST_ATTEMPT_SECONDS
    give_up = Decision.RETURN if has_result else Decision.RAISE
    match outcome:
        case Outcome.OK:
            return Decision.RETURN
        case Outcome.NOT_STORE_OK:
            return Decision.RETRY if retry_another_broker_when_not_store_ok and may_retry else Decision.RETURN
        case Outcome.TIMEOUT | Outcome.GIVEN_UP | Outcome.CONNECT_FAILED | Outcome.CONNECTION_LOST:
            return Decision.RETRY if may_retry else give_up
        case Outcome.BROKER_ERROR | Outcome.REFUSED:
            return Decision.RETRY if may_retry and response_code in RETRIABLE_CODES else give_up
        case Outcome.FLOW_CONTROL:
            return give_up
        case Outcome.INTERRUPTED:
            return Decision.RAISE
    assert_never(outcome)


def after_async_attempt(
    attempt_number: int, attempts_allowed: int, outcome: Outcome, now: float, deadline: float
) -> Decision:
    """The step of an asynchronous send after attempt `attempt_number`, counted from 1."""
    match outcome:
        case Outcome.OK | Outcome.NOT_STORE_OK:
            return Decision.RETURN
        case Outcome.TIMEOUT | Outcome.GIVEN_UP | Outcome.CONNECT_FAILED | Outcome.CONNECTION_LOST:
            may_retry = attempt_number < attempts_allowed and deadline - now >= LEAST_ATTEMPT_SECONDS
            return Decision.RETRY_SAME_BROKER if may_retry else Decision.RAISE
        case Outcome.BROKER_ERROR | Outcome.REFUSED | Outcome.FLOW_CONTROL | Outcome.INTERRUPTED:
            return Decision.RAISE
    assert_never(outcome)
