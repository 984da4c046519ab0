import node  # noqa: F401  # sets gRPC's environment, which must precede the first import of grpc
