"""The lake: archived messages as Parquet files, with a manifest that says which files count. Uses no Spark session."""
