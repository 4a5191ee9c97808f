"""The producers for code without an event loop, and their own connections to brokers."""
