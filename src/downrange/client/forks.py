"""How many forks lie between this process and its first ancestor: tells a child of a fork from its parent.

The process id would do, but reading it is a system call, which takes more time than choosing a queue.
asyncio.get_running_loop reads it as well, up to Python 3.11.
"""

from __future__ import annotations

import os

count = 0


def _after_fork_in_child() -> None:
    global count
    count += 1


os.register_at_fork(after_in_child=_after_fork_in_child)
