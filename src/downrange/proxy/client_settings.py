"""What a server makes of the settings of a client. Pure."""

from __future__ import annotations

from typing import Final

from downrange.model.topics import EXPONENTIAL, ExponentialRetryPolicy, GroupRetryPolicy, SubscriptionGroupConfig
from downrange.proxy.checks import MAX_BODY_BYTES
from downrange.proxy.times import put
from downrange.proxy.wire.messages import RetryPolicy, Settings

PRODUCER_ATTEMPTS: Final = 3
RECEIVE_BATCH: Final = 32
LONG_POLLING_MILLIS: Final = 20_000
BACKOFF_MILLIS: Final = tuple(
    1000 * seconds
    for seconds in (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
)
_DEFAULT: Final = SubscriptionGroupConfig("")


def merged(settings: Settings, group: SubscriptionGroupConfig | None) -> Settings:
    """The settings of a client with those that the server decides; `group` is None for a group that is not known."""
    found = Settings()
    found.CopyFrom(settings)
    found.metric.on = False
    if settings.WhichOneof("kind") == "publishing":
        found.publishing.max_body_size = MAX_BODY_BYTES
        found.publishing.validate_message_type = True
        found.backoff_policy.CopyFrom(_producer_policy())
        return found
    known = group or _DEFAULT
    found.subscription.receive_batch_size = RECEIVE_BATCH
    put(found.subscription.long_polling_timeout, LONG_POLLING_MILLIS)
    found.subscription.fifo = bool(known.consume_message_orderly)
    found.backoff_policy.CopyFrom(_consumer_policy(max_attempts(known), known.group_retry_policy))
    return found


def max_attempts(group: SubscriptionGroupConfig | None) -> int:
    """How often a message is delivered before it is a dead letter."""
    return (group or _DEFAULT).retry_max_times + 1


def _producer_policy() -> RetryPolicy:
    policy = RetryPolicy(max_attempts=PRODUCER_ATTEMPTS)
    _put_exponential(policy, ExponentialRetryPolicy(10, 1000, 2))
    return policy


def _consumer_policy(attempts: int, wanted: GroupRetryPolicy | None) -> RetryPolicy:
    policy = RetryPolicy(max_attempts=attempts)
    if wanted is not None and wanted.type == EXPONENTIAL:
        _put_exponential(policy, wanted.exponential_retry_policy or ExponentialRetryPolicy())
        return policy
    pauses = wanted.customized_retry_policy.next if wanted and wanted.customized_retry_policy else BACKOFF_MILLIS
    for pause in pauses:
        put(policy.customized_backoff.next.add(), pause)
    return policy


def _put_exponential(policy: RetryPolicy, pauses: ExponentialRetryPolicy) -> None:
    put(policy.exponential_backoff.initial, pauses.initial)
    put(policy.exponential_backoff.max, pauses.max)
    policy.exponential_backoff.multiplier = pauses.multiplier
