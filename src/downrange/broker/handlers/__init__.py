"""The handlers of a broker, one file per request family. Each reads the header, checks, acts, and makes the reply."""
