"""Downrange: a message platform that speaks Apache RocketMQ."""

__version__ = "0.1.0"
