"""Consumers: they share the queues of a topic with their group, or take all of them, and remember how far they are."""
