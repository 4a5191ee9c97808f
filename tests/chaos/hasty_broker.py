"""`downrange broker` whose locks of queues live for 10 s, not for a minute: `python -m tests.chaos.hasty_broker …`.

A queue of a member that was killed waits for the end of its lock. Members in `clients.py` trust a lock for half of that
time, as they do with the times of RocketMQ.
"""

from __future__ import annotations

from typing import Final

from downrange.broker import queue_locks
from downrange.cli.main import main

LOCK_LIVES_SECONDS: Final = 10

if __name__ == "__main__":
    setattr(queue_locks, "LOCK_LIVES_MILLIS", LOCK_LIVES_SECONDS * 1000)  # noqa: B010  it is Final
    main()
