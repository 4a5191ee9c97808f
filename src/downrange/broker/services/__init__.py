"""Coroutines that run for as long as the broker does. Stopping one is cancelling it."""
