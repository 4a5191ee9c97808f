"""Stores messages in files as Apache RocketMQ 4.9 does. Synchronous: no sockets, no event loop, no threads."""
