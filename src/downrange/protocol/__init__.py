"""Remoting bytes <-> commands. No sockets, files, clocks or logging: bytes in, values out."""
