"""The index of timer messages: which record of `rmq_sys_wheel_timer` is due in which tick. Files, no event loop."""
