"""How often this process has forked itself off: tells a child from its parent.

The process id tells the same, but asking for it is a system call, and so is asyncio.get_running_loop, which asks for it
up to Python 3.11. Both take more time than choosing a queue.
"""

from __future__ import annotations

import os

count = 0


def _after_fork_in_child() -> None:
    global count
    count += 1


os.register_at_fork(after_in_child=_after_fork_in_child)
