"""The name server: who serves what, and who is alive."""
