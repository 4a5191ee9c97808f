"""The gRPC protocol of RocketMQ 5: a server of its own port in front of the brokers of a cluster."""
