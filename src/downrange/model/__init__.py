"""Plain data and pure rules: what a message, a record, a topic and a queue are. Imports nothing of ours."""
