"""The protobuf messages of the gRPC protocol."""
