"""asyncio sockets around protocol/: connections, servers, a pool. Knows commands, not what they mean."""
