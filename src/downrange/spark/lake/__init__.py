"""The lake: archived messages as a Delta table, on a disk or in an object store. Uses no Spark session."""
