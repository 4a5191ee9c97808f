"""The typed headers and JSON bodies of commands, one file per family of requests.

A header is a frozen struct whose fields travel as strings (`fields.py`), a body is a frozen struct that travels as JSON
(`body.py`). Both keep RocketMQ's names on the wire and ours in Python. Members that are not declared are ignored, so
that a newer peer can be read.
"""
