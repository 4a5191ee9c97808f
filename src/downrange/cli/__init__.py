"""The `downrange` command: a thin layer over the app modules of the servers, the store and the client."""
