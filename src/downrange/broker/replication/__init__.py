"""Replication: masters push their log, slaves copy it. Bytes and rules: docs/formats/replication.md."""
