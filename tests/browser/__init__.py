"""The console in a real browser. A package, so that its servers and its browser end with its last test."""
