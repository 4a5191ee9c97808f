"""What a broker answers, one file per request family. A handler reads its header, checks, acts, and makes the reply."""
