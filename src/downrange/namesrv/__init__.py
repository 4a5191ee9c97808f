"""The name server: knows which brokers are alive and which topics they serve."""
