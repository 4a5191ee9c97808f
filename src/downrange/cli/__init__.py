"""The `downrange` command: a thin skin over the servers' app modules, the store and the client."""
