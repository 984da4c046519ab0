"""The frontend process of a node: gRPC, health, drain and metrics."""
