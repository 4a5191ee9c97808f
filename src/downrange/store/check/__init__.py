"""Reading and checking a store directory without running a broker on it."""
