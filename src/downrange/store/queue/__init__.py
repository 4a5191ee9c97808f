"""Consume queues: for each topic queue, where its messages lie in the commit log."""
