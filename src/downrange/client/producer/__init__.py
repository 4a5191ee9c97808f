"""Sending messages: the producers, and everything only they need."""
