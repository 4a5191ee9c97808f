"""Messages <-> files, byte-compatible with Apache RocketMQ 4.9. Synchronous: no sockets, no event loop, no threads."""
