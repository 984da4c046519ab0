"""Links between processes: gRPC channels, protobuf conversion, TLS, addresses and timeouts."""
