"""A second copy of the log: masters push it, slaves follow. Bytes and rules: docs/formats/replication.md."""
