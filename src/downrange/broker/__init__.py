"""The broker: stores messages, serves them to consumers, and keeps track of connected clients."""
