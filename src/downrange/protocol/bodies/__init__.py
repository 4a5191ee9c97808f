"""What commands carry, typed: one file per family of requests, headers and JSON bodies side by side.

A header is a frozen struct whose fields travel as strings (`fields.py`), a body is a frozen struct that travels as JSON
(`body.py`). Both keep RocketMQ's names on the wire and ours in Python. Members a peer sends beyond those declared are
ignored, so a newer peer can always be read.
"""
