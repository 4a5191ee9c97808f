"""Converts between remoting bytes and commands, without sockets, files, clocks or logging."""
