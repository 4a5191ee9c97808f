"""Timer messages: how a message with a time of its own is put into the timer topic, and how it gets out again.

Such a message is stored in rmq_sys_wheel_timer, queue 0, and keeps its real topic and queue as properties. TIMER_OUT_MS
says in which tick it is due, and also that a message was in the timer topic: whoever has it is not timed again.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Final

from downrange.broker.delayed import delay_level, stored_text
from downrange.broker.live_config import LiveConfig
from downrange.broker.topics import Topics
from downrange.model import properties as names
from downrange.model.recall_handle import RecallHandle
from downrange.model.topics import HALF_TOPIC, RETRY_PREFIX, TIMER_TOPIC
from downrange.protocol.errors import BrokerError, MessageIllegal
from downrange.store.kept_message import KeptMessage
from downrange.store.new_message import NewMessage

_TAKEN_IN_LATE: Final = 2**63 - 1
_OUT_TIME: Final = f"{names.PROPERTY_SEPARATOR}{names.TIMER_OUT_MS}{names.NAME_VALUE_SEPARATOR}"
_REAL_TOPIC: Final = f"{names.REAL_TOPIC}{names.NAME_VALUE_SEPARATOR}"
_REAL_QID: Final = f"{names.REAL_QID}{names.NAME_VALUE_SEPARATOR}"
_TIMES: Final = f"%b{names.TIMER_ENQUEUE_MS}\x01%d\x02{names.TIMER_DEQUEUE_MS}\x01%d".encode()
_MORE_TIMES: Final = _TIMES.replace(b"%b", b"%b\x02")
_TIMES_END: Final = b"QUEUE_MS\x01"
_ENDS: Final = (b"", b"\x02")
_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,18}")


class Timing:
    """Decides which messages wait in the timer topic, and until when. `count_at` tells how many wait for a time."""

    def __init__(self, config: LiveConfig, topics: Topics, count_at: Callable[[int], int] = lambda time: 0) -> None:
        self._config = config
        self._topics = topics
        self._precision = config.store.timer_precision
        self._count_at = count_at

    def set_aside(self, message: NewMessage, properties: dict[str, str], now: int) -> bool:
        """Change a message that is due later, and its properties, into the form in which it waits.

        False for a message that is not timed, or due by now: it is not changed. Raises BrokerError for one that cannot
        be timed so.
        """
        out_time = self.out_time(properties, now)
        if out_time is None or message.topic == TIMER_TOPIC:
            return False
        self._topics.ensure(TIMER_TOPIC, 1)
        properties[names.TIMER_OUT_MS] = str(out_time)
        properties[names.REAL_TOPIC] = message.topic
        properties[names.REAL_QID] = str(message.queue_id)
        message.topic = TIMER_TOPIC
        message.queue_id = 0
        message.properties = stored_text(properties)
        return True

    def out_time(self, properties: dict[str, str], now: int) -> int | None:
        """The tick in which a message with these properties is due; None when it is not timed, or due by now."""
        if names.TIMER_OUT_MS in properties or delay_level(properties.get(names.DELAY)):
            return None
        name = next((name for name in names.TIMER_PROPERTIES if name in properties), None)
        if name is None:
            return None
        store = self._config.store
        if not store.timer_wheel_enable:
            raise BrokerError("accurate timer message is not enabled, timerWheelEnable is false")
        due = _due(name, properties[name], now)
        longest = store.timer_max_delay_sec * 1000
        if due is None or due - now > longest or (due <= now and names.TIMER_DEL_UNIQKEY in properties):
            raise MessageIllegal(
                f"timer message illegal, the delay time should not be bigger than the max delay {longest}ms; or if set "
                "del msg, the delay time should be bigger than the current time"
            )
        if due <= now:
            return None
        out_time = (due - 1) // self._precision * self._precision
        self._refuse_congested(out_time)
        return out_time

    def _refuse_congested(self, out_time: int) -> None:
        limit = self._config.store.timer_congest_num_each_slot
        count = self._count_at(out_time)
        if count <= limit or (count < 2 * limit and random.random() * limit > count - limit):  # noqa: S311  fairness
            return
        raise BrokerError(
            f"timer message is under flow control, max num limit is {2 * limit} or the current value is greater than "
            f"{limit} and less than {2 * limit}, trigger random flow control"
        )


def _due(name: str, value: str, now: int) -> int | None:
    if _NUMBER.fullmatch(value) is None:
        return None
    number = int(value)
    if name == names.TIMER_DELIVER_MS:
        return number
    return now + (number * 1000 if name == names.TIMER_DELAY_SEC else number)


def delivered(kept: KeptMessage, enqueued: int, due: int, now: int) -> NewMessage | None:
    """The message for consumers that a record of the timer topic stands for; None when the record does not say where
    the message belongs. It was put on the wheel at `enqueued`, into the tick `due`."""
    out_time, topic, queue_id = _destination(kept)
    if topic is None or topic in (TIMER_TOPIC, HALF_TOPIC) or queue_id is None or not queue_id.isdecimal():
        return None
    message = kept.message
    message.topic = topic
    message.queue_id = int(queue_id)
    message.prepared_transaction_offset = 0
    was_late = out_time != str(due)
    full = _with_times(message.properties, _TAKEN_IN_LATE if was_late else enqueued, now)
    if len(full) <= names.MAX_PROPERTIES_BYTES:  # else there is no room for these two, which nobody needs
        message.properties = full
    return message


def _destination(kept: KeptMessage) -> tuple[str | None, str | None, str | None]:
    """TIMER_OUT_MS, REAL_TOPIC and REAL_QID. `set_aside` puts them behind all others, where they are found at once."""
    _, found, rest = kept.text.rpartition(_OUT_TIME)
    tail = rest.split(names.PROPERTY_SEPARATOR)
    if found and len(tail) == 3 and tail[1].startswith(_REAL_TOPIC) and tail[2].startswith(_REAL_QID):
        return tail[0], tail[1].removeprefix(_REAL_TOPIC), tail[2].removeprefix(_REAL_QID)
    return kept.find(names.TIMER_OUT_MS), kept.find(names.REAL_TOPIC), kept.find(names.REAL_QID)


def rolled(kept: KeptMessage, enqueued: int, now: int) -> NewMessage:
    """A message that is due so much later that it is stored in the timer topic again."""
    properties = kept.properties
    properties[names.TIMER_ROLL_TIMES] = str(roll_times(kept) + 1)
    properties[names.TIMER_ENQUEUE_MS] = str(enqueued)
    properties[names.TIMER_DEQUEUE_MS] = str(now)
    message = kept.message
    message.properties = stored_text(properties)
    return message


def roll_times(kept: KeptMessage) -> int:
    """How often a message was stored in the timer topic again."""
    text = kept.find(names.TIMER_ROLL_TIMES) or "0"
    return int(text) if text.isdecimal() else 0


def deletion_key(kept: KeptMessage) -> str:
    """What the TIMER_DEL_UNIQKEY of a deletion must be to delete this message."""
    return f"{kept.find(names.REAL_TOPIC)}+{kept.find(names.UNIQ_KEY)}"


def _with_times(text: bytes, enqueued: int, dequeued: int) -> bytes:
    """Properties with the times at which a message was put on the wheel and taken from it."""
    if _TIMES_END in text:  # a message that was rolled has such times already
        times = {names.TIMER_ENQUEUE_MS: str(enqueued), names.TIMER_DEQUEUE_MS: str(dequeued)}
        return stored_text({**names.decode_properties(text.decode()), **times})
    return (_TIMES if text[-1:] in _ENDS else _MORE_TIMES) % (text, enqueued, dequeued)


def recall_handle(properties: dict[str, str], broker_name: str) -> str | None:
    """The handle of a message that waits in the timer topic with these properties; None when it gets none."""
    topic, out_time = properties.get(names.REAL_TOPIC), properties.get(names.TIMER_OUT_MS)
    message_id = properties.get(names.UNIQ_KEY)
    if topic is None or out_time is None or message_id is None or topic.startswith(RETRY_PREFIX):
        return None
    return RecallHandle(topic, broker_name, int(out_time) + 1, message_id).encode()
