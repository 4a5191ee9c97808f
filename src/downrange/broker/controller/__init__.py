"""A broker under a controller: its identity, its heartbeats, and the role that the controller gives it."""
