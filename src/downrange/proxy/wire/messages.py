"""The classes of the messages in schema.py, by their names; messages.pyi says what each has."""

from downrange.proxy.wire.schema import message_classes

globals().update(message_classes())
