"""The key index: finds messages by topic, key and time."""
