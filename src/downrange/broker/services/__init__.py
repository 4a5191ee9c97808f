"""Coroutines that run as long as the broker does; they are stopped by cancelling them."""
