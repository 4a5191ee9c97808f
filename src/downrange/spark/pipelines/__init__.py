"""Bulk work on topics, one function each: archive topics, replay an archive, query with SQL, count and draw."""
